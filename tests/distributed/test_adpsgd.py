"""ADPSGD: invariants that hold exactly although no learner waits, and mutants that violate them.

All learners have unequal data, about 100 steps, and momentum 0.9.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategies.topology import Partners, receivers
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Group, Team
from asr_am.errors import InputError
from tests.support import reference_algorithms as reference
from tests.support.toy_problem import Problem, start_weights
from tests.support.toy_training import LearnerResult, MakeStrategy, hardware, in_lockstep, train

PROBLEM = Problem(batches=84)  # 105 rounds of 4 learners
CLOSE = partial(torch.testing.assert_close, rtol=0.0, atol=1e-5)
BUSY = hardware(jitter=0.5, update_bandwidth=5e2, averaging_bandwidth=5e2)  # updates and averagings often collide


def own_start(rank: int) -> Tensor:
    """Returns initial weights [N], different for each learner."""
    w = start_weights()
    return w + 0.3 * torch.randn(len(w), generator=torch.Generator().manual_seed(rank))


def replicas(results: dict[int, LearnerResult]) -> Tensor:
    """Returns all learners' weights [λ, N] at the end."""
    return torch.stack([results[rank].replica for rank in sorted(results)]).double()


def count(results: dict[int, LearnerResult], key: str) -> int:
    return sum(result.strategy.metrics[key] for result in results.values())


# invariants


def check_in_time(make: MakeStrategy, learners: int = 4) -> None:
    """Simultaneous updates give decentralised SGD of staleness 1, for each learner."""
    problem = replace(PROBLEM, learners=learners)
    results = train(problem, make, cluster=hardware(jitter=0.0), wrap=in_lockstep)
    CLOSE(replicas(results), reference.adpsgd(problem, [results[rank].computed for rank in range(learners)]))
    for result in results.values():
        assert result.strategy.staleness == {0: 1, 1: 420 // learners - 1}


def check_sum(make: MakeStrategy) -> None:
    """Gossip keeps the sum over learners, which changes only by the sum of all updates."""
    updates: list[Tensor] = []

    def recording(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        step = optimizer.step

        def recorded() -> None:
            before = params.w.double()
            step()
            updates.append(params.w.double() - before)

        optimizer.step = recorded  # type: ignore[method-assign]
        return make(params, optimizer, team)

    results = train(PROBLEM, recording, cluster=BUSY, start=own_start)
    assert len(updates) == 420 and count(results, "exchanges") > 100 and count(results, "half_done") == 0
    begin = sum(own_start(rank).double() for rank in range(4))
    CLOSE(replicas(results).sum(dim=0), begin + torch.stack(updates).sum(dim=0))


def check_contraction(make: MakeStrategy) -> None:
    """Without updates, exchanges keep the mean and all learners converge to it."""
    short = replace(PROBLEM, epochs=2, lr=0.0)
    results = train(short, make, cluster=BUSY, start=own_start)
    mean = torch.stack([own_start(rank) for rank in range(4)]).double().mean(dim=0)
    CLOSE(replicas(results).mean(dim=0), mean)
    CLOSE(replicas(results), mean.repeat(4, 1))


def check_untouched(make: MakeStrategy) -> None:
    """No task changes a learner's weights while it computes a gradient."""

    def guarded(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
        def watched(on_bucket: BucketHook | None) -> StepResult | None:
            w = strategy.params.w.clone()
            step_result = gradient(on_bucket)
            assert torch.equal(strategy.params.w, w), "the weights changed under the gradient"
            return step_result

        return watched

    train(replace(PROBLEM, epochs=2), make, cluster=BUSY, start=own_start, wrap=guarded)


def check_no_waiting(make: MakeStrategy) -> None:
    """The others take over the share of a learner that is ten times as slow, and still exchange with it."""
    problem = replace(PROBLEM, epochs=1, batches=320, rounds_per_segment=80)
    even, uneven = (train(problem, make, cluster=hardware(faults=faults)) for faults in ({}, {"slow": {1: 10.0}}))
    assert uneven[0].strategy.team.now() < 1.45 * even[0].strategy.team.now()
    for results in (even, uneven):
        assert count(results, "exchanges") > 0.9 * (len(results[0].computed) + len(results[2].computed))


CHECKS = [check_in_time, check_sum, check_contraction, check_untouched, check_no_waiting]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_adpsgd(check: Callable[[MakeStrategy], None]) -> None:
    check(Adpsgd)


@pytest.mark.parametrize("learners", [2, 6])
def test_adpsgd_on_rings_of_other_sizes(learners: int) -> None:
    check_in_time(Adpsgd, learners)


# options: partners, super-learners, delay by one


def matching(partners: Partners, size: int, exchange: int, seed: int = 0) -> Tensor:
    """Returns the mixing matrix [λ, λ] if all senders are at this exchange."""
    M = torch.eye(size, dtype=torch.float64)
    for i in range(0, size, 2):
        j = next(receivers(partners, i, exchange, size, seed))
        M[i, i] = M[i, j] = M[j, i] = M[j, j] = 0.5
    return M


@pytest.mark.parametrize("size", [2, 4, 12, 16])
@pytest.mark.parametrize("partners", get_args(Partners))
def test_partners_are_a_matching_and_all_receivers_are_asked_before_giving_up(partners: Partners, size: int) -> None:
    for exchange in range(9):
        M = matching(partners, size, exchange)
        assert torch.equal(M.sum(dim=0), torch.ones(size, dtype=torch.float64)) and torch.equal(M, M.T)
        for sender in range(0, size, 2):
            assert sorted(receivers(partners, sender, exchange, size, 0)) == list(range(1, size, 2))


def test_partners_by_name() -> None:
    def first(partners: Partners, seed: int = 0) -> list[int]:
        return [next(receivers(partners, 4, exchange, 16, seed)) for exchange in range(40)]

    assert first("ring")[:4] == [5, 3, 5, 3]
    assert first("exponential")[:5] == [5, 7, 9, 13, 5]
    assert set(first("random")) == set(range(1, 16, 2)) and first("random") == first("random") != first("random", 1)


def check_partners(make: MakeStrategy) -> None:
    """Simultaneous updates with other partners give decentralised SGD with their mixing matrices."""
    problem = replace(PROBLEM, learners=12, epochs=2)
    for partners in ("random", "exponential"):
        chosen = partial(make, partners=partners, seed=3)
        results = train(problem, chosen, cluster=hardware(jitter=0.0, hosts=3), wrap=in_lockstep)
        computed = [results[rank].computed for rank in range(12)]
        M = partial(matching, cast(Partners, partners), 12, seed=3)
        CLOSE(replicas(results), reference.adpsgd(problem, computed, M=M))


def check_groups(make: MakeStrategy) -> None:
    """Simultaneous updates of groups give decentralised SGD of staleness 1, and a group has one model."""
    problem = replace(PROBLEM, learners=8)
    results = train(problem, partial(make, group_size=2), cluster=hardware(jitter=0.0), wrap=in_lockstep)
    CLOSE(replicas(results)[::2], reference.super_adpsgd(problem, 2))
    assert torch.equal(replicas(results)[::2], replicas(results)[1::2])
    assert sum(sum(result.strategy.staleness.values()) for result in results.values()) == 55 * 8


def check_one_group(make: MakeStrategy) -> None:
    """One group of all learners is sync, bit for bit."""
    for learners in (2, 4):
        problem = replace(PROBLEM, learners=learners)
        ours, theirs = train(problem, partial(make, group_size=learners)), train(problem, Sync)
        assert len(ours[0].computed) > 100
        for rank in theirs:
            assert all(map(torch.equal, ours[rank].consensus, theirs[rank].consensus))


def check_delay_by_one(make: MakeStrategy) -> None:
    """Each update is followed by one averaging, although messages are slower than gradients."""
    slow = hardware(jitter=0.5, host_bandwidth=2e2, nic_bandwidth=2e2)
    results = train(PROBLEM, partial(make, delay_by_one=True), cluster=slow)
    for rank in (0, 2):
        steps = len(results[rank].computed)
        assert results[rank].strategy.staleness == {0: 1, 1: steps - 1}
        assert results[rank].strategy.metrics["exchanges"] == steps


OPTION_CHECKS = [check_partners, check_groups, check_one_group, check_delay_by_one]


@pytest.mark.parametrize("check", OPTION_CHECKS, ids=lambda check: check.__name__)
def test_options(check: Callable[[MakeStrategy], None]) -> None:
    check(Adpsgd)


def test_groups_of_one_are_adpsgd_to_the_bit() -> None:
    plain, groups = (train(PROBLEM, make, cluster=BUSY) for make in (Adpsgd, partial(Adpsgd, group_size=1)))
    assert all(torch.equal(plain[rank].replica, groups[rank].replica) for rank in range(4))
    assert not plain[0].strategy.synchronous and plain[0].strategy.fault_tolerant


def test_groups_do_not_wait_for_each_other() -> None:
    """A slow group is behind the others in the middle of a segment."""

    def recorded(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
        def closure(on_bucket: BucketHook | None) -> StepResult | None:
            ends.setdefault(team.rank, []).append(team.now())
            return gradient(on_bucket)

        return closure

    ends: dict[int, list[float]] = {}
    problem = replace(PROBLEM, epochs=1, batches=80, rounds_per_segment=20)
    slow = hardware(jitter=0.0, faults={"slow": {3: 4.0}})
    results = train(problem, partial(Adpsgd, group_size=2), cluster=slow, wrap=recorded)
    assert ends[2][19] > 2 * ends[0][19] and count(results, "exchanges") > 15


def test_groups_of_a_wrong_size_are_refused() -> None:
    for size, message in ((3, "does not divide learners=4"), (0, "does not divide learners=4")):
        with pytest.raises(InputError, match=rf"strategy\.group_size={size}: {message}"):
            train(PROBLEM, partial(Adpsgd, group_size=size))
    with pytest.raises(InputError, match="makes 3 groups of learners=6, but adpsgd pairs groups"):
        train(replace(PROBLEM, learners=6), partial(Adpsgd, group_size=2))
    with pytest.raises(InputError, match=r"strategy\.partners=all: must be ring, random or exponential"):
        train(PROBLEM, partial(Adpsgd, partners="all"))


def test_slow_learners_have_staler_gradients_and_do_less() -> None:
    results = train(PROBLEM, Adpsgd, cluster=hardware(faults={"slow": {1: 4.0}}))
    steps = {rank: sum(result.strategy.staleness.values()) for rank, result in results.items()}
    assert steps == {rank: len(result.computed) for rank, result in results.items()} and sum(steps.values()) == 420
    assert 2 * steps[1] < min(steps[0], steps[2], steps[3])
    mean = {
        rank: sum(k * n for k, n in result.strategy.staleness.items()) / steps[rank] for rank, result in results.items()
    }
    assert mean[1] > 2 * max(mean[0], mean[2], mean[3])
    # every exchange is merged once by its sender and once by its receiver. Merges after the last update do not count
    merges = {rank: mean[rank] * steps[rank] for rank in results}
    assert 0 <= count(results, "exchanges") - (merges[0] + merges[2]) <= 2
    assert 0 <= count(results, "exchanges") - (merges[1] + merges[3]) <= 4 * len(PROBLEM.segments)


def test_the_consensus_is_the_mean_and_is_not_written_back() -> None:
    class Checked(Adpsgd):
        def consensus(self) -> Tensor:
            before = self.replica(), self.params.w.clone()
            mean = super().consensus()
            assert torch.equal(self.replica(), before[0]) and torch.equal(self.params.w, before[1])
            distances.append(float((before[0] - mean).norm()))
            return mean

    distances: list[float] = []
    results = train(PROBLEM, Checked)
    CLOSE(results[2].consensus[-1].double(), replicas(results).mean(dim=0))
    calls = len(PROBLEM.segments) + PROBLEM.epochs  # `Trainer` validates the consensus of each epoch
    assert len(distances) == 4 * calls and min(distances) > 1e-3, "learners stay apart while they train"
    assert results[0].totals[-1].mean_loss < 0.6 * results[0].totals[0].mean_loss


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_exchanges_aborted_by_a_lost_message_are_counted(share: float) -> None:
    cluster = hardware(faults={"lost_share": share})
    results = train(PROBLEM, partial(Adpsgd, timeout=2.0), cluster=cluster)
    lost = sum(result.strategy.team.comm_stats.faults["lost"] for result in results.values())
    assert count(results, "half_done") == lost > 10 and count(results, "exchanges") > 10
    assert replicas(results).isfinite().all()


def test_late_answers_to_aborted_exchanges_change_nothing_when_drained() -> None:
    """All exchanges are aborted, as messages are later than the timeout. Some arrive when drained."""

    class WaitsDrained(Adpsgd):
        def consensus(self) -> Tensor:
            before = self.replica()
            self.team.sleep(20.0)
            assert torch.equal(self.replica(), before)
            return super().consensus()

    cluster = hardware(faults={"late_share": 1.0, "late_seconds": 3.0})
    results = train(replace(PROBLEM, epochs=2), partial(WaitsDrained, timeout=2.0), cluster=cluster)
    assert count(results, "half_done") > 20 and count(results, "exchanges") == 0


def test_an_odd_ring_is_refused() -> None:
    with pytest.raises(InputError, match=r"learners=3: adpsgd pairs neighbours on a ring.* use 4 or 2"):
        train(replace(PROBLEM, learners=3), Adpsgd)
    with pytest.raises(InputError, match=r"strategy\.timeout=0: must be above 0"):
        train(PROBLEM, partial(Adpsgd, timeout=0))


# mutants


class Unlocked(Adpsgd):
    """Has no lock."""

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        self._lock = nullcontext()


class Overwriting(Adpsgd):
    """Sets a sender's x to the mean of the two snapshots, which loses updates in between."""

    def _exchange(self, partner: int, exchange: int) -> None:
        s_i = self._x.clone()
        self.team.send(partner, "weights", exchange, s_i)
        s_j = self._answer_to(exchange, partner)
        if s_j is not None:
            with self._lock:
                self.team.simulate_cost("averaging", len(s_i))
                self._x.copy_((s_i + s_j) / 2)
                self._merged += 1
            self.metrics["exchanges"] += 1


class OneSided(Adpsgd):
    """Receivers answer but do not average."""

    def _average(self, difference: Tensor) -> None:
        if not self._sends:
            difference.zero_()
        super()._average(difference)


class IntoTheGradient(Adpsgd):
    """Gossips the weights that gradients are taken at."""

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        self._x = params.w


class NeverPulls(Adpsgd):
    """Applies the gradient to the weights it was taken at, without a pull."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            with self._lock:
                self._x.copy_(self.params.w)
        return super().step(lambda on_bucket: step_result)


class PullsLast(Adpsgd):
    """Applies the gradient before the pull, which undoes the update."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        def applied(_: BucketHook | None) -> StepResult | None:
            step_result = gradient(None)
            if step_result is not None:
                self.optimizer.step()
                self.params.g.zero_()
            return step_result

        return super().step(applied)


class Silent(Adpsgd):
    """Counts exchanges without doing them."""

    def _exchange(self, partner: int, exchange: int) -> None:
        self.metrics["exchanges"] += 1


class OverwritingReceiver(Adpsgd):
    """Sets a receiver's x to the mean of the two snapshots, which loses updates in between."""

    def _receive(self) -> None:
        while True:
            message = self.team.recv("weights")
            assert message is not None
            s_j = self._x.clone()
            self.team.simulate_cost("averaging", len(s_j))
            self._x.copy_((s_j + message.tensors[0]) / 2)
            self._merged += 1
            self.team.send(message.source, "answer", message.clock, s_j)


class HoldsLock(Adpsgd):
    """Holds the lock while it computes the gradient."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        with self._lock:
            step_result = gradient(None)
        return super().step(lambda on_bucket: step_result)


class OwnGradients(Adpsgd):
    """Does not average gradients in a group."""

    def _mean_gradient(self, group: Group, gradient: GradientFn) -> StepResult | None:
        return gradient(None)


class KeepsOwnWeights(Adpsgd):
    """Does not broadcast the weights in a group, whose learners update on their own."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        group, self._group = self._group, None
        assert group is not None
        step_result = super().step(lambda on_bucket: self._mean_gradient(group, gradient))
        self._group = group
        return step_result


class Islands(Adpsgd):
    """Does not gossip between groups."""

    def _begin_gossip(self) -> None:
        self._sends = False


class FixedRing(Adpsgd):
    """Has neighbours on the ring as partners, whatever the option."""

    def __init__(self, *args: Any, partners: str = "ring", **options: Any) -> None:
        super().__init__(*args, **options)


class NeverWaits(Adpsgd):
    """Does not wait for the averaging before."""

    def __init__(self, *args: Any, delay_by_one: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)


MUTANTS: list[tuple[Callable[[MakeStrategy], None], type[Strategy]]] = [
    (check_sum, Unlocked), (check_sum, Overwriting), (check_sum, OneSided), (check_sum, NeverPulls),
    (check_sum, OverwritingReceiver), (check_in_time, OneSided), (check_in_time, IntoTheGradient),
    (check_in_time, NeverPulls), (check_in_time, PullsLast), (check_in_time, Silent),
    (check_untouched, IntoTheGradient), (check_contraction, Silent), (check_contraction, OneSided),
    (check_no_waiting, HoldsLock), (check_groups, OwnGradients), (check_groups, KeepsOwnWeights),
    (check_groups, Islands), (check_one_group, OwnGradients), (check_one_group, KeepsOwnWeights),
    (check_partners, FixedRing), (check_delay_by_one, NeverWaits),
]  # fmt: skip


@pytest.mark.parametrize(("check", "mutant"), MUTANTS, ids=lambda value: value.__name__)
def test_mutants_are_caught(check: Callable[[MakeStrategy], None], mutant: type[Strategy]) -> None:
    with pytest.raises(AssertionError):
        check(mutant)
