"""Compares any training runs in figures and tables: `python -m asr_am.report.compare RUN RUN ... --out DIR`.

RUN is the directory of a run, exp/<corpus>/train/<run>. Word error rates are read from exp/<corpus>/score. The output
is DIR/COMPARE.md and the figures it shows.

Differences are computed between runs with the same corpus, train.subset, features, alignment, examples and criterion,
and between scores of the same test set. The rows are labelled with all other options that differ. Of several runs, at
least two must have the same training data.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asr_am.data.ownership import check_own_dir, mark_own_dir
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.report import tables
from asr_am.report.comparisons import describe_sets
from asr_am.report.markup import code
from asr_am.report.plots import plot_heldout
from asr_am.report.results import SystemScore, read_scores
from asr_am.report.runs import TrainingRun, group_runs, read_training_run
from asr_am.report.strategies import strategy_sections
from asr_am.score.cli import CommandLineParser, exit_code

COMMAND = "asr_am.report.compare"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 1 after one line on stderr about bad input."""
    words = list(sys.argv[1:] if arguments is None else arguments)

    def work() -> None:
        options = _parse(words)
        compare(options.runs, options.out, shlex.join(["python", "-m", COMMAND, *words]))
        print(options.out / "COMPARE.md")

    return exit_code(COMMAND, work)


def compare(folders: Sequence[Path], out: Path, command: str) -> None:
    """Writes out/COMPARE.md and its figures. A folder that is repeated counts once.

    Raises:
        InputError: a folder is missing, has no finished epoch or a malformed file, no two runs have the same training
            data, or `out` has files that are not of a comparison, or is in the output of a stage.
    """
    check_own_dir(out, COMMAND)
    once = {os.path.abspath(folder): folder for folder in folders}.values()
    runs = _with_unique_names([read_training_run(folder) for folder in once])
    _check_comparable(runs)
    corpora = list(dict.fromkeys(run.config.corpus for run in runs))
    mark_own_dir(out, COMMAND)
    plot_heldout(runs, ", ".join(corpora), out / "heldout.png")
    sections = [
        "# Training runs compared",
        f"Made again by\n\n{code(command)}",
        "![Held-out loss by epoch](heldout.png)",
        f"Held-out loss (nats per frame) and frame error rate of the best epoch.{tables.about_criteria(runs)}",
        tables.training(runs),
        *strategy_sections(runs, _scores(runs), out, ""),
    ]
    write_lines(out / "COMPARE.md", ["\n\n".join(sections)])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandLineParser(
        prog=f"python -m {COMMAND}", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory, with its summary.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    return parser.parse_args(arguments)


def _with_unique_names(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    """Names runs of equal name by their paths."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def _check_comparable(runs: Sequence[TrainingRun]) -> None:
    """Raises InputError if no two of several runs have the same training data."""
    groups = group_runs(runs)
    kinds = [(group.config.corpus, group.config.data) for group in groups]
    if len(groups) > 1 and len(set(kinds)) == len(kinds):
        raise InputError(
            f"no two runs have the same training data: {'; '.join(describe_sets(groups))}; give runs with equal values"
        )


def _scores(runs: Sequence[TrainingRun]) -> list[SystemScore]:
    """Reads the scores of every exp/<corpus> that the runs belong to."""
    corpus_dirs = dict.fromkeys(run.corpus_dir for run in runs)
    return [score for corpus_dir in corpus_dirs for score in read_scores(corpus_dir)]


if __name__ == "__main__":
    sys.exit(main())
