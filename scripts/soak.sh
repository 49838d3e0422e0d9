#!/usr/bin/env bash
# Injects random faults on the virtual cluster for every strategy: slow learners, jitter, late and lost messages, crashes.
#   scripts/soak.sh [SEEDS=1000] [--strategy NAME] [--first SEED]
#   scripts/soak.sh --processes [FAULTS=20] [--strategy NAME] [--first SEED] [--fault NAME] [--out FILE] [--keep FOLDER]
# The second form kills, pauses and cuts off real processes instead, and breaks their disk. It needs root.
#   scripts/soak.sh --control [SEEDS=1000] [--strategy NAME] [--first SEED] [--out FILE]
# The third form adds supervisor, disk, power and restarts to the first.
# Prints a line per strategy. Exits with 1 if a scenario fails, after the command that repeats it, or if a kind of fault
# never occurred. A thousand seeds take about six minutes of one core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
case "${1:-}" in
    --processes) shift && exec .venv/bin/python -m tests.support.process_soak "$@" ;;
    --control) shift && exec .venv/bin/python -m tests.support.control_soak "$@" ;;
esac
exec .venv/bin/python -m tests.support.soak "$@"
