"""BMUF and HTM against a single-process reference and against each other, and mutants that this catches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_am.distributed.leases import GradientFn
from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from tests.support import reference_algorithms as reference
from tests.support.strategy_checks import Seen, check_resume, without
from tests.support.toy_problem import Problem, heldout, start_weights
from tests.support.toy_training import LearnerResult, MakeStrategy, train

PROBLEM = Problem()  # 105 rounds of 4 learners, 5 incomplete. Blocks end in the middle of segments
ROUNDS, BLOCK = 105, 6
GTC: dict[str, Any] = {"threshold": 20.0}


def assert_agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0.0, atol=2e-5)


def assert_same_bits(ours: dict[int, LearnerResult], theirs: dict[int, LearnerResult]) -> None:
    for rank, result in ours.items():
        assert all(torch.equal(a, b) for a, b in zip(result.consensus, theirs[rank].consensus, strict=True))
        assert torch.equal(result.replica, theirs[rank].replica)


@cache
def bmuf(update: str, eta: float, zeta: float, momentum: str = "keep", block_size: int = BLOCK) -> list[Tensor]:
    """Returns the learners' mean weights at the end of each segment, in float64, with W(t) kept explicitly."""
    start, size, saved = start_weights().double(), PROBLEM.learners, []
    own, W, W_g, Delta = start.repeat(size, 1), start, start, torch.zeros_like(start)
    velocity = torch.zeros_like(own)
    for step, now in enumerate(reference.rounds(PROBLEM), start=1):
        g = [reference.gradient(own[i], batch, now.frames / size) for i, batch in enumerate(now.batches)]
        velocity = 0.9 * velocity + torch.stack(g)
        own = own - now.rate * velocity
        if step % block_size == 0:
            G = own.mean(dim=0) - W_g  # (1), (2)
            Delta = eta * Delta + zeta * G  # (3)
            W = W + Delta
            W_g = {"classical": W, "nesterov": W + eta * Delta, "equation4": W_g + Delta + eta * Delta}[update]
            own = W_g.repeat(size, 1)
            if momentum != "keep":
                velocity = 0 * velocity if momentum == "reset" else velocity.mean(dim=0).repeat(size, 1)
        if now.ends_segment:
            saved.append(own.mean(dim=0))
    return saved


def check_bmuf(make: Callable[..., Bmuf], **options: Any) -> None:
    """Compares with the reference, by default with η = 0.5 and ζ = 0.8."""
    given = {"update": "nesterov", "eta": 0.5, "zeta": 0.8} | options
    results = train(PROBLEM, partial(make, block_size=BLOCK, **given))
    expected = bmuf(**given)
    for result in results.values():
        assert_agree(result.consensus, expected)
        assert result.strategy.metrics["blocks"] == ROUNDS // BLOCK and result.strategy.staleness == {0: ROUNDS}


@pytest.mark.parametrize("update", ["classical", "nesterov", "equation4"])
def test_blocks_are_filtered_as_the_papers_say(update: str) -> None:
    check_bmuf(Bmuf, update=update)


@pytest.mark.parametrize("momentum", ["average", "reset"])
def test_the_learners_own_momentum_at_a_block(momentum: str) -> None:
    check_bmuf(Bmuf, momentum=momentum)


def test_eta_follows_from_equation_5() -> None:
    expected = bmuf("nesterov", 1 - 0.9 / (4 * 0.5), 0.9)
    assert_agree(train(PROBLEM, partial(Bmuf, block_size=BLOCK, zeta=0.9, C=0.5))[1].consensus, expected)


def test_gain_of_a_constant_block_gradient() -> None:
    """Learners that move by 1 in each block move the model by 1/(1-η), and by equation 4 (1+η) times as far."""
    for update, gain in (("classical", 2.0), ("nesterov", 2.0), ("equation4", 3.0)):
        alone = Problem(learners=1, batches=1, epochs=1)
        strategy = train(alone, partial(Bmuf, update=update, eta=0.5, block_size=99))[0].strategy  # type: ignore[arg-type]
        assert isinstance(strategy, Bmuf)
        w = strategy._W_g.clone()
        for _ in range(50):
            before = w.clone()
            strategy.combine(w.add_(1.0), strategy._W_g, slice(None))
            strategy._W_g.copy_(w)
        torch.testing.assert_close(w - before, torch.full_like(w, gain), rtol=1e-4, atol=1e-4)


# limits, bit for bit


class ModelAveraging(Bmuf):
    """Model averaging without a filter."""

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        pass


@pytest.mark.parametrize("update", ["classical", "nesterov", "equation4"])
def test_without_block_momentum_it_is_model_averaging(update: str) -> None:
    ours = train(PROBLEM, partial(Bmuf, block_size=BLOCK, eta=0.0, update=update))  # type: ignore[arg-type]
    assert_same_bits(ours, train(PROBLEM, partial(ModelAveraging, block_size=BLOCK)))


def test_without_block_momentum_blocks_of_one_step_are_sync() -> None:
    ours = train(PROBLEM, partial(Bmuf, block_size=1, eta=0.0))
    assert_same_bits(ours, train(PROBLEM, partial(Sync, form="weights")))
    assert_agree(ours[2].consensus, reference.sync(PROBLEM))


@cache
def plain_bmuf() -> dict[int, LearnerResult]:
    return train(PROBLEM, partial(Bmuf, block_size=BLOCK, zeta=0.8, C=0.5))


@cache
def plain_gtc() -> dict[int, LearnerResult]:
    return train(PROBLEM, partial(Gtc, **GTC))


def check_groups_of_one(make: MakeStrategy) -> None:
    assert_same_bits(train(PROBLEM, make), plain_bmuf())


def check_one_group(make: MakeStrategy) -> None:
    assert_same_bits(train(PROBLEM, make), plain_gtc())


def one_group(kind: type[Htm] = Htm) -> MakeStrategy:
    return partial(kind, group_size=4, block_size=BLOCK, **GTC)


def groups_of_one(kind: type[Htm] = Htm) -> MakeStrategy:
    return partial(kind, group_size=1, block_size=BLOCK, zeta=0.8, C=0.5)


def test_htm_of_groups_of_one_is_bmuf() -> None:
    check_groups_of_one(groups_of_one())


def test_htm_of_one_group_is_gtc() -> None:
    check_one_group(one_group())


def test_htm_between_the_limits() -> None:
    """In two groups of two, members agree at every step and groups at the end of blocks. Only leaders filter."""
    make = partial(Htm, group_size=2, block_size=BLOCK, **GTC)
    problem = replace(
        PROBLEM, epochs=2, rounds_per_segment=BLOCK
    )  # 21 rounds an epoch: segments end at blocks and inside them
    results = train(problem, make)
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(results[one].replica, results[other].replica)
    assert torch.equal(results[0].replica, results[2].replica), "42 rounds are seven blocks"
    stopped = train(replace(problem, epochs=1), make)  # 21 rounds
    assert torch.equal(stopped[0].replica, stopped[1].replica) and not torch.equal(
        stopped[1].replica, stopped[2].replica
    )
    strategies = [result.strategy for result in results.values()]
    assert [len(s.state_dict()["delta"]) > 0 for s in strategies] == [True, False, True, False], "leaders filter"
    assert all(s.state_dict()["residual"].any() for s in strategies)
    for rank, strategy in enumerate(strategies):
        across = {to for to, count in strategy.team.comm_stats.bytes_sent.items() if to // 2 != rank // 2 and count}
        assert across == ({2} if rank == 0 else {0} if rank == 2 else set()), "only leaders write to other groups"


@pytest.mark.parametrize("residual", ["keep", "reset"])
def test_htm_equals_a_reference_on_the_same_gradients(residual: str) -> None:
    """Repeats GTC inside pairs and BMUF across them on the gradients that the learners computed."""
    seen, tau = Seen(), 0.5
    make = partial(Htm, group_size=2, block_size=BLOCK, threshold=tau, frames="mean", residual=residual)  # type: ignore[arg-type]
    results = train(replace(PROBLEM, lr=0.01), make, wrap=seen)
    W = W_g = start_weights().double()
    Delta, own = torch.zeros_like(W), [W.clone(), W.clone()]
    velocity, residuals = torch.zeros(2, len(W)).double(), torch.zeros(4, len(W))
    for step, rate in enumerate(seen.rate, start=1):
        for rank in range(4):
            residuals[rank] += seen.g[rank][step - 1]
        sent = tau * torch.where(residuals.abs() > tau, residuals.sign(), 0.0)
        residuals -= sent
        velocity = 0.9 * velocity + sent.double().view(2, 2, -1).mean(dim=1)
        own = [own[k] - rate * velocity[k] for k in range(2)]
        if step % BLOCK == 0:
            Delta = 0.5 * Delta + (own[0] + own[1]) / 2 - W_g
            W = W + Delta
            W_g = W + 0.5 * Delta
            own = [W_g, W_g]
            residuals = 0.0 * residuals if residual == "reset" else residuals
    for rank, result in results.items():
        torch.testing.assert_close(result.replica.double(), own[rank // 2], rtol=0.0, atol=1e-5)
        assert torch.equal(result.strategy.state_dict()["residual"], residuals[rank])
    assert heldout(results[0].consensus[-1]) < 0.6 * heldout(start_weights())


@pytest.mark.parametrize(
    "options", [{"momentum": "before"}, {"momentum_at_block": "average"}, {"momentum_at_block": "reset"}], ids=str
)
def test_other_options_of_htm(options: dict[str, Any]) -> None:
    problem = replace(PROBLEM, epochs=3, lr=0.01)
    plain = train(problem, partial(Htm, group_size=2, block_size=BLOCK, **GTC))
    other = train(problem, partial(Htm, group_size=2, block_size=BLOCK, **GTC, **options))
    assert not torch.equal(plain[3].replica, other[3].replica)
    assert torch.equal(other[2].replica, other[3].replica)
    assert heldout(other[0].consensus[-1]) < 0.8 * heldout(start_weights())


@pytest.mark.parametrize("kind", ["adam", "nesterov"])
@pytest.mark.parametrize("momentum", ["keep", "average", "reset"])
def test_other_rules(kind: str, momentum: str) -> None:
    problem = replace(PROBLEM, epochs=2, options=OptimizerOptions(kind, clip_norm=1.0), lr=0.01)  # type: ignore[arg-type]
    result = train(problem, partial(Bmuf, block_size=BLOCK, momentum=momentum))[0]  # type: ignore[arg-type]
    assert heldout(result.consensus[-1]) < heldout(start_weights())


def test_bad_options_are_rejected() -> None:
    for make, message in (
        (partial(Bmuf, zeta=5.0), r"zeta=5\.0 and C=1\.0 with 4 models: eta=-0\.25: .* from 0 to below 1"),
        (partial(Bmuf, eta=1.0), r"strategy\.eta=1\.0"), (partial(Bmuf, zeta=0.0), r"strategy\.zeta=0\.0"),
        (partial(Bmuf, block_size=0), r"strategy\.block_size=0"),
        (partial(Bmuf, update="nesterow"), r"strategy\.update=nesterow"),  # type: ignore[arg-type]
        (partial(Bmuf, momentum="lose"), "lose: must be keep, average or reset"),  # type: ignore[arg-type]
        (partial(Htm, group_size=3), r"strategy\.group_size=3: does not divide learners=4"),
        (partial(Htm, group_size=8), r"strategy\.group_size=8"), (partial(Htm, group_size=0), "group_size=0"),
        (partial(Htm, group_size=2, residual="lose"), r"strategy\.residual=lose"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            train(PROBLEM, make)


# mutants


class AgainstW(Bmuf):
    """Computes G against the filtered model, not the one that was broadcast."""

    def _finish(self, part: slice) -> None:
        super()._finish(part)
        self._W_g.sub_(self._delta, alpha=self._eta)


class NotBroadcastBlock(Bmuf):
    """Each learner continues from its own weights."""

    def _finish(self, part: slice) -> None:
        own = self.params.w.clone()
        super()._finish(part)
        self.params.w.copy_(own)


class NoMomentum(Bmuf):
    """Has no block momentum."""

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        self._delta.zero_()
        super().combine(w, W_g, part)


@pytest.mark.parametrize("mutant", [AgainstW, NotBroadcastBlock, NoMomentum])
def test_mutants_of_bmuf_are_caught(mutant: type[Bmuf]) -> None:
    with pytest.raises(AssertionError):
        check_bmuf(mutant)


class FiltersTwice(Htm):
    """Filters each block twice."""

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        super().combine(w, W_g, part)
        super().combine(w, W_g, part)


class NotBroadcast(Htm):
    """Does not broadcast inside groups."""

    def _finish(self, part: slice) -> None:
        own = self.params.w.clone()
        super()._finish(part)
        if self._group_leaders is None:
            self.params.w.copy_(own + 1e-3)


class CompressesAnyway(Htm):
    """Drops small gradient elements even in groups of one."""

    def step(self, gradient: Any) -> Any:
        def without_small(on_bucket: Any) -> Any:
            step_result = gradient(on_bucket)
            self.params.g.masked_fill_(self.params.g.abs() < 1e-3, 0.0)
            return step_result

        return super().step(without_small)


def test_mutants_of_htm_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_groups_of_one(groups_of_one(FiltersTwice))
    with pytest.raises(AssertionError):
        check_one_group(one_group(NotBroadcast))
    with pytest.raises(AssertionError):
        check_groups_of_one(groups_of_one(CompressesAnyway))
    with pytest.raises(AssertionError):
        check_one_group(partial(Htm, group_size=2, block_size=BLOCK, **GTC))
    with pytest.raises(AssertionError):
        check_groups_of_one(partial(Htm, group_size=2, block_size=BLOCK, zeta=0.8, C=0.5))


# checkpoints


@pytest.mark.parametrize(
    "key", ["weights", "optimizer", "residual", "threshold", "steps", "W_g", "delta", "counts", "staleness"]
)
def test_every_key_of_a_state_matters(key: str) -> None:
    options = {"group_size": 2, "threshold": 20.0, "density": 0.1, "block_size": 3, "C": 2.0}
    with pytest.raises(AssertionError):
        check_resume(partial(without(Htm, key), **options), OptimizerOptions(), unwrapped)


def unwrapped(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
    return gradient
