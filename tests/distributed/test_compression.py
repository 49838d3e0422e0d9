"""PowerSGD and top-k: limits, error feedback, replay of their gradients in one process, bytes, and mutants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.packed_mean import PackedMean
from asr_am.distributed.simulator import SimTeam
from asr_am.distributed.strategies.powersgd import Powersgd
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategies.topk import Topk
from asr_am.distributed.strategy import Strategy
from asr_am.errors import InputError
from tests.support import reference_algorithms as reference
from tests.support.round_cluster import cluster_of, run
from tests.support.strategy_checks import Seen, check_resume, without
from tests.support.toy_problem import Problem, heldout, make_model, start_weights
from tests.support.toy_training import LearnerResult, MakeStrategy, train

PROBLEM = Problem()  # 105 rounds of 4 learners, 5 incomplete
SLOW = replace(PROBLEM, lr=0.005)  # power iteration amplifies rounding
SYNC = partial(Sync, overlap=False)


def assert_same_bits(ours: dict[int, LearnerResult], theirs: dict[int, LearnerResult]) -> None:
    for rank, result in ours.items():
        assert all(torch.equal(a, b) for a, b in zip(result.consensus, theirs[rank].consensus, strict=True))


# limits


def test_topk_that_sends_all_is_sync() -> None:
    results = train(PROBLEM, partial(Topk, density=1.0))
    assert_same_bits(results, train(PROBLEM, SYNC))
    assert not results[0].strategy.state_dict()["error"].any()


def test_powersgd_at_full_rank_is_sync() -> None:
    results = train(PROBLEM, partial(Powersgd, rank=6, min_compression=0.0))
    for result in results.values():
        for ours, theirs in zip(result.consensus, reference.sync(PROBLEM), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0.0, atol=1e-4)
        assert len(result.strategy.state_dict()["Q"]) == 2 and result.strategy.state_dict()["error"].abs().max() < 1e-5


def test_powersgd_that_factors_nothing_is_sync() -> None:
    assert_same_bits(train(PROBLEM, partial(Powersgd, min_compression=9.0)), train(PROBLEM, SYNC))


# replay of the gradients that the learners computed, in one process in float64


def check_topk(make: MakeStrategy, density: float = 0.25) -> None:
    seen = Seen()
    results = train(PROBLEM, make, wrap=seen)
    W = start_weights().double()
    k, error, velocity = round(density * len(W)), torch.zeros(4, len(W)), torch.zeros_like(W)
    for step, rate in enumerate(seen.rate):
        sent = torch.zeros(4, len(W))
        for i in range(4):
            error[i] += seen.g[i][step]
            largest = error[i].abs().topk(k).indices
            sent[i][largest] = error[i][largest]
        error -= sent
        velocity = 0.9 * velocity + sent.double().mean(dim=0)
        W = W - rate * velocity
    for rank, result in results.items():
        torch.testing.assert_close(result.replica.double(), W, rtol=0.0, atol=1e-5)
        assert torch.equal(result.strategy.state_dict()["error"], error[rank])
        assert torch.equal(result.replica, results[0].replica)


def check_powersgd(make: MakeStrategy) -> None:
    """Runs algorithms 1 and 2 on the mean gradient. Compression is linear in the gradient given P̂, so errors may be
    averaged, too.
    """
    seen = Seen()
    results = train(SLOW, make, wrap=seen)
    params = FlatParams(make_model())
    W, error = start_weights().double(), torch.zeros(len(params)).double()
    velocity, begins = torch.zeros_like(W), [0, *params.ends[:-1]]
    random = torch.Generator().manual_seed(0)
    Q = [torch.randn(max(s), 1, generator=random).double() if len(s) == 2 else None for s in params.shapes]
    for step, rate in enumerate(seen.rate):
        g = torch.stack([seen.g[i][step] for i in range(4)]).double().mean(dim=0)
        for k, (shape, begin, end) in enumerate(zip(params.shapes, begins, params.ends, strict=True)):
            if len(shape) == 2:
                M = (g[begin:end] + error[begin:end]).view(shape)
                M = M.T if shape[0] > shape[1] else M
                P = torch.nn.functional.normalize(M @ Q[k], dim=0)
                Q[k] = M.T @ P
                sent = P @ Q[k].T
                error[begin:end] = ((M - sent).T if shape[0] > shape[1] else M - sent).reshape(-1)
                g[begin:end] = (sent.T if shape[0] > shape[1] else sent).reshape(-1)
        velocity = 0.9 * velocity + g
        W = W - rate * velocity
    for result in results.values():
        torch.testing.assert_close(result.replica.double(), W, rtol=0.0, atol=2e-3)
        assert torch.equal(result.replica, results[0].replica)


RANK_1 = partial(Powersgd, rank=1, min_compression=0.0)
A_QUARTER = partial(Topk, density=0.25)


def test_topk_equals_a_reference_on_the_same_gradients() -> None:
    check_topk(A_QUARTER)


def test_powersgd_equals_a_reference_on_the_same_gradients() -> None:
    check_powersgd(RANK_1)


def test_they_train_with_fewer_bytes() -> None:
    sync = train(SLOW, SYNC)[0]
    for make in (RANK_1, partial(Topk, density=0.1)):
        result = train(SLOW, make)[0]
        assert heldout(result.replica) < 1.3 * heldout(sync.replica)
        sent = [sum(r.strategy.team.comm_stats.bytes_sent.values()) for r in (result, sync)]
        assert sent[0] < 0.7 * sent[1]


def test_bad_options_are_rejected() -> None:
    for make, message in (
        (partial(Topk, density=0.0), r"strategy\.density=0\.0"), (partial(Topk, density=1.5), "density=1.5"),
        (partial(Powersgd, rank=0), r"strategy\.rank=0"), (partial(Powersgd, min_compression=-1.0), "compression=-1"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            train(PROBLEM, make)


# the interface that they use


def test_several_tensors_in_one_all_reduce() -> None:
    def main(team: SimTeam) -> tuple[list[list[float]], bool, bool, float]:
        x, y = torch.full((2, 2), float(team.rank)), torch.full((3,), 10.0 * team.rank)
        mean = PackedMean(team, [x.T, y])
        before = mean.done()
        mean.wait()
        return [x.flatten().tolist(), y.tolist()], before, mean.done(), round(team.now(), 9)

    seconds = 1.5 * 28 / 10.0 + 6 * 0.5  # once the latency
    assert run(main) == dict.fromkeys(range(4), ([[1.5] * 4, [15.0] * 3], False, True, seconds))


@pytest.mark.parametrize("matrices", [(), ((2, 100, 50), (1, 10, 20))])
def test_low_rank_is_timed_with_the_workloads_matrices(matrices: Sequence[Sequence[int]]) -> None:
    """Rank 2 sends 2 x 2 x 50 + 2 x 10 elements, then 2 x 2 x 100 + 2 x 20 of 10,200, whatever model is trained."""
    workload = Workload("big", bytes=4 * 10_200.0, seconds_per_batch={"abacus": 3.0}, matrices=matrices)
    cluster = cluster_of(workload=workload, model_elements=24)

    def main(team: SimTeam) -> None:
        params = FlatParams(nn.Linear(4, 6, bias=False))
        strategy = Powersgd(params, Optimizer(params, OptimizerOptions()), team, rank=2)
        strategy.compress()

    cluster.run(main)
    elements = 200 + 20 + 400 + 40 if matrices else 2 * (4 + 6) * 10_200 / 24
    assert cluster.comm_stats[0].modelled_bytes == pytest.approx(1.5 * 4 * elements)


# mutants


class Forgets(Topk):
    """Has no error feedback."""

    def step(self, gradient: Any) -> Any:
        self._error.zero_()
        return super().step(gradient)


class OwnOnly(Topk):
    """Sends what is largest in its own gradient, not in the sum with the error."""

    def _largest(self) -> Tensor:
        return (self.params.g - self._error).abs().topk(self._k, sorted=False).indices


class LowRankForgets(Powersgd):
    """Has no error feedback."""

    def compress(self) -> None:
        self._error.zero_()
        super().compress()


class ColdStart(Powersgd):
    """Begins each step with the first Q."""

    def compress(self) -> None:
        self._factored = self._find_matrices()
        super().compress()


MUTANTS: list[tuple[Callable[[MakeStrategy], None], MakeStrategy]] = [
    (check_topk, partial(Forgets, density=0.25)), (check_topk, partial(OwnOnly, density=0.25)),
    (check_topk, partial(Topk, density=0.3)), (check_powersgd, partial(LowRankForgets, rank=1, min_compression=0.0)),
    (check_powersgd, partial(ColdStart, rank=1, min_compression=0.0)),
    (check_powersgd, partial(Powersgd, rank=2, min_compression=0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("check", "mutant"), MUTANTS)
def test_mutants_are_caught(check: Callable[[MakeStrategy], None], mutant: MakeStrategy) -> None:
    with pytest.raises(AssertionError):
        check(mutant)


@pytest.mark.parametrize(
    ("strategy", "key"), [(Topk, "error"), (Topk, "weights"), (Powersgd, "error"), (Powersgd, "Q")]
)
def test_every_key_of_a_state_matters(strategy: type[Strategy], key: str) -> None:
    options = {"density": 0.1} if strategy is Topk else {"rank": 1, "min_compression": 0.0}
    with pytest.raises(AssertionError):
        check_resume(partial(without(strategy, key), **options), OptimizerOptions(), lambda team, s, gradient: gradient)
