"""Figures and tables of any training runs, wherever they are: `python -m asr_am.report.compare RUN RUN ... --out DIR`.

RUN is a run's directory, exp/<corpus>/train/<run>; word error rates are those in exp/<corpus>/score. DIR gets
COMPARE.md and the figures it shows.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.report import tables
from asr_am.report.plots import plot_heldout
from asr_am.report.results import Score, read_scores
from asr_am.report.runs import TrainingRun, read_training_run
from asr_am.report.strategies import strategy_sections


class _Parser(argparse.ArgumentParser):
    """Bad options end like bad input: one line and exit code 1."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists the options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 after one line on stderr about bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parse(given)
        compare(options.runs, options.out, shlex.join(["python", "-m", "asr_am.report.compare", *given]))
    except InputError as error:
        print(f"asr_am.report.compare: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"asr_am.report.compare: {error.filename}: {error.strerror}; is --out writable?", file=sys.stderr)
        return 1
    print(options.out / "COMPARE.md")
    return 0


def compare(folders: Sequence[Path], out: Path, command: str) -> None:
    """Write out/COMPARE.md and its figures. command: what makes them again, for the reader.

    InputError: a folder without a finished epoch, or with a malformed summary.json.
    """
    runs = _told_apart([read_training_run(folder) for folder in _once(folders)])
    corpora = list(dict.fromkeys(run.setting.corpus for run in runs))
    out.mkdir(parents=True, exist_ok=True)
    plot_heldout(runs, ", ".join(corpora), out / "heldout.png")
    sections = [
        "# Training runs compared",
        f"Made again by\n\n    {command}",
        "![Held-out loss by epoch](heldout.png)",
        "Held-out loss (nats per frame) and frame error rate of the best epoch.",
        tables.training(runs),
        *strategy_sections(runs, _scores(runs), out, ""),
    ]
    write_lines(out / "COMPARE.md", ["\n\n".join(sections)])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m asr_am.report.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory, with its summary.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    return parser.parse_args(arguments)


def _once(folders: Sequence[Path]) -> list[Path]:
    """Each directory once, in the order given."""
    return list({os.path.abspath(folder): folder for folder in folders}.values())


def _told_apart(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    """Runs of equal name named by their paths."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def _scores(runs: Sequence[TrainingRun]) -> list[Score]:
    """Of every exp/<corpus> that the runs are from."""
    corpus_dirs = dict.fromkeys(run.corpus_dir for run in runs)
    return [score for corpus_dir in corpus_dirs for score in read_scores(corpus_dir)]


if __name__ == "__main__":
    sys.exit(main())
