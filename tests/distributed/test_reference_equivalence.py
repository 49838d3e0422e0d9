"""Algorithms that move in step against one process that computes what their papers say; and mistakes this finds.

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
from tests.support.toy_problem import Problem
from tests.support.toy_training import Life, MakeStrategy, train, train_alone

PROBLEM = Problem()  # 105 rounds of 4 learners, 5 of them not complete
CLOSE = partial(torch.testing.assert_close, rtol=0.0, atol=1e-5)
PAIRS = partial(reference.pairs, 4)
MATRICES: dict[str, Callable[[int], Tensor]] = {
    "pairs": PAIRS,
    "ring": lambda step: reference.ring(4),
    "all": lambda step: torch.full((4, 4), 0.25, dtype=torch.float64),
}


def assert_agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        CLOSE(one.double(), other.double())


def assert_one_chain(lives: dict[int, Life], chain: Sequence[Tensor]) -> None:
    """All learners have the weights of `chain` after every segment, and the same bits."""
    assert len(lives) == PROBLEM.learners
    for life in lives.values():
        assert_agree(life.consensus, chain)
        assert all(torch.equal(a, b) for a, b in zip(life.consensus, lives[0].consensus, strict=True))
        assert torch.equal(life.replica, lives[0].replica)


def check_sync(make: MakeStrategy) -> None:
    assert_one_chain(train(PROBLEM, make), reference.sync(PROBLEM))


def check_hybrid(make: MakeStrategy) -> None:
    assert_one_chain(train(PROBLEM, make), reference.hybrid(PROBLEM))


def check_dpsgd(make: MakeStrategy, M: Callable[[int], Tensor] = PAIRS) -> None:
    lives, W = train(PROBLEM, make), reference.dpsgd(PROBLEM, M)
    for rank, life in lives.items():
        CLOSE(life.replica.double(), W[-1][rank])
        assert_agree(life.consensus, [W_segment.mean(dim=0) for W_segment in W])


# the limits


def test_local_is_the_reference() -> None:
    life = train_alone(replace(PROBLEM, learners=1, joined=4), Local)
    assert_agree(life.consensus, reference.sync(PROBLEM))
    assert life.strategy.staleness == {0: 105}


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"form": "weights"}], ids=str)
def test_sync_is_one_learner_with_all_the_data(options: dict[str, object]) -> None:
    check_sync(partial(Sync, **options))  # type: ignore[arg-type]


def test_sync_reports_what_one_learner_would() -> None:
    alone = train_alone(replace(PROBLEM, learners=1, joined=4), Local)
    team = train(PROBLEM, Sync)
    assert [done[::2] for done in team[0].did] == [done[::2] for done in alone.did], "epochs and rates"
    for life in team.values():
        assert life.strategy.staleness == {0: 105}
        for ours, theirs in zip(life.totals, alone.totals, strict=True):
            assert (ours.frames, ours.batches) == (theirs.frames, min(4 * theirs.batches, ours.batches))
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_overlap_and_timing_change_no_bit() -> None:
    plain = train(PROBLEM, partial(Sync, overlap=False))[0].consensus
    for other in (train(PROBLEM, Sync), train(PROBLEM, Sync, seed=2)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other[3].consensus, strict=True))


def test_sync_of_one_learner_is_local_to_the_bit() -> None:
    alone = replace(PROBLEM, learners=1, joined=4)
    for ours, theirs in zip(train_alone(alone, Sync).consensus, train_alone(alone, Local).consensus, strict=True):
        assert torch.equal(ours, theirs)


def test_hybrid_is_one_chain_of_staleness_one() -> None:
    check_hybrid(Hybrid)


@pytest.mark.parametrize("mixing", MATRICES)
def test_dpsgd_mixes_as_its_matrices_say(mixing: str) -> None:
    check_dpsgd(partial(Dpsgd, mixing=mixing), MATRICES[mixing])  # type: ignore[arg-type]


def test_dpsgd_that_mixes_with_everybody_is_sync() -> None:
    for life in train(PROBLEM, partial(Dpsgd, mixing="all")).values():
        assert_agree(life.consensus, reference.sync(PROBLEM))
        CLOSE(life.replica, life.consensus[-1])


# mixing matrices


def matrix(kind: str, size: int, step: int) -> Tensor:
    M = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        row = mixing_row(kind, rank, size, step)  # type: ignore[arg-type]
        assert list(row) == sorted(row), "all add in rank order"
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
        assert (product > 0.5 / size).all(), "what one learner knows reaches all"


def test_pairs_and_ring_are_those_of_the_reference() -> None:
    for size in (4, 6):
        assert all(torch.equal(matrix("pairs", size, step), reference.pairs(size, step)) for step in range(4))
        torch.testing.assert_close(matrix("ring", size, 0), reference.ring(size))


def test_an_odd_ring_and_unknown_options_are_refused() -> None:
    three = replace(PROBLEM, learners=3)
    with pytest.raises(InputError, match=r"learners=3: dpsgd with strategy\.mixing=pairs .* use 4 or 2"):
        train(three, Dpsgd)
    with pytest.raises(InputError, match=r"strategy\.mixing=star: is pairs, ring or all"):
        train(PROBLEM, partial(Dpsgd, mixing="star"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"strategy\.form=both: is gradients or weights"):
        train(PROBLEM, partial(Sync, form="both"))  # type: ignore[arg-type]
    short = replace(three, epochs=1)
    assert len(train(short, partial(Dpsgd, mixing="ring"))) == len(train(short, Sync)) == 3


# mistakes


class Unaveraged(Sync):
    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self.optimizer.step()
        return step_result


class Unweighted(Sync):
    """The mean over learners of each one's mean over its frames."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        def own_mean(_: object) -> StepResult | None:
            step_result = gradient(None)
            if step_result is not None:
                self.params.g.mul_(step_result.lease.loss_denominator / max(step_result.num_frames, 1))
            return step_result

        self._overlap = False
        return super().step(own_mean)


class Impatient(Sync):
    """Starts the averaging, and does not wait for it."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self.team.start_all_reduce_mean(self.params.g)
            self.optimizer.step()
        return step_result


class OnlyTheFirstBucket(Sync):
    def step(self, gradient: GradientFn) -> StepResult | None:
        buckets: list[tuple[int, int]] = []
        step_result = gradient(lambda begin, end: buckets.append((begin, end)))
        if step_result is not None:
            begin, end = buckets[0]
            self.team.start_all_reduce_mean(self.params.g[begin:end]).wait()
            self.optimizer.step()
        return step_result


class TwoChains(Hybrid):
    """W'_t = A_{t-1} - α u(g(A_{t-1})): the update, too, of the weights the gradient was taken at."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self._under_way.wait()
            average = self._pushed.clone()
            self.optimizer.step()
            self._pushed.copy_(self.params.w)
            self._under_way = self.team.start_all_reduce_mean(self._pushed)
            self.params.w.copy_(average)
        return step_result


class NotStale(Hybrid):
    """Waits for the average before it takes the gradient."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._under_way.wait()
        self.params.w.copy_(self._pushed)
        return super().step(gradient)


class OwnWeights(Hybrid):
    """Takes the next gradient at W'_t, its own weights."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = super().step(gradient)
        if step_result is not None:
            self._own = self._pushed.clone()  # the average is not there before time has passed
            self.params.w.copy_(self._own)
        return step_result


class OneSided(Dpsgd):
    """Always the same partner."""

    def _mix(self) -> None:
        steps, self._steps = self._steps, 0
        super()._mix()
        self._steps = steps


class Silent(Dpsgd):
    def _mix(self) -> None:
        pass


class MixesFirst(Dpsgd):
    """Averages the weights, and updates after that."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        if step_result is not None:
            self._mix()
            self.optimizer.step()
            self._steps += 1
        return step_result


MISTAKES: list[tuple[Callable[[MakeStrategy], None], type[Strategy]]] = [
    (check_sync, Unaveraged), (check_sync, Unweighted), (check_sync, Impatient), (check_sync, OnlyTheFirstBucket),
    (check_sync, Hybrid), (check_hybrid, TwoChains), (check_hybrid, NotStale), (check_hybrid, OwnWeights),
    (check_hybrid, Sync), (check_dpsgd, OneSided), (check_dpsgd, Silent), (check_dpsgd, MixesFirst),
    (check_dpsgd, Sync),
]  # fmt: skip


@pytest.mark.parametrize(("check", "mistake"), MISTAKES, ids=lambda value: value.__name__)
def test_the_limit_catches(check: Callable[[MakeStrategy], None], mistake: type[Strategy]) -> None:
    with pytest.raises(AssertionError):
        check(mistake)
