"""The last lines of a recipe: word error rates, where the report is, and a command to try next.

scripts/recipe.sh calls it after the last stage: `python -m asr_am.stages.closing OVERRIDE...`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from hydra import compose
from omegaconf import DictConfig

from asr_am.stages.app import ends_on_signals, reports_errors
from asr_am.stages.layout import layout
from asr_am.stages.overrides import first_values
from asr_am.stages.resolvers import composing
from asr_am.stages.systems import plans


def closing_lines(cfg: DictConfig, corpus: str, overrides: Sequence[str]) -> list[str]:
    """Returns the lines. A system is shown with the LM that is best on dev. The command is for the best system."""
    paths = layout(cfg)
    wers, runs = [], []
    for system in plans(cfg):
        scores = [json.loads(path.read_text()) for path in sorted(paths.root.glob(f"score/{system.name}_*/wer.json"))]
        scores = [score for score in scores if score["system"] == system.name]
        if scores:
            best = min(scores, key=lambda score: score["dev_wer"])
            wers.append(f"{system.name} {100 * best['all']['errors'] / best['all']['words']:.2f} % ({best['lm']})")
            runs.append((best["dev_wer"], f"{system.name}_{best['lm'].partition('+')[0]}"))
    if not runs:
        return []
    if cfg.strategy.name == "local" and cfg.corpus.name == corpus:  # a recipe without options of its own
        command = [f"recipes/{corpus}/run.sh", "--stage", "6", *overrides]
        command += ["strategy=sync", "launcher=virtual", "learners=4"]
    else:
        command = ["python", "-m", "asr_am.transcribe", "--model", str(paths.decoded(min(runs)[1])), "my.wav"]
    return [
        f"word error rate: {', '.join(wers)}",
        f"report: {paths.report / 'index.html'}, as Markdown {paths.results}",
        f"next, for example: {shlex.join(command)}",
    ]


def main() -> None:
    """Prints the lines."""
    corpus, overrides = sys.argv[1].partition("=")[2], sys.argv[2:]
    with composing():
        cfg = compose("config", overrides=first_values([f"corpus={corpus}", *overrides]))
    for line in closing_lines(cfg, corpus, overrides):
        print(line)


if __name__ == "__main__":
    with ends_on_signals("closing"), reports_errors("closing", sys.argv[1:]):
        main()
