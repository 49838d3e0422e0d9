"""Compares the criteria of training on all models: parameters, speed in training and decoding, errors.

    python -m scripts.bench.criteria RECIPE [override ...] [--criteria ce mmi chain ctc]
        [--models blstm tdnnf conformer] [--jobs 2]

Runs the stages of recipes/RECIPE/run.sh up to 9 for each, on one thread, `--jobs` at a time. What is finished is not
done again. MMI continues from cross-entropy, and its epochs and minutes come in addition. Where it makes more errors on
dev, stage decode takes the weights before it. Chain models and CTC train from random weights, for twice the epochs.
Neither a second network nor training on dev follows.

The criterion's share is that of the seconds of a training step that are not the network's, with its output layer. It is
measured afterwards, with nothing beside it. The real-time factor is that of the network and the search on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from asr_am.report.markup import table
from asr_am.stages.layout import corpus_dir
from asr_am.stages.networks import mmi_run
from asr_am.stages.option_checks import compose_job
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.resolvers import composing
from asr_am.stages.train_config import TrainConfig
from asr_am.train.run_setup import RunSetup

MODELS = ("blstm", "tdnnf", "conformer")
CRITERIA = {
    "ce": [],
    "mmi": ["mmi.train=true"],
    "chain": ["train=chain", "decode.windows=[63/31,96/48]"],
    "ctc": ["train=ctc", "decode.windows=[whole]"],
}  # fmt: skip
FROM_RANDOM = ("chain", "ctc")
ONLY = ["second.train=false", "final.train=false", "rescore=false", "systems=[nnet]", "logger=none", "train.threads=1"]
ROUNDS = 7


def overrides_of(recipe: str, criterion: str, model: str, more: Sequence[str]) -> list[str]:
    """Returns the overrides of a run. Call it where one can compose."""
    name = "ce" if criterion == "mmi" else criterion
    chosen = [f"model={model}", "mmi.train=false", *ONLY, *more, *CRITERIA[criterion], f"run={model}-{name}-s${{seed}}"]
    if criterion in FROM_RANDOM:
        cfg = compose_job([f"corpus={recipe}", *chosen])
        chosen += [f"train.epochs={2 * cfg.train.epochs}", f"schedule.anneal_from={2 * cfg.schedule.anneal_from}"]
    return chosen


def run(recipe: str, first: int, last: int, overrides: Sequence[str]) -> None:
    command = [f"recipes/{recipe}/run.sh", "--plain", "--nj", "1", "--stage", str(first), "--stop-stage", str(last)]
    done = subprocess.run([*command, *overrides], cwd=ROOT, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"{' '.join([*command, *overrides])} failed")


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measured(cfg: DictConfig) -> tuple[int, float]:
    """Returns the number of weights of a run, and the criterion's share of a training step on the first batch."""
    with tempfile.TemporaryDirectory() as out:
        setup = TrainConfig.parse(cfg, Path(out)).make_run()
        assert isinstance(setup, RunSetup)
        model, batch = setup.model(), setup.loader.batch(setup.plan(0), 0)
        gradient_BTP = torch.randn_like(model(batch.x_BTF, batch.lengths_B))
        ways = [
            lambda: model(batch.x_BTF, batch.lengths_B).backward(gradient_BTP),
            lambda: setup._loss(model, batch)[0].backward(),
        ]
        rounds = [[seconds(way) for way in ways] for _ in range(1 + ROUNDS)][1:]
    network, step = (statistics.median(times) for times in zip(*rounds, strict=True))
    return setup.num_weights, max(0.0, 1 - network / step)


def row(exp: Path, criterion: str, run: str, lm: str) -> list[str]:
    """Returns a line of the table from the files of a finished run."""
    folder, decoded = exp / "train" / run, f"{run}_{lm}"
    cfg, training = OmegaConf.load(folder / "config.yaml"), json.loads((folder / "summary.json").read_text())
    wer = json.loads((exp / "score" / decoded / "wer.json").read_text())
    choice = json.loads((exp / "decode" / decoded / "decode.json").read_text())
    assert isinstance(cfg, DictConfig)
    (weights, share), (low, high) = measured(cfg), wer["all"]["interval"]
    before = "" if choice["chosen"]["network"] == run else " (before it)"
    return [
        criterion + before, cfg.model.name, f"{weights / 1e6:.2f} M", str(training["epochs_done"]),
        f"{training['seconds'] / 60:.1f}", f"{training['frames_per_second']:,.0f}", f"{share:.0%}",
        str(choice["chosen"]["dev_errors"]), f"{wer['all']['wer']:.2f} [{low:.2f}, {high:.2f}]",
        f"{choice['test']['real_time_factor']:.3f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--criteria", nargs="+", choices=CRITERIA, default=list(CRITERIA))
    parser.add_argument("--models", nargs="+", choices=(*MODELS, "blstm_lfr"), default=list(MODELS))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    arguments, more = parser.parse_known_args()
    cells = [(criterion, model) for criterion in arguments.criteria for model in arguments.models]
    with composing():
        run(arguments.recipe, 0, 0, [*ONLY, *more])  # sizes and epochs follow the hours of its training speech
        overrides = {cell: overrides_of(arguments.recipe, *cell, more) for cell in cells}
        for cell in cells:  # one after another, as several have the same examples
            run(arguments.recipe, 1, 5, overrides[cell])
        with ThreadPoolExecutor(arguments.jobs) as pool:
            todo = [cell for cell in cells if cell[0] != "ce" or ("mmi", cell[1]) not in cells]  # MMI begins with it
            list(pool.map(lambda cell: run(arguments.recipe, 6, 9, overrides[cell]), todo))
        torch.set_num_threads(1)
        rows = []
        for cell in cells:
            cfg = compose_job([f"corpus={arguments.recipe}", *overrides[cell]])
            name = mmi_run(cfg) if cell[0] == "mmi" else cfg.run
            rows.append(row(corpus_dir(cfg), cell[0], name, cfg.lms[0]))
    header = ["criterion", "model", "parameters", "epochs", "minutes", "frames/s", "criterion's share", "dev errors"]
    print(table([*header, "WER [95 %]", "real-time factor"], rows))


if __name__ == "__main__":
    main()
