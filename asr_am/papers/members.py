"""The runs behind the cells of a paper's table, each a dict of measures.

A run on a virtual cluster is a target of its own. A training is made by the recipe, whose stages know what is finished.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.options import build
from asr_am.signals import signal_on_parent_death
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.target import Target

if TYPE_CHECKING:
    from asr_am.distributed.cluster_config import Cluster, Workload

log = logging.getLogger(__name__)

LATE = 4.0  # seconds from which the delay of a pulled shard counts as an outlier
DIVERGED = "lower schedule.base"  # in the error of a training whose loss or gradient is not finite


@dataclass(frozen=True)
class EpochWork:
    """Options of member `epoch`: `steps` of each learner are simulated, of the `epoch_steps` of an epoch.

    Attributes:
        elements: of the vector that stands for the model. More are needed if the strategy splits it into shards.
        density: share of each gradient that exceeds any threshold.
    """

    steps: int
    epoch_steps: int | None = None
    elements: int = 4
    density: float = 0.0


@dataclass(frozen=True)
class ParallaxWork:
    """Options of member `parallax`: a `SizedModel`, a `Config`, the examples of a batch, and the steps to time."""

    model: dict[str, Any]
    examples: int
    parallax: dict[str, Any] = field(default_factory=dict)
    steps: int = 2


@dataclass(frozen=True)
class TrainWork:
    """Options of member `train`.

    Attributes:
        score: also decode and score, for the word error rate.
        trials: overrides, each for a training of its own. The one with the lowest held-out loss counts.
    """

    score: bool = False
    trials: list[str] = field(default_factory=list)


WORK = {"epoch": EpochWork, "parallax": ParallaxWork, "train": TrainWork}
MEASURES = {  # of each member, and of `train` also wer_<subset>. Not every run has all of them
    "epoch": ("step_seconds", "speed_up", "computing_share", "staleness", "megabytes_sent", "fewest_to_most", "hours",
              "late_pulls"),
    "parallax": ("step_seconds", "throughput", "speed_up", "megabytes_sent", "megabytes_moved"),
    "train": ("heldout_loss", "last_loss", "frame_error", "seconds", "fewest_to_most", "staleness", "gigabytes_sent",
              "trial"),
}  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One run of a cell.

    Attributes:
        name: of the run, in the whole table.
        folder: where a run on a virtual cluster is kept.
        config: values of the sections cluster, workload and strategy, and of learners, seed and the names of corpus and
            language models.
    """

    name: str
    kind: str
    folder: Path
    work: Mapping[str, Any]
    config: Mapping[str, Any]
    overrides: Sequence[str]
    corpus_dir: Path

    def __str__(self) -> str:
        return self.name

    def run(self) -> tuple[dict[str, float], str]:
        """Makes the run unless it is finished, and returns its measures and the commit that made it."""
        if self.kind == "train":
            return train(self)
        simulate = {"epoch": simulate_epoch, "parallax": simulate_parallax}[self.kind]
        sources = {name: self.config[name] for name in ("cluster", "workload", "strategy", "learners", "seed")}

        def make(folder: Path) -> None:
            (folder / "measures.json").write_text(json.dumps(simulate(self), indent=1) + "\n")

        Target(self.folder, [], {**sources, "kind": self.kind, "work": self.work}, make).run()
        measures = json.loads((self.folder / "measures.json").read_text())
        return measures, json.loads((self.folder / ".done").read_text())["commit"]


def _virtual(member: Member) -> tuple[Cluster, Workload]:
    from asr_am.distributed.cluster_config import Cluster, Workload

    return Cluster.build(member.config["cluster"]), Workload.build(member.config["workload"])


def _mean(counts: Mapping[int, int]) -> float:
    """Returns the mean of counted values, 0 without any."""
    return sum(value * count for value, count in counts.items()) / max(sum(counts.values()), 1)


def simulate_epoch(member: Member) -> dict[str, float]:
    """Returns the measures of (a part of) an epoch on a virtual cluster.

    speed_up is relative to the computing time of the same batches on one device, computing_share is its share of the
    number of learners. hours are those of an epoch. fewest_to_most compares the batches of the learners. late_pulls is
    the share of pulled shards that took 4 s or longer.
    """
    import torch

    from asr_am.distributed.simulator.epoch_timing import time_epoch
    from asr_am.stages.train_config import strategy_factory

    torch.set_num_threads(1)
    work = build(EpochWork, member.work, "table.work")
    hardware, workload = _virtual(member)
    learners = member.config["learners"]
    batches = work.steps * learners
    epoch = time_epoch(
        strategy_factory(dict(member.config["strategy"])), hardware, workload, learners=learners, batches=batches,
        seed=member.config["seed"], elements=work.elements, density=work.density,
    )  # fmt: skip
    speed_up = batches * workload.seconds(hardware.device, 1, 1) / epoch.seconds
    pulls = sum(epoch.pull_latency.values())
    late = sum(count for seconds, count in epoch.pull_latency.items() if seconds >= LATE)
    measures = {
        "step_seconds": epoch.seconds / work.steps,
        "speed_up": speed_up,
        "computing_share": speed_up / learners,
        "staleness": _mean(epoch.staleness),
        "megabytes_sent": epoch.bytes_sent / batches / 1e6,
        "fewest_to_most": min(epoch.batches.values()) / max(epoch.batches.values()),
    }
    if work.epoch_steps is not None:
        measures["hours"] = epoch.seconds / work.steps * work.epoch_steps / 3600
    if pulls:
        measures["late_pulls"] = late / pulls
    return measures


def simulate_parallax(member: Member) -> dict[str, float]:
    """Returns the measures of steps of Parallax.

    throughput is in examples per second of all learners. megabytes_sent are those of a learner in a step, with what
    servers send to it, and megabytes_moved counts them where they are sent and where they are received.
    """
    from asr_am.parallax.config import Config
    from asr_am.parallax.throughput import SizedModel, time_steps

    logging.getLogger("asr_am.parallax").setLevel(logging.WARNING)  # not the plan of each run
    work = build(ParallaxWork, member.work, "table.work")
    model = build(SizedModel, work.model, "table.work.model")
    hardware, workload = _virtual(member)
    learners = member.config["learners"]
    config = build(Config, work.parallax, "table.work.parallax")
    seconds, sent = time_steps(model, config, hardware, workload, learners, work.steps, member.config["seed"])
    return {
        "step_seconds": seconds,
        "throughput": learners * work.examples / seconds,
        "speed_up": learners * workload.seconds(hardware.device, 1, 1) / seconds,
        "megabytes_sent": sent / 1e6,
        "megabytes_moved": 2 * sent / 1e6,
    }


def recipe(corpus: str, arguments: Sequence[str], output: Path | None = None) -> None:
    """Runs run.sh of a recipe, which prints into the file `output` if there is one. Raises InputError if it fails."""
    command = [str(ROOT / "recipes" / corpus / "run.sh"), *arguments]
    if not Path(command[0]).exists():
        raise InputError(f"{command[0]} does not exist; run this in a checkout, with a corpus that has a recipe")
    run = {"preexec_fn": lambda: signal_on_parent_death(15), "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    if output is None:
        if subprocess.run(command, **run).returncode:  # type: ignore[call-overload]
            raise InputError(f"{' '.join(command)} failed, see above")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **run).returncode  # type: ignore[call-overload]
    if status:
        last = (output.read_text().strip().splitlines() or [f"exit status {status}"])[-1]
        raise InputError(f"{last} ({output})")


def train(member: Member) -> tuple[dict[str, float], str]:
    """Trains by the recipe, and returns the measures of the training run.

    seconds are those of the run's clock, virtual on a virtual cluster. gigabytes_sent are those of all learners.
    trial is the number of the trial that counts.
    """
    work = build(TrainWork, member.work, "table.work")
    runs = [member_of_trial(member, trial) for trial in work.trials] or [member]
    made = {number: run for number, run in enumerate(runs, 1) if train_once(run, may_diverge=bool(work.trials))}
    if not made:
        raise InputError(f"{member.name}: the training diverges in each of {len(runs)} trials; try smaller rates")
    found = {number: read_measures(run) for number, run in made.items()}
    best = min(found, key=lambda number: found[number][0]["heldout_loss"])
    measures, commit = found[best]
    if work.trials:
        measures["trial"] = best
    if work.score:
        measures |= score(made[best])
    return measures, commit


def member_of_trial(member: Member, override: str) -> Member:
    """Returns the run of a trial, whose name has the override of the trial."""
    name = f"{member.name}-{plain_name(override)}"
    overrides = [word for word in member.overrides if not word.startswith("run=")]
    return replace(
        member, name=name, folder=member.folder.with_name(name), overrides=[*overrides, override, f"run={name}"]
    )


def plain_name(text: str) -> str:
    """Returns text without what file names should not have. Different texts may become equal."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-")


def train_once(member: Member, *, may_diverge: bool) -> bool:
    """Trains. Returns False if the training diverges and may. Raises InputError if it fails."""
    try:
        stages(member, "6", "6")
    except InputError as error:
        if may_diverge and DIVERGED in str(error):
            log.warning("%s: %s", member.name, error)
            return False
        raise
    return True


def read_measures(member: Member) -> tuple[dict[str, float], str]:
    """Returns the measures of a training run, and the commit that made it."""
    from asr_am.report.runs import read_training_run

    run = read_training_run(member.corpus_dir / "train" / member.name)
    best = run.best_epoch - 1
    measures = {
        "heldout_loss": run.loss_E[best], "last_loss": run.loss_E[-1], "frame_error": run.frame_error_E[best],
        "seconds": run.seconds or 0.0,
    }  # fmt: skip
    if counts := run.batches_per_learner.values():
        measures["fewest_to_most"] = min(counts) / max(counts)
    if run.staleness:
        measures["staleness"] = _mean(run.staleness)
    if run.bytes_sent:
        measures["gigabytes_sent"] = run.bytes_sent / 1e9
    return measures, run.commit or "unknown"


def score(member: Member) -> dict[str, float]:
    """Decodes and scores by the recipe. Returns the word error rates in percent under the LM of the cell."""
    stages(member, "7", "9", "systems=[nnet]")
    (lm,) = member.config["lms"]
    counts = read_record(member.corpus_dir / "score" / f"{member.name}_{lm}" / "wer.json")
    return {
        f"wer_{subset}": count["wer"] for subset, count in counts.items() if isinstance(count, dict) and "wer" in count
    }


def stages(member: Member, first: str, last: str, *overrides: str) -> None:
    """Runs stages of the recipe for one training run."""
    log_file = member.folder.with_name(f"{member.name}_{first}.log")
    arguments = ["--stage", first, "--stop-stage", last, "--nj", "1", *member.overrides, *overrides]
    recipe(member.config["corpus"], arguments, log_file)
