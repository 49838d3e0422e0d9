"""Stage 10, report: exp/<corpus>/RESULTS.md, and the page exp/<corpus>/report/index.html with plots beside it."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from asr_am.dask_jobs.job_options import JobOptions
from asr_am.data.record import read_record
from asr_am.options import RESERVED
from asr_am.stages.app import stage
from asr_am.stages.layout import Layout, layout
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.sections import values
from asr_am.stages.target import Target

log = logging.getLogger(__name__)

SHOWN = ("score/*/*.json", "train/*/summary.json", "rescore/*/rescore.json", "lm/*/lm.json", "data/corpus.json")
JOBS = ("jobs", *(f"jobs.{field.name}" for field in fields(JobOptions)))
LEFT_OUT = ("corpus", "nj", *JOBS, "data_dir", "logger", "run")  # overrides that do not change the results


def targets(cfg: DictConfig) -> list[Target]:
    """Returns the report, made again when a file that it shows is new or changed."""
    paths = layout(cfg)
    found = (path for pattern in SHOWN for path in paths.root.glob(pattern))
    shown = sorted(path for path in found if not RESERVED.search(path.parent.name))
    command = command_line(cfg.corpus.name)
    model = paths.run(cfg.run) if "nnet" in cfg.systems else None
    description = cfg.corpus.get("description") or ""
    build = partial(write, paths, command, description, model, values(cfg.logger))
    sources: dict[str, Any] = {"command": command_line(cfg.corpus.name, (*LEFT_OUT, "exp"))}  # the same in a copied exp
    sources |= {"description": description} if description else {}
    sources["shown"] = [str(path.relative_to(paths.root)) for path in shown]  # a renamed run is another one
    return [Target(paths.report, shown, sources, build, extra_outputs=[paths.results])]


def command_line(corpus: str, left_out: Sequence[str] = LEFT_OUT) -> str:
    """Returns the command that makes these results, the whole command of a sweep, as far as this stage knows it."""
    given = [word for word in sys.argv[1:] if "=" in word and word[0] != "-"] if HydraConfig.initialized() else []
    given = [override for override in given if override.split("=")[0] not in left_out]
    recipe = f"recipes/{corpus}/run.sh"
    if not (ROOT / recipe).exists():  # own data: run.sh turned its options into those of the corpus
        given = [override for override in given if not override.lstrip("+").startswith("corpus.")]
        return f"recipes/kaldi/run.sh --name {corpus} ... {shlex.join(given)}".rstrip()
    return shlex.join([recipe, *given])


def write(
    paths: Layout, command: str, description: str, model: Path | None, logger: dict[str, Any], out: Path
) -> None:  # fmt: skip
    """Writes tables and plots, prints the word error rates, and adds RESULTS.md to the tracking of a training run."""
    from asr_am.report.write import write_report

    write_report(paths.root, out, command, description)
    log.info("word error rate on the test set:\n%s", wer_table(paths))
    if model is not None and model.is_dir():
        track(model, logger, paths.results)


def track(model: Path, logger: dict[str, Any], report: Path) -> None:
    """Adds the report to the tracking of the training run in `model`."""
    from asr_am.stages.train_config import tracker_factory
    from asr_am.train.run_log import saved_config

    tracker = tracker_factory(logger)()
    tracker.start(model, saved_config(model))
    tracker.save(report, "report", copy=True)
    tracker.finish()


def wer_table(paths: Layout) -> str:
    """Returns a table with the WER in percent of every scored run, on all of the test set and on each subset."""
    from asr_am.report.results import folders

    records = (folder / "wer.json" for folder in folders(paths.root / "score"))
    scores = [read_record(path, remedy="run stage 9 (score) again") for path in records]
    subsets = list(dict.fromkeys(name for score in scores for name in score if "errors" in _counts(score, name)))
    rows = [["run", *subsets]]
    for score in scores:
        counts = [_counts(score, name) for name in subsets]
        wers = [f"{100 * count['errors'] / count['words']:.2f}" if count else "" for count in counts]
        rows.append([f"{score['system']}_{score['lm']}", *wers])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def _counts(score: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the counts of a subset, {} if `name` is another entry of wer.json."""
    value = score.get(name)
    return value if isinstance(value, dict) else {}


main = stage("report", targets)

if __name__ == "__main__":
    main()
