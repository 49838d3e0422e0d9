"""Random faults, by seed, for every strategy: `python -m tests.support.soak 1000`.

A scenario slows learners, lets the time of batches vary, delays and loses letters, and kills learners. What must hold:
nothing hangs, every batch is done exactly once by the count of those who computed the gradients, weights stay finite,
and the held-out loss is that of a run without faults (in step, after resuming: the very bits are).
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Cluster, Crash, Faults
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import LearnerLost
from tests.support.toy_problem import Problem, heldout
from tests.support.toy_training import Checkpoints, Life, hardware, train

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "sync": Sync, "sync-weights": partial(Sync, form="weights"), "hybrid": Hybrid, "dpsgd": Dpsgd,
    "gtc": partial(Gtc, density=0.1), "bmuf": partial(Bmuf, block_size=3),
    "htm": partial(Htm, group_size=2, density=0.1, block_size=3),
    "adpsgd": partial(Adpsgd, timeout=3.0), "ps_sync": partial(PsSync, servers=2, timeout=3.0),
    "ps_async": partial(PsAsync, servers=2, timeout=3.0), "psp": partial(Psp, servers=2, timeout=3.0, c=2, b=0.5),
}  # fmt: skip
FORGIVING = {"adpsgd", "ps_async", "psp"}  # go on without a learner that died
SERVED = {"ps_sync", "ps_async", "psp"}  # by ranks 0 and 2
IN_STEP = {"slow", "crash", "resumed"}
KINDS = {
    "sync": IN_STEP, "sync-weights": IN_STEP, "hybrid": IN_STEP, "dpsgd": IN_STEP | {"late"},
    "gtc": IN_STEP, "bmuf": IN_STEP, "htm": IN_STEP,
    "adpsgd": {"slow", "late", "lost", "half_done", "crash", "dead", "rejoined", "handed out again"},
    "ps_sync": IN_STEP | {"late", "lost"},
    "ps_async": {"slow", "late", "lost", "crash", "dead", "rejoined", "handed out again"},
    "psp": {"slow", "late", "lost", "late_gradients", "crash", "dead", "rejoined", "handed out again"},
}  # fmt: skip
SHORT = Problem(batches=19, epochs=2, rounds_per_segment=2)  # 10 rounds of 4 learners: for bits that are the same
LONG = Problem(batches=58, epochs=3, rounds_per_segment=4, lr=0.06)  # 45 rounds: for a loss that is much the same
TOLERANCE = 0.05


def make_cluster(name: str, seed: int) -> Cluster:
    """Each kind of fault in some of the scenarios, and in all of them somebody left to gossip with."""
    rng = random.Random(f"{name} {seed}")
    slow = {rank: rng.choice([1.5, 3.0, 10.0]) for rank in range(4) if rng.random() < 0.2}
    seconds = 20.0 if name in FORGIVING else 8.0 * max(slow.values(), default=1.0)  # that a run takes, about
    crashes = [
        Crash(rank, at=rng.uniform(0.0, seconds), restart_after=rng.choice([0.0, 0.7, 5.0]))
        for rank in range(4)
        if rng.random() < 0.25
    ]
    if len(crashes) == 1 and rng.random() < 0.4:
        rank = crashes[0].learner | 1 if name in SERVED else crashes[0].learner  # without a server it ends
        slow, crashes = {}, [replace(crashes[0], learner=rank, restart_after=None)]
    late_share, late_seconds = rng.choice([(0.0, 0.0), (0.5, 0.1), (0.5, 1.0), (0.1, 5.0)])
    lost_share = rng.choice([0.0, 0.02, 0.1]) if name in FORGIVING | SERVED else 0.0  # in step nobody sends twice
    faults = Faults(slow, crashes, late_share, late_seconds, lost_share)
    return replace(hardware(jitter=rng.choice([0.0, 0.2, 0.6])), faults=faults)


def problem_of(name: str) -> Problem:
    if name in FORGIVING & SERVED:
        return replace(LONG, lr=0.02)  # momentum and staleness together bear no more
    return LONG if name in FORGIVING else SHORT


@cache
def undisturbed(name: str) -> Tensor:
    """The consensus [N] at the end of a run without faults."""
    return train(problem_of(name), STRATEGIES[name], cluster=hardware(jitter=0.0))[0].consensus[-1]


def run(name: str, seed: int) -> Counter[str]:
    """What went wrong in a scenario, by kind; AssertionError where it should not have mattered."""
    seen: Counter[str] = Counter()
    lives = train_through_crashes(name, seed, make_cluster(name, seed), seen)
    for life in lives.values():
        seen.update(life.strategy.team.comm_stats.faults)
        for kind in ("half_done", "late_gradients"):
            seen[kind] += life.strategy.metrics[kind]
        seen["rejoined"] += life.strategy.team.incarnation
        assert life.replica.isfinite().all() and life.consensus[-1].isfinite().all()
    first = next(iter(lives.values()))
    seen["handed out again"] = sum(len(record.released) for record in first.records)
    seen["dead"] = SHORT.learners - len(lives)
    if not first.strategy.fault_tolerant:
        assert torch.equal(first.consensus[-1], undisturbed(name)), "not the bits of a run without faults"
    change = heldout(first.consensus[-1]) / heldout(undisturbed(name)) - 1
    assert abs(change) < TOLERANCE, f"held-out loss changes by {change:.1%}"
    return seen


def train_through_crashes(name: str, seed: int, cluster: Cluster, seen: Counter[str]) -> dict[int, Life]:
    """All lives; in step again from the last checkpoint after every crash, which must name its learner."""
    checkpoints = Checkpoints()
    while True:
        try:
            return train(problem_of(name), STRATEGIES[name], seed=seed, cluster=cluster, checkpoints=checkpoints)
        except LearnerLost as lost:
            left = [crash for crash in cluster.faults.crashes if crash.learner != lost.rank]
            assert name not in FORGIVING and len(left) == len(cluster.faults.crashes) - 1, lost
            cluster = replace(cluster, faults=replace(cluster.faults, crashes=left))
            seen["crash"] += 1
            seen["resumed"] += checkpoints.committed > 0


@dataclass
class Tally:
    """Of one strategy. scenarios: in which a kind was seen. failed: by seed."""

    scenarios: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


def soak(name: str, seeds: range, progress: Callable[[int], None] = lambda seed: None) -> Tally:
    """All these scenarios of one strategy."""
    tally, begin = Tally(), time.monotonic()
    for seed in seeds:
        try:
            tally.scenarios.update(kind for kind, times in run(name, seed).items() if times)
        except Exception:
            tally.failed[seed] = traceback.format_exc(limit=-2)
        progress(seed)
    tally.seconds = time.monotonic() - begin
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh", description="Random faults on the virtual cluster.")
    parser.add_argument("seeds", type=int, nargs="?", default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--strategy", choices=STRATEGIES, help="only this one")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    torch.set_num_threads(1)
    logging.getLogger("asr_am").setLevel(logging.ERROR)  # replacements tell that they are back
    failed = False

    def progress(seed: int) -> None:
        done = seed - seeds.start + 1
        if done % 50 == 0 or done == len(seeds):
            print(f"\r{name}: {done} of {len(seeds)} seeds", end="", file=sys.stderr, flush=True)

    for name in [arguments.strategy] if arguments.strategy else STRATEGIES:
        tally = soak(name, seeds, progress)
        kinds = ", ".join(f"{kind} {tally.scenarios[kind]}" for kind in sorted(KINDS[name]))
        print(f"\r{name}: {len(seeds)} seeds, {tally.seconds:.0f} s, {len(tally.failed)} failed; seeds with {kinds}")
        for seed, error in tally.failed.items():
            print(f"{error}again: scripts/soak.sh 1 --strategy {name} --first {seed}")
        unseen = KINDS[name] - tally.scenarios.keys() if len(seeds) >= 40 else set()
        if unseen:
            print(f"{name}: never seen: {', '.join(sorted(unseen))}")
        failed = failed or bool(tally.failed or unseen)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
