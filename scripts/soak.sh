#!/usr/bin/env bash
# Random faults on the virtual cluster: slow learners, jitter, late and lost letters, crashes, for every strategy.
#   scripts/soak.sh [SEEDS=1000] [--strategy NAME] [--first SEED]
# Prints a line per strategy; ends with 1, and the command that does it again, where a scenario failed or a kind of
# fault was never seen. A thousand seeds take about six minutes of one core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
exec .venv/bin/python -m tests.support.soak "$@"
