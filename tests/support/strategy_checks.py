"""Checks that tests of several strategies share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from tests.support import reference_algorithms as reference
from tests.support.toy_problem import Problem
from tests.support.toy_training import (
    KeptCheckpoints,
    LearnerResult,
    WrapGradient,
    hardware,
    train,
)


@dataclass
class Seen:
    """A `WrapGradient` that keeps every gradient [N] and denominator by learner, and the learning rates."""

    g: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    loss_denominator: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    rate: list[float] = field(default_factory=list)

    def __call__(self, team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
        def seen(on_bucket: BucketHook | None) -> StepResult | None:
            step_result = gradient(on_bucket)
            if step_result is not None:
                self.g[team.rank].append(strategy.params.g.clone())
                self.loss_denominator[team.rank].append(step_result.lease.loss_denominator)
                if team.rank == 0:
                    self.rate.append(step_result.lr)
            return step_result

        return seen


def check_resume(make: Callable[..., Strategy], options: OptimizerOptions, wrap: WrapGradient) -> None:
    """Stops after several segments, resuming with new learners each time, and compares with an uninterrupted run."""
    problem = Problem(batches=43, epochs=2, rounds_per_segment=4, options=options)
    settings = {"wrap": wrap, "cluster": hardware(jitter=0.0)}
    full = train(problem, make, **settings)  # type: ignore[arg-type]
    saved = KeptCheckpoints()
    parts: dict[int, list[LearnerResult]] = {rank: [] for rank in full}
    for until in (4, 8, 15, None):  # of 22 updates in six segments
        for rank, result in train(problem, make, checkpoints=saved, until=until, **settings).items():  # type: ignore[arg-type]
            parts[rank].append(result)
    for rank, result in full.items():
        last = parts[rank][-1]
        found = [w for part in parts[rank] for w in part.consensus]
        assert all(torch.equal(a, b) for a, b in zip(result.consensus, found, strict=True))
        assert torch.equal(result.replica, last.replica)
        assert [done for part in parts[rank] for done in part.computed] == result.computed
        assert last.strategy.staleness == result.strategy.staleness and last.strategy.metrics == result.strategy.metrics


def without(strategy: type[Strategy], key: str) -> type[Strategy]:
    """Returns the strategy with checkpoints that hold the initial value of `key`."""

    class Forgetting(strategy):  # type: ignore[misc, valid-type]
        def load_state_dict(self, state: dict[str, object]) -> None:
            super().load_state_dict({**state, key: self.state_dict()[key]})

        def load_counts(self, states: Iterable[dict[str, object]]) -> None:
            super().load_counts({**state, key: {}} for state in states)

    return Forgetting


PAIRS = partial(reference.pairs, 4)


MATRICES: dict[str, Callable[[int], Tensor]] = {
    "pairs": PAIRS,
    "ring": lambda step: reference.ring(4),
    "all": lambda step: torch.full((4, 4), 0.25, dtype=torch.float64),
}
