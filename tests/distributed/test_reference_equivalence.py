"""Synchronous algorithms against single-process references from their papers, and mutants that this catches.

All learners have unequal data, at least 100 steps, and momentum 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategies.topology import mixing_row
from asr_am.distributed.strategy import Strategy
from asr_am.errors import InputError
from tests.support import reference_algorithms as reference
from tests.support.strategy_checks import MATRICES, PAIRS
from tests.support.toy_problem import Problem
from tests.support.toy_training import LearnerResult, MakeStrategy, train, train_single

PROBLEM = Problem()  # 105 rounds of 4 learners, 5 incomplete
CLOSE = partial(torch.testing.assert_close, rtol=0.0, atol=1e-5)


def assert_agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        CLOSE(one.double(), other.double())


def assert_one_chain(results: dict[int, LearnerResult], chain: Sequence[Tensor]) -> None:
    """Checks that all learners have the weights of `chain` after every segment, and the same bits."""
    assert len(results) == PROBLEM.learners
    for result in results.values():
        assert_agree(result.consensus, chain)
        assert all(torch.equal(a, b) for a, b in zip(result.consensus, results[0].consensus, strict=True))
        assert torch.equal(result.replica, results[0].replica)


def check_sync(make: MakeStrategy) -> None:
    assert_one_chain(train(PROBLEM, make), reference.sync(PROBLEM))


def check_hybrid(make: MakeStrategy) -> None:
    assert_one_chain(train(PROBLEM, make), reference.hybrid(PROBLEM))


def check_dpsgd(make: MakeStrategy, M: Callable[[int], Tensor] = PAIRS) -> None:
    results, W = train(PROBLEM, make), reference.dpsgd(PROBLEM, M)
    for rank, result in results.items():
        CLOSE(result.replica.double(), W[-1][rank])
        assert_agree(result.consensus, [W_segment.mean(dim=0) for W_segment in W])


# equivalences


def test_local_is_the_reference() -> None:
    result = train_single(replace(PROBLEM, learners=1, joined=4), Local)
    assert_agree(result.consensus, reference.sync(PROBLEM))
    assert result.strategy.staleness == {0: 105}


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"form": "weights"}], ids=str)
def test_sync_is_one_learner_with_all_the_data(options: dict[str, object]) -> None:
    check_sync(partial(Sync, **options))  # type: ignore[arg-type]


def test_sync_reports_what_one_learner_would() -> None:
    alone = train_single(replace(PROBLEM, learners=1, joined=4), Local)
    team = train(PROBLEM, Sync)
    assert [done[::2] for done in team[0].computed] == [done[::2] for done in alone.computed], "epochs and rates"
    for result in team.values():
        assert result.strategy.staleness == {0: 105}
        for ours, theirs in zip(result.totals, alone.totals, strict=True):
            assert (ours.frames, ours.batches) == (theirs.frames, min(4 * theirs.batches, ours.batches))
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_overlap_and_timing_change_no_bit() -> None:
    plain = train(PROBLEM, partial(Sync, overlap=False))[0].consensus
    for other in (train(PROBLEM, Sync), train(PROBLEM, Sync, seed=2)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other[3].consensus, strict=True))


def test_sync_of_one_learner_is_local_to_the_bit() -> None:
    alone = replace(PROBLEM, learners=1, joined=4)
    for ours, theirs in zip(train_single(alone, Sync).consensus, train_single(alone, Local).consensus, strict=True):
        assert torch.equal(ours, theirs)


def test_hybrid_is_one_chain_of_staleness_one() -> None:
    check_hybrid(Hybrid)


@pytest.mark.parametrize("mixing", MATRICES)
def test_dpsgd_follows_its_mixing_matrices(mixing: str) -> None:
    check_dpsgd(partial(Dpsgd, mixing=mixing), MATRICES[mixing])  # type: ignore[arg-type]


def test_dpsgd_that_mixes_with_all_is_sync() -> None:
    for result in train(PROBLEM, partial(Dpsgd, mixing="all")).values():
        assert_agree(result.consensus, reference.sync(PROBLEM))
        CLOSE(result.replica, result.consensus[-1])


def test_dpsgd_with_several_averagings_per_gradient() -> None:
    check_dpsgd(partial(Dpsgd, averagings=3), lambda step: PAIRS(3 * step + 2) @ PAIRS(3 * step + 1) @ PAIRS(3 * step))


def test_learners_agree_the_more_the_more_they_average() -> None:
    spread = []
    for averagings in (1, 3, 24):
        results = train(PROBLEM, partial(Dpsgd, averagings=averagings))
        mean = results[0].consensus[-1]
        spread.append(max(float((result.replica - mean).norm()) for result in results.values()))
    assert spread[0] > 2 * spread[1] and spread[2] < 1e-4 * spread[0]


# mixing matrices


def matrix(kind: str, size: int, step: int) -> Tensor:
    M = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        row = mixing_row(kind, rank, size, step)  # type: ignore[arg-type]
        assert list(row) == sorted(row), "sums are in rank order"
        for other, weight in row.items():
            M[rank, other] = weight
    return M


@pytest.mark.parametrize(("kind", "sizes"), [("pairs", (2, 4, 6, 16)), ("ring", (1, 2, 3, 5, 16)), ("all", (1, 3, 8))])
def test_mixing_is_symmetric_doubly_stochastic_and_connected(kind: str, sizes: Sequence[int]) -> None:
    for size in sizes:
        product = torch.eye(size, dtype=torch.float64)
        for step in range(40 * size):
            M = matrix(kind, size, step)
            assert torch.equal(M, M.T)
            torch.testing.assert_close(M.sum(dim=0), torch.ones(size, dtype=torch.float64))
            product = M @ product
        assert (product > 0.5 / size).all(), "every learner reaches all"


def test_pairs_and_ring_are_those_of_the_reference() -> None:
    for size in (4, 6):
        assert all(torch.equal(matrix("pairs", size, step), reference.pairs(size, step)) for step in range(4))
        torch.testing.assert_close(matrix("ring", size, 0), reference.ring(size))


def test_an_odd_ring_and_unknown_options_are_rejected() -> None:
    three = replace(PROBLEM, learners=3)
    with pytest.raises(InputError, match=r"learners=3: dpsgd with strategy\.mixing=pairs .* use 4 or 2"):
        train(three, Dpsgd)
    with pytest.raises(InputError, match=r"strategy\.mixing=star: must be pairs, ring or all"):
        train(PROBLEM, partial(Dpsgd, mixing="star"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"strategy\.averagings=0: must be at least 1"):
        train(PROBLEM, partial(Dpsgd, averagings=0))
    with pytest.raises(InputError, match=r"strategy\.form=both: must be gradients or weights"):
        train(PROBLEM, partial(Sync, form="both"))  # type: ignore[arg-type]
    short = replace(three, epochs=1)
    assert len(train(short, partial(Dpsgd, mixing="ring"))) == len(train(short, Sync)) == 3


# mutants


class Unaveraged(Sync):
    """Does not average."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self.optimizer.step()
        return step_result


class Unweighted(Sync):
    """Takes the mean over learners without weighting by frames."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        def own_mean(_: object) -> StepResult | None:
            step_result = gradient(None)
            if step_result is not None:
                self.params.g.mul_(step_result.lease.loss_denominator / max(step_result.num_frames, 1))
            return step_result

        self._overlap = False
        return super().step(own_mean)


class Impatient(Sync):
    """Starts the all-reduce and does not wait for it."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self.team.start_all_reduce_mean(self.params.g)
            self.optimizer.step()
        return step_result


class OnlyTheFirstBucket(Sync):
    """Averages only the first bucket."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        buckets: list[tuple[int, int]] = []
        step_result = gradient(lambda begin, end: buckets.append((begin, end)))
        if step_result is not None:
            begin, end = buckets[0]
            self.team.start_all_reduce_mean(self.params.g[begin:end]).wait()
            self.optimizer.step()
        return step_result


class TwoChains(Hybrid):
    """Computes W'_t = A_{t-1} - α u(g(A_{t-1})), an update of the weights at which the gradient was taken."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self.drain()
            average = self._pushed.clone()
            self.optimizer.step()
            self._pushed.copy_(self.params.w)
            self._pending = self.team.start_all_reduce_mean(self._pushed)
            self.params.w.copy_(average)
        return step_result


class NotStale(Hybrid):
    """Waits for the average before the gradient."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        self.drain()
        self.params.w.copy_(self._pushed)
        return super().step(gradient)


class OwnWeights(Hybrid):
    """Takes the next gradient at W'_t, its own weights."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = super().step(gradient)
        if step_result is not None:
            self._own = self._pushed.clone()  # a copy, as the pending all-reduce overwrites it
            self.params.w.copy_(self._own)
        return step_result


class OneSided(Dpsgd):
    """Mixes always with the same partner."""

    def _mix(self) -> None:
        steps, self._steps = self._steps, 0
        super()._mix()
        self._steps = steps


class Silent(Dpsgd):
    """Does not mix."""

    def _mix(self) -> None:
        pass


class MixesFirst(Dpsgd):
    """Mixes before the update."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self._mix()
            self.optimizer.step()
            self._steps += 1
        return step_result


MUTANTS: list[tuple[Callable[[MakeStrategy], None], type[Strategy]]] = [
    (check_sync, Unaveraged), (check_sync, Unweighted), (check_sync, Impatient), (check_sync, OnlyTheFirstBucket),
    (check_sync, Hybrid), (check_hybrid, TwoChains), (check_hybrid, NotStale), (check_hybrid, OwnWeights),
    (check_hybrid, Sync), (check_dpsgd, OneSided), (check_dpsgd, Silent), (check_dpsgd, MixesFirst),
    (check_dpsgd, Sync),
]  # fmt: skip


@pytest.mark.parametrize(("check", "mutant"), MUTANTS, ids=lambda value: value.__name__)
def test_mutants_are_caught(check: Callable[[MakeStrategy], None], mutant: type[Strategy]) -> None:
    with pytest.raises((AssertionError, InputError)):  # the trainer finds learners that differ by itself
        check(mutant)
