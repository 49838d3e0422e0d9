#!/usr/bin/env bash
# Sets up and checks everything: style, types, tests. What CI runs. Further arguments go to pytest.
#   scripts/test.sh [-k NAME] [tests/hmm ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export OMP_NUM_THREADS=1                   # one arithmetic thread per worker: more on contended cores are far slower
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy &                           # beside the tests, which wait for other processes now and then
types=$!
status=0
# by files in the order of tests/conftest.py, so that a fixture of a module is made once
.venv/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait "$types" || { echo "test: mypy found errors, see above" >&2; exit 1; }
exit "$status"
