"""Predicts an epoch under every strategy on a cluster, by number of learners, and says which to take.

The strategies' own code runs on the virtual cluster, for some rounds of an epoch. The batch of all learners
(train.batch_size) is the same for all numbers of learners, and its computing time is divided among them. Where the
workload has seconds of a batch, they are those of a learner with the first number. Writes predictions.json and
scaling.png into exp/cluster/<cluster>.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from asr_am import disk
from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import EpochTime, time_epoch
from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from asr_am.report.plot_style import Style, new_figure, save, tidy
from asr_am.stages.plan import model_bytes, timed_workload, updates_of_epoch
from asr_am.stages.sections import values
from asr_am.stages.train_config import strategy_factory

log = logging.getLogger(__name__)

MOST_ROUNDS, LEAST_ROUNDS = 60, 20  # that are simulated, but at least two blocks of a strategy that has blocks
STEPS = 2000  # of all learners together, within these bounds
ELEMENTS = 1024  # weights that stand for the model's, enough for a density of a hundredth
DENSITY = 0.01  # share of a gradient that strategies with a threshold send, unless `strategy.density` says it
SLOW = 3.0
EXACT = ("sync", "ps_sync", "parallax")  # the updates of one learner with the batch of all
WORTH = 0.8  # another strategy is recommended at this share of the hours of the fastest exact one
LOSSES = Path(__file__).with_name("losses.json")  # held-out losses of trainings with 16 learners, one seed
WORSE = 0.01  # and if its loss there is at most so much above that of one learner


@dataclass(frozen=True)
class Prediction:
    """An epoch.

    Attributes:
        hours: of the epoch.
        slow_hours: with all learners of one host `SLOW` times slower.
        megabytes: sent per batch of a learner.
        staleness: mean staleness of the gradients, in updates.
        death: what the death of a learner does.
        loss: relative difference of its held-out loss from that of one learner in `LOSSES`. None: not known.
    """

    strategy: str
    learners: int
    hours: float
    slow_hours: float
    megabytes: float
    staleness: float
    death: str
    loss: float | None = None


def known_loss(name: str) -> float | None:
    losses = json.loads(LOSSES.read_text(encoding="utf-8"))["losses"]
    return losses[name] / losses["local"] - 1 if name in losses else None


def predict(cfgs: Mapping[tuple[str, int], DictConfig], jobs: int) -> list[Prediction]:
    """Returns the predictions for each strategy and number of learners that fit each other. Logs the others.

    Raises:
        InputError: none fits.
    """
    first = next(iter(cfgs))[1]

    def attempt(which: tuple[str, int]) -> Prediction | str:
        try:
            return predict_one(cfgs[which], *which, first)
        except InputError as error:
            return f"{which[0]}, {which[1]} learners: {error}"

    results = parallel_map(attempt, list(cfgs), jobs, "predicting epochs", here=True)
    found = [result for result in results if isinstance(result, Prediction)]
    problems = [result for result in results if isinstance(result, str)]
    if not found:
        raise InputError(problems[0])
    for problem in problems:
        log.warning("left out: %s", problem)
    return found


def predict_one(cfg: DictConfig, name: str, learners: int, first: int) -> Prediction:
    """Returns the prediction of one strategy. Raises InputError if it does not fit the learners or the cluster."""
    hardware, workload, rounds = setting(cfg, learners, first)
    strategy = strategy_factory(values(cfg.strategy))
    density = float(cfg.strategy.get("density") or DENSITY)
    some = max(min(MOST_ROUNDS, STEPS // learners), LEAST_ROUNDS, 2 * int(cfg.strategy.get("block_size") or 0))

    def timed(cluster: Cluster) -> EpochTime:
        return time_epoch(
            strategy, cluster, workload, learners=learners, batches=some * learners, elements=ELEMENTS, density=density,
        )  # fmt: skip

    last = hardware.host_of(learners - 1)
    slow = {rank: SLOW for rank in range(learners) if hardware.host_of(rank) == last} if last else {learners - 1: SLOW}
    plain, slowed = timed(hardware), timed(replace(hardware, faults=replace(hardware.faults, slow=slow)))
    steps = max(sum(plain.staleness.values()), 1)
    goes_on = strategy.func.fault_tolerant and not strategy.func.is_synchronous(strategy.keywords)
    return Prediction(
        name, learners, plain.seconds / some * rounds / 3600, slowed.seconds / some * rounds / 3600,
        plain.bytes_sent / (some * learners) / 1e6, sum(k * n for k, n in plain.staleness.items()) / steps,
        "the others go on" if goes_on else "all start again", known_loss(name),
    )  # fmt: skip


def setting(cfg: DictConfig, learners: int, first: int) -> tuple[Cluster, Workload, int]:
    """Returns the cluster with enough hosts, the workload with seconds per batch of one learner, and updates an epoch.

    Seconds of a batch that the workload has are those of a learner of `first`.

    Raises:
        InputError: the batch cannot be divided, or the workload has no figure for the cluster's devices.
    """
    if cfg.train.batch_size % learners:
        raise InputError(f"train.batch_size={cfg.train.batch_size}: learners={learners} cannot divide it")
    hardware = Cluster.build(values(cfg.cluster))
    hardware = replace(hardware, hosts=max(hardware.hosts, math.ceil(learners / hardware.devices_per_host)))
    workload = timed_workload(cfg, hardware.device, model_bytes(cfg))
    if cfg.workload.seconds_per_batch is not None:
        seconds = {device: first / learners * each for device, each in cfg.workload.seconds_per_batch.items()}
        workload = replace(workload, seconds_per_batch=seconds)
    return hardware, workload, math.ceil(updates_of_epoch(cfg))


def table(found: Sequence[Prediction]) -> list[str]:
    """Returns the lines of the table, the fastest strategy first."""
    sizes = sorted({each.learners for each in found})
    hours = {(each.strategy, each.learners): each.hours for each in found}
    lines = [
        f"{'hours of an epoch':17}" + "".join(f"{size:>10}" for size in sizes)
        + f"{f'slow host x{SLOW:g}':>14}{'MB/batch':>10}{'staleness':>11}{'loss':>9}  a learner's death"
    ]  # fmt: skip
    for name in _by_speed(found):
        row = max((each for each in found if each.strategy == name), key=lambda each: each.learners)
        cells = [f"{hours[name, size]:10.4g}" if (name, size) in hours else f"{'–':>10}" for size in sizes]
        loss = "–" if row.loss is None else f"{row.loss:+.1%}"
        rest = f"{row.slow_hours:14.4g}{row.megabytes:10.3g}{row.staleness:11.2f}{loss:>9}  {row.death}"
        lines.append(f"{name:17}{''.join(cells)}{rest}")
    return lines


def assumed(cfg: DictConfig) -> list[str]:
    """Returns which batch the seconds of the workload were taken for, as a line, [] if it has a speed."""
    if cfg.workload.seconds_per_batch is None:
        return []
    chunks = cfg.train.batch_size / cfg.learners
    return [
        f"workload.seconds_per_batch was taken as that of {chunks:g} chunks: train.batch_size={cfg.train.batch_size}, "
        f"divided among the first number of learners, {cfg.learners}"
    ]


def _by_speed(found: Sequence[Prediction]) -> list[str]:
    """Returns the names of the strategies by their hours with the most learners that they have."""
    best: dict[str, tuple[int, float]] = {}
    for each in found:
        best[each.strategy] = min(best.get(each.strategy, (0, math.inf)), (-each.learners, each.hours))
    return sorted(best, key=lambda name: best[name])


def recommend(found: Sequence[Prediction]) -> str:
    """Returns which strategy to take, in words, and why."""
    accurate = [each for each in found if each.strategy in EXACT or (each.loss is not None and each.loss <= WORSE)]
    fastest = min(found, key=lambda each: each.hours)
    good = min(accurate or found, key=lambda each: each.hours)
    exact = [each for each in found if each.strategy in EXACT]
    safe = min(exact, key=lambda each: (each.hours, EXACT.index(each.strategy))) if exact else good
    chosen = good if good.hours < WORTH * safe.hours else safe
    words = [f"take strategy={chosen.strategy} with learners={chosen.learners}: {chosen.hours:.4g} h an epoch."]
    if chosen.strategy in EXACT:
        words.append("Its updates are those of one learner with the whole batch, so accuracy is what it was.")
    elif chosen.loss is not None:
        words.append(
            f"With 16 learners its held-out loss was {chosen.loss:+.1%} from that of one (recipes/minicts/RESULTS.md)."
        )
    if chosen is not safe:
        words.append(f"{safe.strategy}, with the updates of one learner, takes {safe.hours:.4g} h.")
    if fastest is not chosen:
        known = "an unknown loss" if fastest.loss is None else f"a loss {fastest.loss:+.1%} from that of one learner"
        words.append(f"{fastest.strategy} takes {fastest.hours / chosen.hours:.0%} of the time, with {known}.")
    robust = min(found, key=lambda each: each.slow_hours)
    if robust.strategy != chosen.strategy:
        words.append(
            f"If a host may be slow: strategy={robust.strategy}, {robust.slow_hours:.4g} h where {chosen.strategy} "
            f"takes {chosen.slow_hours:.4g} h."
        )
    return " ".join(words)


def write(found: Sequence[Prediction], folder: Path) -> None:
    """Writes predictions.json and scaling.png."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps([asdict(each) for each in found], indent=1).encode()
    disk.replace(folder / "predictions.json", lambda file: file.write(content))
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for number, name in enumerate(_by_speed(found)):
        rows = sorted((each for each in found if each.strategy == name), key=lambda each: each.learners)
        style = Style.of(number)
        axes.plot(
            [each.learners for each in rows], [each.hours for each in rows], style.line, color=style.colour,
            marker=style.marker, label=name,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("learners")
    axes.set_ylabel("hours of an epoch, predicted")
    tidy(axes, "both")
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    save(figure, folder / "scaling.png")
