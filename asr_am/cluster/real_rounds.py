"""Does real rounds of some strategies, and sets their seconds beside the predicted ones.

Learners are processes that sleep for the computing time of a batch. Weights have the model's size. With several hosts,
run it on each of them as for a training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from omegaconf import DictConfig

from asr_am.cluster.measure import run_job
from asr_am.cluster.predict import DENSITY, setting
from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.idle_training import matrix_of
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.errors import InputError
from asr_am.stages.sections import values
from asr_am.stages.train_config import strategy_factory

log = logging.getLogger(__name__)
SECONDS = 5.0  # of real computing per strategy, about
LEAST_ROUNDS = 12
SLEEP_JITTER = 0.01  # of learners that sleep. Equal ones would stay in step for ever where nothing keeps them there


@dataclass(frozen=True)
class Check:
    """Seconds per round of one strategy."""

    strategy: str
    learners: int
    measured: float
    predicted: float

    def __str__(self) -> str:
        ratio = self.predicted / self.measured
        return f"{self.strategy:12} {self.learners:3}  {self.measured:10.4f} {self.predicted:10.4f}  {ratio:5.2f}"


HEAD = f"{'strategy':12} {'n':>3}  {'measured s':>10} {'predicted':>10}  ratio"


def check(cfgs: Mapping[tuple[str, int], DictConfig]) -> Iterator[Check]:
    """Yields measured and predicted seconds per round of each strategy, on host 0. Warns of those that do not fit."""
    for (name, learners), cfg in cfgs.items():
        try:
            predicted = predicted_seconds(cfg, learners)
        except InputError as error:
            log.warning("left out: %s, %d learners: %s", name, learners, error)
            continue
        if (measured := measured_seconds(cfg, learners)) is not None:
            yield Check(name, learners, measured, predicted)


def measured_seconds(cfg: DictConfig, learners: int) -> float | None:
    """Returns the measured seconds per round of the strategy of `cfg`, None on hosts other than 0."""
    hardware, workload, rounds = emulated(cfg, learners)
    strategy = strategy_factory(values(cfg.strategy))
    job = {
        "kind": "epoch", "strategy": values(cfg.strategy), "elements": round((workload.bytes or 0) / 4),
        "rounds": rounds, "density": _density(cfg), "workload": asdict(replace(workload, emulate=True)),
        "device": hardware.device,
        "faults": {"slow": {str(rank): factor for rank, factor in hardware.faults.slow.items()}},
    }  # fmt: skip
    synchronous = strategy.func.is_synchronous(strategy.keywords)
    result = run_job(cfg, synchronous, job)
    return None if result is None else float(result["seconds"])


def predicted_seconds(cfg: DictConfig, learners: int) -> float:
    """Returns the predicted seconds per round of the strategy of `cfg`."""
    hardware, workload, rounds = emulated(cfg, learners)
    epoch = time_epoch(
        strategy_factory(values(cfg.strategy)), hardware, workload, learners=learners, batches=rounds * learners,
        elements=1024, density=_density(cfg),
    )  # fmt: skip
    return epoch.seconds / rounds


def emulated(cfg: DictConfig, learners: int) -> tuple[Cluster, Workload, int]:
    """Returns the cluster without what sleeping learners do not need, the workload, and the number of rounds."""
    hardware, workload, _ = setting(cfg, learners, learners)
    assert workload.bytes is not None and workload.seconds_per_batch is not None
    block = int(cfg.strategy.get("block_size") or 1)
    rounds = max(LEAST_ROUNDS, round(SECONDS / workload.seconds_per_batch[hardware.device]))
    workload = replace(workload, matrices=((1, *matrix_of(round(workload.bytes / 4))),))
    return replace(hardware, overlap_speed=1.0, jitter=SLEEP_JITTER), workload, -(-rounds // block) * block


def _density(cfg: DictConfig) -> float:
    return float(cfg.strategy.get("density") or DENSITY)
