"""Stage 9, score: word error rates of every system with every LM, Hub5 style, in exp/<corpus>/score/<run>_<lm>.

LM weight and insertion penalty are those that stages decode and rescore have chosen on dev. Test is scored once, with
them. The results of a network are added to the experiment tracking of its training run (conf/logger).
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from asr_am.options import build
from asr_am.stages.app import stage
from asr_am.stages.layout import Layout, layout
from asr_am.stages.rescore import mixture_name
from asr_am.stages.sections import ScoreOptions, values
from asr_am.stages.systems import SystemPlan, language_models, plans
from asr_am.stages.target import Target, git_commit

if TYPE_CHECKING:
    from asr_am.score.scoring import Reference, Score
    from asr_am.train.tracking import Tracker

log = logging.getLogger(__name__)


def targets(cfg: DictConfig) -> list[Target]:
    """Returns a target per system and LM, and with rescore=true another per system and mixture."""
    paths = layout(cfg)
    made = []
    options = values(cfg.score)
    check_options(cfg)
    for system in plans(cfg):
        for name in language_models(cfg):
            lms = {"decode": name} | ({"rescore": mixture_name(cfg, name)} if cfg.rescore else {})
            for part, lm in lms.items():
                run = f"{system.name}_{lm}"
                words = paths.root / part / run
                score = partial(score_run, paths, words, system, lm, options, values(cfg.logger))
                made.append(Target(paths.scored(run), [paths.data, words], options, score, version=2))
    return made


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    build(ScoreOptions, values(cfg.score), "score")


def score_run(paths: Layout, words: Path, plan: SystemPlan, lm: str, options: dict, logger: dict, out: Path) -> None:
    """Scores test with the weight and penalty chosen on dev.

    Writes table, errors, wer.json and segments.json, and for dev and test the words and the reference that were scored:
    <set>/hyp.ctm and <set>/ref.stm.
    """
    from asr_am.decode.ctm import ctm_name
    from asr_am.decode.dev_choice import DevChoice, read_reference
    from asr_am.score.output import write_alignments, write_table
    from asr_am.stages.train_config import tracker_factory

    tracker = tracker_factory(logger)()
    run = words.name
    on_dev = DevChoice.load(words)
    test = read_reference(paths.data, "test", options["subsets"])
    if test.case_sensitive:
        log.info("%s: scored with regard to case, as the lexicon has words that differ only in case (sclite -s)", run)
    score = test.score(words / "ctm" / ctm_name("test", on_dev.scale))
    score = replace(  # without the other labels of the STM
        score, subsets={name: score.subsets[name] for name in options["subsets"]}
    )
    head = {
        "system": plan.name, "lm": lm, "seed": plan.seed, "lm_weight": on_dev.lm,
        "insertion_penalty": on_dev.insertion, "dev_wer": 100.0 * on_dev.errors / max(1, on_dev.words),
        "commit": git_commit(), "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "reference": reference_digest(test),
    }  # fmt: skip
    counts = summary(score, options["bootstrap"])
    for subset in ("dev", "test"):
        (out / subset).mkdir(exist_ok=True)
        shutil.copyfile(words / "ctm" / ctm_name(subset, on_dev.scale), out / subset / "hyp.ctm")
        shutil.copyfile(paths.data / subset / "ref.stm", out / subset / "ref.stm")
    (out / "wer.json").write_text(json.dumps(head | counts, indent=1) + "\n")
    (out / "segments.json").write_text(json.dumps(per_segment(score)) + "\n")
    write_alignments(score, out / "errors.txt")
    table = io.StringIO()
    write_table(score, table)
    (out / "table.txt").write_text(table.getvalue())
    test_wers = ", ".join(f"{name} {100.0 * value['errors'] / value['words']:.2f} %" for name, value in counts.items())
    log.info("%s: dev WER %.2f %% with LM weight %g, insertion penalty %g", run, head["dev_wer"], *on_dev.scale)
    log.info("%s: test WER %s (table: %s)", run, test_wers, paths.scored(run) / "table.txt")
    log.debug("test:\n%s", table.getvalue())
    if plan.model is not None:
        track(tracker, plan.model, lm, head | counts, score)


def reference_digest(reference: Reference) -> str:
    """Returns a digest of the STM, of the GLM if there is one, and of whether case matters."""
    digest = hashlib.sha256(reference.stm.read_bytes())
    if reference.glm:
        digest.update(reference.glm.read_bytes())
    digest.update(b"case" if reference.case_sensitive else b"")
    return digest.hexdigest()[:16]


def track(tracker: Tracker, model: Path, lm: str, results: Mapping[str, Any], score: Score) -> None:
    """Adds word error rates, a table of errors per speaker and the network to the tracking of a training run."""
    from asr_am.score.output import COUNTS
    from asr_am.train.run_log import saved_config

    subsets = {name: value for name, value in results.items() if isinstance(value, dict)}
    wers = {"dev": results["dev_wer"]} | {name: value["wer"] for name, value in subsets.items()}
    rows = [[speaker, *(getattr(total, column) for column in COUNTS)] for speaker, total in score.speakers().items()]
    tracker.start(model, saved_config(model))
    tracker.summarize({f"wer/{lm}/{name}": wer for name, wer in wers.items()})
    tracker.table(f"errors/{lm}", ["speaker", *COUNTS], rows)
    tracker.save(model / "best.pt", "model", copy=False)
    tracker.finish()


def summary(score: Score, resamples: int) -> dict[str, dict]:
    """Returns counts, WER and its 95 % interval of the whole set and of each subset that has words."""
    from asr_am.score.output import to_json
    from asr_am.score.significance import bootstrap_interval

    counts = {name: value for name, value in to_json(score).items() if value["words"]}
    for name, value in counts.items():
        interval = bootstrap_interval(*score.per_segment(name), samples=resamples)
        value["interval"] = [interval.low, interval.high]
    return counts


def per_segment(score: Score) -> dict[str, tuple[int, int]]:
    """Returns errors and words of each segment, for paired comparisons."""
    return {
        f"{segment.file}-{segment.channel}-{number:05d}": (segment.counts.errors, segment.counts.words)
        for number, segment in enumerate(score.segments)
    }


main = stage("score", targets)

if __name__ == "__main__":
    main()
