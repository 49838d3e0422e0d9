#!/usr/bin/env bash
# Runs for hours what the tests run for seconds: random faults, kills, damaged files, mistakes. Nightly, by one command.
#   scripts/soak/run.sh [PART ...]
# PART is one of these, by default all:
#   virtual         faults of every strategy on the virtual cluster
#   control         the same with supervisor, disk, power and restarts
#   control_mutants mistakes in the library that `control` must find
#   processes       kills, pauses and cuts off real processes, and breaks their disk. Needs root
#   mpi_kills       kills processes of MPI. Needs the extra mpi
#   other_users     another user of the host attacks a run. Needs root
#   recipe_kills    kills every stage of a recipe, and compares with an undisturbed run
#   dask_workers    kills Dask workers in every stage, and the scheduler. Needs the extra cluster
#   readers         damages the files of every reader
#   mistakes        mistakes of a first hour, on a small finished run
# Each is a program, python -m scripts.soak.PART --help, and prints the command that repeats a failure. The last results
# are in scripts/soak/RESULTS.md. Exits with 1 if a part has failed, after all others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- virtual control control_mutants processes mpi_kills other_users recipe_kills dask_workers readers mistakes
failed=()
for part in "$@"; do
    begin=$SECONDS
    .venv/bin/python -m "scripts.soak.$part" || failed+=("$part")
    echo "soak: $part took $((SECONDS - begin)) s"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "soak: failed (see above): ${failed[*]}" >&2
    exit 1
fi
