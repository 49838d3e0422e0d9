"""ADPSGD: what must hold exactly although nobody waits for anybody, and mistakes this finds.

All learners have unequal data, about 100 steps, and momentum 0.9.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from tests.support import reference_algorithms as reference
from tests.support.toy_problem import Problem, start_weights
from tests.support.toy_training import Life, MakeStrategy, hardware, in_time, train

PROBLEM = Problem(batches=84)  # 105 rounds of 4 learners
CLOSE = partial(torch.testing.assert_close, rtol=0.0, atol=1e-5)
BUSY = hardware(jitter=0.5, update_bandwidth=5e2, averaging_bandwidth=5e2)  # updates and averagings meet all the time


def apart(rank: int) -> Tensor:
    """Weights to start from that are not the same for any two learners [N]."""
    w = start_weights()
    return w + 0.3 * torch.randn(len(w), generator=torch.Generator().manual_seed(rank))


def replicas(lives: dict[int, Life]) -> Tensor:
    """All learners' weights at the end [λ, N]."""
    return torch.stack([lives[rank].replica for rank in sorted(lives)]).double()


def count(lives: dict[int, Life], key: str) -> int:
    return sum(life.strategy.metrics[key] for life in lives.values())


# what holds


def check_in_time(make: MakeStrategy, learners: int = 4) -> None:
    """With everybody's updates at the same moments it is decentralised SGD of staleness 1, learner by learner."""
    problem = replace(PROBLEM, learners=learners)
    lives = train(problem, make, cluster=hardware(jitter=0.0), around=in_time)
    CLOSE(replicas(lives), reference.adpsgd(problem, [lives[rank].did for rank in range(learners)]))
    for life in lives.values():
        assert life.strategy.staleness == {0: 1, 1: 420 // learners - 1}


def check_sum(make: MakeStrategy) -> None:
    """Gossip moves nothing into or out of the sum over learners: it changes by the sum of all updates."""
    updates: list[Tensor] = []

    def recording(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        step = optimizer.step

        def recorded() -> None:
            before = params.w.double()
            step()
            updates.append(params.w.double() - before)

        optimizer.step = recorded  # type: ignore[method-assign]
        return make(params, optimizer, team)

    lives = train(PROBLEM, recording, cluster=BUSY, start=apart)
    assert len(updates) == 420 and count(lives, "exchanges") > 100 and count(lives, "half_done") == 0
    begin = sum(apart(rank).double() for rank in range(4))
    CLOSE(replicas(lives).sum(dim=0), begin + torch.stack(updates).sum(dim=0))


def check_contraction(make: MakeStrategy) -> None:
    """Without updates, exchanges keep the mean and bring all learners there."""
    short = replace(PROBLEM, epochs=2, lr=0.0)
    lives = train(short, make, cluster=BUSY, start=apart)
    mean = torch.stack([apart(rank) for rank in range(4)]).double().mean(dim=0)
    CLOSE(replicas(lives).mean(dim=0), mean)
    CLOSE(replicas(lives), mean.repeat(4, 1))


def check_untouched(make: MakeStrategy) -> None:
    """Nobody touches a learner's weights and gradient while it computes, however long that takes."""

    def guarded(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
        def watched(on_bucket: BucketHook | None) -> StepResult | None:
            w = strategy.params.w.clone()
            step_result = gradient(on_bucket)
            assert torch.equal(strategy.params.w, w), "the weights changed under the gradient"
            return step_result

        return watched

    train(replace(PROBLEM, epochs=2), make, cluster=BUSY, start=apart, around=guarded)


def check_nobody_waits(make: MakeStrategy) -> None:
    """With one of four learners ten times as slow, the others take its share, and go on exchanging with it."""
    problem = replace(PROBLEM, epochs=1, batches=320, rounds_per_segment=80)
    even, uneven = (train(problem, make, cluster=hardware(faults=faults)) for faults in ({}, {"slow": {1: 10.0}}))
    assert uneven[0].strategy.team.now() < 1.45 * even[0].strategy.team.now()
    for lives in (even, uneven):
        assert count(lives, "exchanges") > 0.9 * (len(lives[0].did) + len(lives[2].did))


CHECKS = [check_in_time, check_sum, check_contraction, check_untouched, check_nobody_waits]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_adpsgd(check: Callable[[MakeStrategy], None]) -> None:
    check(Adpsgd)


@pytest.mark.parametrize("learners", [2, 6])
def test_adpsgd_on_rings_of_other_sizes(learners: int) -> None:
    check_in_time(Adpsgd, learners)


def test_the_slow_have_staler_gradients_and_do_less() -> None:
    lives = train(PROBLEM, Adpsgd, cluster=hardware(faults={"slow": {1: 4.0}}))
    steps = {rank: sum(life.strategy.staleness.values()) for rank, life in lives.items()}
    assert steps == {rank: len(life.did) for rank, life in lives.items()} and sum(steps.values()) == 420
    assert 2 * steps[1] < min(steps[0], steps[2], steps[3])
    mean = {rank: sum(k * n for k, n in life.strategy.staleness.items()) / steps[rank] for rank, life in lives.items()}
    assert mean[1] > 2 * max(mean[0], mean[2], mean[3])
    # every merge of a sender was one of a receiver's, and all count once; those after the last update never do
    merges = {rank: mean[rank] * steps[rank] for rank in lives}
    assert 0 <= count(lives, "exchanges") - (merges[0] + merges[2]) <= 2
    assert 0 <= count(lives, "exchanges") - (merges[1] + merges[3]) <= 4 * len(PROBLEM.segments)


def test_the_consensus_is_the_mean_and_is_not_written_back() -> None:
    class Checked(Adpsgd):
        def consensus(self) -> Tensor:
            before = self.replica(), self.params.w.clone()
            mean = super().consensus()
            assert torch.equal(self.replica(), before[0]) and torch.equal(self.params.w, before[1])
            distances.append(float((before[0] - mean).norm()))
            return mean

    distances: list[float] = []
    lives = train(PROBLEM, Checked)
    CLOSE(lives[2].consensus[-1].double(), replicas(lives).mean(dim=0))
    assert len(distances) == 4 * len(PROBLEM.segments) and min(distances) > 1e-3, "learners stay apart while they train"
    assert lives[0].totals[-1].mean_loss < 0.6 * lives[0].totals[0].mean_loss


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_exchanges_that_a_lost_letter_ends_are_counted(share: float) -> None:
    cluster = hardware(faults={"lost_share": share})
    lives = train(PROBLEM, partial(Adpsgd, timeout=2.0), cluster=cluster)
    lost = sum(life.strategy.team.comm_stats.faults["lost"] for life in lives.values())
    assert count(lives, "half_done") == lost > 10 and count(lives, "exchanges") > 10
    assert replicas(lives).isfinite().all()


def test_late_answers_to_given_up_exchanges_change_nothing_at_rest() -> None:
    """Letters later than the timeout: all exchanges are given up, some letters arrive when the team is at rest."""

    class Resting(Adpsgd):
        def consensus(self) -> Tensor:
            before = self.replica()
            self.team.sleep(20.0)
            assert torch.equal(self.replica(), before)
            return super().consensus()

    cluster = hardware(faults={"late_share": 1.0, "late_seconds": 3.0})
    lives = train(replace(PROBLEM, epochs=2), partial(Resting, timeout=2.0), cluster=cluster)
    assert count(lives, "half_done") > 20 and count(lives, "exchanges") == 0


def test_an_odd_ring_is_refused() -> None:
    with pytest.raises(InputError, match=r"learners=3: adpsgd pairs neighbours on a ring.* use 4 or 2"):
        train(replace(PROBLEM, learners=3), Adpsgd)
    with pytest.raises(InputError, match=r"strategy\.timeout=0: must be above 0"):
        train(PROBLEM, partial(Adpsgd, timeout=0))


# mistakes


class Unlocked(Adpsgd):
    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        self._lock = nullcontext()


class Overwriting(Adpsgd):
    """A sender's x becomes the mean of the two snapshots, whatever has happened to it meanwhile."""

    def _exchange(self, partner: int, exchange: int) -> None:
        own = self._x.clone()
        self.team.send(partner, "weights", exchange, own)
        theirs = self._answer_to(exchange, partner)
        if theirs is not None:
            with self._lock:
                self.team.simulate_cost("averaging", len(own))
                self._x.copy_((own + theirs) / 2)
                self._merged += 1
            self.metrics["exchanges"] += 1


class OneSided(Adpsgd):
    """Receivers answer, and keep what they have."""

    def _average(self, difference: Tensor) -> None:
        if not self._sends:
            difference.zero_()
        super()._average(difference)


class IntoTheGradient(Adpsgd):
    """Gossips the very weights that gradients are taken at."""

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        self._x = params.w


class NeverPulls(Adpsgd):
    """Applies the gradient to the weights it was taken at, and pushes those."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            with self._lock:
                self._x.copy_(self.params.w)
        return super().step(lambda on_bucket: step_result)


class PullsLast(Adpsgd):
    """Applies first: the pull takes the update away again."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        def applied(_: BucketHook | None) -> StepResult | None:
            step_result = gradient(None)
            if step_result is not None:
                self.optimizer.step()
                self.params.g.zero_()
            return step_result

        return super().step(applied)


class Silent(Adpsgd):
    def _exchange(self, partner: int, exchange: int) -> None:
        self.metrics["exchanges"] += 1


class Forgetful(Adpsgd):
    """Averages by overwriting at the receivers, which forget the update since their snapshot was taken."""

    def _receive(self) -> None:
        while True:
            message = self.team.recv("weights")
            assert message is not None
            own = self._x.clone()
            self.team.simulate_cost("averaging", len(own))
            self._x.copy_((own + message.tensors[0]) / 2)
            self._merged += 1
            self.team.send(message.source, "answer", message.clock, own)


class Possessive(Adpsgd):
    """Holds the lock while it computes the gradient."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        with self._lock:
            step_result = gradient(None)
        return super().step(lambda on_bucket: step_result)


MISTAKES: list[tuple[Callable[[MakeStrategy], None], type[Strategy]]] = [
    (check_sum, Unlocked), (check_sum, Overwriting), (check_sum, OneSided), (check_sum, NeverPulls),
    (check_sum, Forgetful), (check_in_time, OneSided), (check_in_time, IntoTheGradient),
    (check_in_time, NeverPulls), (check_in_time, PullsLast), (check_in_time, Silent),
    (check_untouched, IntoTheGradient), (check_contraction, Silent), (check_contraction, OneSided),
    (check_nobody_waits, Possessive),
]  # fmt: skip


@pytest.mark.parametrize(("check", "mistake"), MISTAKES, ids=lambda value: value.__name__)
def test_the_limit_catches(check: Callable[[MakeStrategy], None], mistake: type[Strategy]) -> None:
    with pytest.raises(AssertionError):
        check(mistake)
