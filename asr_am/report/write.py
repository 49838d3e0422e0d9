"""Writes exp/<corpus>/RESULTS.md and report/index.html from the results of scoring, training and stage lang."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asr_am.data.ownership import SIGNED
from asr_am.data.record import read_record
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.report import tables
from asr_am.report.comparisons import VERDICT_RULE, Versus, against_gmm
from asr_am.report.markup import code, literal
from asr_am.report.page import write_page
from asr_am.report.plots import plot_heldout, plot_wer
from asr_am.report.rescored import rescored_sections
from asr_am.report.results import (
    Family,
    SystemScore,
    group_by_seed,
    read_coverage,
    read_language_models,
    read_scores,
)
from asr_am.report.run_labels import system_names
from asr_am.report.run_settings import describe
from asr_am.report.runs import TrainingRun, group_runs, read_training_runs, trained_on_dev
from asr_am.report.strategies import strategy_sections
from asr_am.score.significance import SAMPLES

log = logging.getLogger(__name__)


def write_report(corpus_dir: Path, out: Path, command: str, description: str = "") -> None:
    """Writes corpus_dir/RESULTS.md, out/index.html and the plots: wer, heldout, and those that compare strategies.

    Args:
        command: command line that reproduces the results, printed for the reader.
        description: what the reader must know of the corpus.

    Raises:
        InputError: there are no scores, or a file is missing or broken.
    """
    scores = read_scores(corpus_dir)
    if not scores:
        raise InputError(f"{corpus_dir / 'score'}: no results; run stage 9 (score) first")
    runs, models = read_training_runs(corpus_dir), read_language_models(corpus_dir)
    families = _families(scores, runs)
    comparisons = against_gmm(families)
    out.mkdir(parents=True, exist_ok=True)
    plot_wer(families, corpus_dir.name, out / "wer.png")
    if runs:
        plot_heldout(runs, corpus_dir.name, out / "heldout.png")
    text = "\n\n".join(
        [
            f"# Results: {literal(corpus_dir.name)}",
            *([literal(description)] if description else []),
            f"Made again by\n\n{code(command)}",
            *_retrained(corpus_dir, scores),
            *_wer_sections(families, comparisons, read_coverage(corpus_dir)),
            "## Every run",
            "WER in percent with its 95 % bootstrap interval. LM weight and insertion penalty are those with the "
            "lowest WER on dev.",
            tables.by_run(scores),
            *_replaced(corpus_dir, scores),
            *_training_section(runs, trained_on_dev(corpus_dir)),
            *strategy_sections(runs, scores, out, "report/"),
            *rescored_sections(corpus_dir, families),
            "## Language models",
            tables.language_models(models),
        ]
    )
    path = corpus_dir / "RESULTS.md"
    write_lines(path, [SIGNED, text])
    page = write_page(corpus_dir, out, text, runs, scores)
    log.info("report: %d scored runs, %d training runs; %s and %s", len(scores), len(runs), path, page)


def _retrained(corpus_dir: Path, scores: Sequence[SystemScore]) -> list[str]:
    """Warns of runs with a network that was trained again since they were scored, by the dates in the records."""

    def record(stage: str, run: str) -> dict:
        path = corpus_dir / stage / run / ".done"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def networks(decoded: str) -> set[str]:
        """Returns the networks that a decoding run has used, also by way of other decoding runs."""
        used = [Path(path) for path in record("decode", decoded).get("inputs", ())]
        own = {path.name for path in used if path.parent.name == "train"}
        return own.union(*(networks(path.name) for path in used if path.parent.name == "decode"))

    def trained(score: SystemScore) -> str:
        return max(str(record("train", run).get("date", "")) for run in {score.system, *networks(score.run)})

    outdated = [score.run for score in scores if trained(score) > score.date]
    if not outdated:
        return []
    warning = (
        f"Trained again since they were scored: {', '.join(outdated)}. Run stages 7 to 9 (decode to score) for them."
    )
    log.warning("%s: %s", corpus_dir, warning)
    return [f"**{literal(warning)}**"]


def _replaced(corpus_dir: Path, scores: Sequence[SystemScore]) -> list[str]:
    """Names the runs that were decoded with the network before sequence training, as that made fewer errors on dev."""
    notes = []
    for score in scores:
        path = corpus_dir / "decode" / score.run / "decode.json"
        record = read_record(path) if path.exists() else {}
        tried = {attempt.get("network") for attempt in record.get("tried", ())}
        network = record.get("chosen", {}).get("network", score.system)
        if network != score.system and score.system in tried:
            notes.append(f"{score.run} was decoded with the network of {network}, which makes fewer errors on dev.")
    return [literal(" ".join(notes))] if notes else []


def _families(scores: Sequence[SystemScore], runs: Sequence[TrainingRun]) -> list[Family]:
    """Groups the scores by seed. Systems of one name that were trained in different ways get different names."""
    scored = {score.system for score in scores}
    groups = group_runs([run for run in runs if run.name in scored])
    data = {run.name: run.config.data for run in runs}
    families = []
    for family in group_by_seed(scores, system_names(groups)):
        own = data.get(family.scores[0].system, ())
        options = [option for option, all_of_it in (("train.subset", "1"), ("egs", "current"))
                   if dict(own).get(option, all_of_it) != all_of_it]  # fmt: skip
        families.append(replace(family, other_data=", ".join(describe(own, options))))
    return families


def _wer_sections(
    families: Sequence[Family], comparisons: Sequence[Versus], coverage: tuple[int, dict[str, int]] | None
) -> list[str]:
    several = max(len(family.scores) for family in families) > 1
    sections = ["## Word error rate on the test set", "![WER by system](report/wer.png)"]
    sections.append("WER in percent" + ("; of several seeds the mean, then each." if several else "."))
    if coverage:
        sections.append(_coverage(*coverage))
    for subset, counts in families[0].scores[0].subsets.items():
        sections += [f"### {literal(subset)} ({counts.words:,} words)", tables.by_system(families, subset)]
    if comparisons:
        sections += [
            "### Against the GMM",
            f"Paired bootstrap over segments ({SAMPLES:,} samples), seeds taken together; WER in percent absolute. "
            + VERDICT_RULE,
            tables.significance(comparisons),
        ]
    if unlike := {f"{family.system} ({family.other_data})": None for family in families if family.other_data}:
        sections.append(
            f"Not compared with the GMM, because their training data differ from its: {literal(', '.join(unlike))}."
        )
    return sections


def _coverage(scored: int, left_out: dict[str, int]) -> str:
    """Describes how much of the user's test set is scored."""
    lost = sum(left_out.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    return f"{scored:,} of {scored + lost:,} utterances; {lost:,} left out ({literal(reasons)})."


def _training_section(runs: Sequence[TrainingRun], on_dev: Sequence[str]) -> list[str]:
    if not runs:
        return []
    intro = "Held-out loss (nats per frame) and frame error rate of the best epoch, whose weights are decoded with."
    intro += tables.about_criteria(runs)
    if on_dev:
        intro += (
            f" Not listed: {literal(', '.join(on_dev))}. These go on from runs of the table with dev among the "
            "examples. They have no held-out loss, and decode test."
        )
    return ["## Training", "![Held-out loss by epoch](report/heldout.png)", intro, tables.training(runs)]
