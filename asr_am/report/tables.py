"""Markdown tables of RESULTS.md."""

from __future__ import annotations

from collections.abc import Sequence

from asr_am.report.comparisons import Versus, verdict
from asr_am.report.formatting import finished
from asr_am.report.markup import Formatted, table
from asr_am.report.results import Family, LanguageModel, SystemScore
from asr_am.report.runs import TrainingRun
from asr_am.score.significance import Interval


def by_system(families: Sequence[Family], subset: str) -> str:
    """Returns WER on `subset`: a row per system, a column per LM, the mean over seeds followed by each seed."""
    lms = sorted({family.lm for family in families})
    cells = {(family.system, family.lm): _wer(family, subset) for family in families}
    systems = dict.fromkeys(family.system for family in families)
    return table(["system", *lms], [[system, *(cells.get((system, lm), "–") for lm in lms)] for system in systems])


def _wer(family: Family, subset: str) -> str:
    mean = Formatted(f"**{family.wer(subset):.2f}**")
    if len(family.scores) == 1:
        return mean
    return Formatted(f"{mean} ({', '.join(f'{score.subsets[subset].wer:.2f}' for score in family.scores)})")


def by_run(scores: Sequence[SystemScore]) -> str:
    """Returns all runs: WER and interval by subset, error types, tuned LM weight and penalty, commit and date."""
    subsets = list(scores[0].subsets)
    header = ["run", *(f"{name} [95 %]" for name in subsets), "sub/del/ins", "words", "dev WER", "LM weight"]
    rows = []
    for score in scores:
        total = score.subsets["all"]
        cells = [_with_interval(score.subsets[name].wer, score.subsets[name].interval) for name in subsets]
        errors = f"{total.substitutions}/{total.deletions}/{total.insertions}"
        tuned = [f"{score.dev_wer:.2f}", f"{score.lm_weight:g}", f"{score.insertion_penalty:g}"]
        rows.append([score.run, *cells, errors, str(total.words), *tuned, score.commit, score.date])
    return table([*header, "ins. penalty", "commit", "date"], rows)


def significance(pairs: Sequence[Versus]) -> str:
    """Returns a row per pair: WER difference, its interval, and the verdict."""
    rows = []
    for pair in pairs:
        change = signed_interval(pair.outcome.difference)
        share = f"{100 * pair.outcome.probability_b_better:.1f} %"
        rows.append([pair.system.system, pair.baseline.system, pair.system.lm, change, share, verdict(pair)])
    return table(["system", "against", "LM", "difference [95 %]", "better in samples", "verdict"], rows)


def signed_interval(difference: Interval) -> str:
    return f"{difference.value:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"


def training(runs: Sequence[TrainingRun]) -> str:
    """Returns the training runs at their best epochs, with their criterion if they have several."""
    several = have_several_criteria(runs)
    header = ["run", *(["criterion"] if several else []), "strategy", "learners", "batch", "epochs", "best epoch"]
    header += ["held-out loss", "frame error"]
    header += ["frames/s", "clock", "seconds", "config", "commit"]
    rows = []
    for run in runs:
        best = run.best_epoch - 1
        config = run.config
        learners = ", then ".join(map(str, run.teams)) if run.resized else _cell(config.learners)
        settings = [run.name, *([config.criterion] if several else []), config.strategy, learners, _cell(config.batch)]
        settings.append(finished(run.epochs_done, config.epochs))
        results = [str(run.best_epoch), f"{run.loss_E[best]:.4f}", f"{run.frame_error_E[best]:.2f} %"]
        made = [run.frames_per_second, config.clock, run.seconds, run.config_hash, run.commit]
        rows.append([*settings, *results, *map(_cell, made)])
    return table(header, rows)


def have_several_criteria(runs: Sequence[TrainingRun]) -> bool:
    """Returns whether losses of some of the runs do not compare with those of others."""
    return len({run.config.criterion for run in runs}) > 1


def about_criteria(runs: Sequence[TrainingRun]) -> str:
    """Returns the sentences beside the table of `training` if the runs have several criteria, else ""."""
    if not have_several_criteria(runs):
        return ""
    return " Losses of different criteria do not compare. Those of MMI are up to a constant."


def language_models(models: Sequence[LanguageModel]) -> str:
    """Returns the LMs: source, size, and perplexity on the dev transcripts."""
    rows = []
    for model in models:
        size = " + ".join(f"{count:,}" for count in model.ngrams) or f"{model.parameters:,} parameters"
        outside = f"{model.dev_oov:,} of {model.dev_words:,}"
        rows.append([model.name, model.source, size, f"{model.dev_perplexity:.1f}", outside])
    return table(["LM", "made from", "n-grams", "dev perplexity", "dev words outside"], rows)


def _cell(value: str | float | None) -> str:
    """Formats a value, a dash for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _with_interval(wer: float, interval: tuple[float, float]) -> str:
    return f"{wer:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
