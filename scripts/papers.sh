#!/usr/bin/env bash
# Makes all tables of the four papers, published values beside ours, and the page that shows them:
# exp/minicts/tables/index.html. conf/README.md says which experiment is which table.
#   scripts/papers.sh [override=value ...]
# Takes two hours on two cores: 12 minutes without the four tables that train. May be killed: the same command goes on. A
# table that is not as published says where, and the next one is made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
timed=(parallax_table1_4 parallax_table3 parallax_fig11 parallax_fig12 htm_table1 htm_table2 psp_table1 psp_figures
    ibm_table1 ibm_table3 ibm_fig5b_6 ibm_later)
trained=(ibm_fig2b ibm_table2 psp_errors htm_errors)

missed=()
for table in "${timed[@]}" "${trained[@]}"; do
    begin=$SECONDS status=0
    .venv/bin/python -m asr_am.papers.table "+experiment=papers/$table" "nj=$(nproc)" "$@" || status=$?
    [ "$status" -le 1 ] || exit "$status"                            # Ctrl-C
    [ "$status" -eq 0 ] || missed+=("$table")
    echo "papers: $table took $((SECONDS - begin)) s"
done
.venv/bin/python -m asr_am.papers.all_tables exp/minicts
if [ ${#missed[@]} -gt 0 ]; then
    echo "papers: not all as published, or failed (see above): ${missed[*]}"
    exit 1
fi
