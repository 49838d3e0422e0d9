"""DiLoCo and SlowMo against single-process references, their limits, inner strategies in groups, and mutants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.blocks import BlockStrategy
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.slowmo import Slowmo
from asr_am.distributed.strategies.sync import Sync
from asr_am.errors import InputError
from asr_am.parallax.strategy import Parallax
from tests.support import reference_algorithms as reference
from tests.support.strategy_checks import check_resume, without
from tests.support.toy_problem import Problem, heldout, start_weights
from tests.support.toy_training import LearnerResult, train

PROBLEM = Problem()  # 105 rounds of 4 learners, 5 incomplete. Blocks end in the middle of segments
ROUNDS, BLOCK = 105, 6
Combine = Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]
"""Maps the common model, the mean after the block, the rate and a momentum to the next model and momentum."""


def assert_agree(ours: Sequence[Tensor], theirs: Sequence[Tensor], atol: float = 2e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0.0, atol=atol)


def assert_same_bits(ours: dict[int, LearnerResult], theirs: dict[int, LearnerResult]) -> None:
    for rank, result in ours.items():
        assert all(torch.equal(a, b) for a, b in zip(result.consensus, theirs[rank].consensus, strict=True))
        assert torch.equal(result.replica, theirs[rank].replica)


def blocks(combine: Combine, momentum: str = "keep", fragments: int = 1) -> list[Tensor]:
    """Returns the learners' mean weights at the end of each segment, in float64."""
    start, size, saved = start_weights().double(), PROBLEM.learners, []
    own, common, memory = start.repeat(size, 1), start.clone(), torch.zeros_like(start)
    velocity = torch.zeros_like(own)
    for step, now in enumerate(reference.rounds(PROBLEM), start=1):
        g = [reference.gradient(own[i], batch, now.frames / size) for i, batch in enumerate(now.batches)]
        velocity = 0.9 * velocity + torch.stack(g)
        own = own - now.rate * velocity
        for k in range(fragments):
            if step % BLOCK == k * BLOCK // fragments:
                part = slice(len(start) * k // fragments, len(start) * (k + 1) // fragments)
                mean = own[:, part].mean(dim=0)
                common[part], memory[part] = combine(common[part], mean, now.rate, memory[part])
                own[:, part] = common[part]
                velocity = 0 * velocity if momentum == "reset" else velocity
        if now.ends_segment:
            saved.append(own.mean(dim=0))
    return saved


def diloco(theta: Tensor, mean: Tensor, rate: float, b: Tensor) -> tuple[Tensor, Tensor]:
    Delta = theta - mean
    b = 0.6 * b + Delta
    return theta - 0.8 * (Delta + 0.6 * b), b


def slowmo(x: Tensor, mean: Tensor, rate: float, u: Tensor) -> tuple[Tensor, Tensor]:
    u = 0.6 * u + (x - mean) / rate
    return x - 0.9 * rate * u, u


DILOCO = {"block_size": BLOCK, "outer_lr": 0.8, "outer_momentum": 0.6}
SLOWMO = {"block_size": BLOCK, "slow_lr": 0.9, "slow_momentum": 0.6}


@cache
def diloco_reference(fragments: int) -> list[Tensor]:
    return blocks(diloco, fragments=fragments)


@cache
def slowmo_reference(momentum: str) -> list[Tensor]:
    return blocks(slowmo, momentum)


def check_diloco(kind: type[Diloco], fragments: int = 1) -> None:
    for result in train(PROBLEM, partial(kind, **DILOCO, fragments=fragments)).values():  # type: ignore[arg-type]
        assert_agree(result.consensus, diloco_reference(fragments))
        assert result.strategy.metrics["blocks"] == ROUNDS // BLOCK and result.strategy.staleness == {0: ROUNDS}


def check_slowmo(kind: type[Slowmo], momentum: str = "keep") -> None:
    for result in train(PROBLEM, partial(kind, **SLOWMO, momentum=momentum)).values():  # type: ignore[arg-type]
        assert_agree(result.consensus, slowmo_reference(momentum))


@pytest.mark.parametrize("fragments", [1, 2, 5])
def test_diloco_is_that_of_the_papers(fragments: int) -> None:
    check_diloco(Diloco, fragments)


@pytest.mark.parametrize("momentum", ["keep", "reset"])
def test_slowmo_is_that_of_the_paper(momentum: str) -> None:
    check_slowmo(Slowmo, momentum)


# limits


def test_diloco_of_single_steps_without_outer_rule_averages_every_step() -> None:
    ours = train(PROBLEM, partial(Diloco, block_size=1, outer_lr=1.0, outer_momentum=0.0))
    assert_same_bits(ours, train(PROBLEM, partial(Sync, form="weights")))


def test_slowmo_without_slow_momentum_is_averaging() -> None:
    ours = train(PROBLEM, partial(Slowmo, block_size=BLOCK, slow_momentum=0.0, momentum="keep"))
    assert_same_bits(ours, train(PROBLEM, partial(Bmuf, block_size=BLOCK, eta=0.0)))


def test_diloco_is_bmuf_with_nesterov() -> None:
    ours = train(PROBLEM, partial(Diloco, **DILOCO))[1]  # type: ignore[arg-type]
    assert_agree(ours.consensus, train(PROBLEM, partial(Bmuf, block_size=BLOCK, eta=0.6, zeta=0.8))[1].consensus)


def test_adam_inside() -> None:
    problem = replace(PROBLEM, epochs=2, options=OptimizerOptions("adam"), lr=0.01)
    for kind in (Diloco, Slowmo):
        results = train(problem, partial(kind, block_size=BLOCK))
        assert heldout(results[0].consensus[-1]) < 0.8 * heldout(start_weights())


# inner strategies


def test_any_inner_strategy_of_collectives_nests() -> None:
    gtc: dict[str, Any] = {"threshold": 20.0}
    ours = train(PROBLEM, partial(Diloco, **DILOCO, inner=partial(Gtc, **gtc), group_size=2))  # type: ignore[arg-type]
    theirs = train(PROBLEM, partial(Htm, block_size=BLOCK, eta=0.6, zeta=0.8, group_size=2, **gtc))
    assert_agree(ours[2].consensus, theirs[2].consensus, atol=1e-4)
    one_group = train(
        PROBLEM, partial(Slowmo, block_size=BLOCK, inner=Sync, group_size=4, slow_momentum=0.0, momentum="keep")
    )
    assert_agree(one_group[3].consensus, reference.sync(PROBLEM))


@pytest.mark.parametrize("inner", [Hybrid, Parallax, partial(Diloco, block_size=2)])
def test_inner_strategies_with_other_weights_than_the_models_are_refused(inner: object) -> None:
    with pytest.raises(InputError, match=r"^strategy\.inner=\w+: has weights beside the model's"):
        train(PROBLEM, partial(Slowmo, inner=inner, group_size=2))  # type: ignore[arg-type]


def test_inner_strategies_with_messages_are_refused() -> None:
    for inner in (Adpsgd, partial(Dpsgd, mixing="all"), partial(PsSync, servers=1), partial(Htm, group_size=2)):
        with pytest.raises(InputError, match=r"^strategy\.inner: "):
            train(PROBLEM, partial(Diloco, inner=inner, group_size=2))  # type: ignore[arg-type]


def test_bad_options_are_rejected() -> None:
    for make, message in (
        (partial(Diloco, block_size=0), r"strategy\.block_size=0"), (partial(Diloco, outer_lr=0.0), "outer_lr=0.0"),
        (partial(Diloco, outer_momentum=1.0), r"outer_momentum=1\.0"), (partial(Diloco, fragments=0), "fragments=0"),
        (partial(Diloco, block_size=3, fragments=4), r"strategy\.fragments=4: must be from 1 to"),
        (partial(Diloco, group_size=3), r"strategy\.group_size=3: does not divide learners=4"),
        (partial(Slowmo, slow_lr=-1.0), r"slow_lr=-1\.0"), (partial(Slowmo, slow_momentum=1.0), "slow_momentum=1.0"),
        (partial(Slowmo, momentum="lose"), "lose: must be keep, average or reset"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            train(PROBLEM, make)


# mutants


class Uphill(Diloco):
    """Takes the outer gradient with the wrong sign."""

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        w.copy_(2 * W_g - w)
        super().combine(w, W_g, part)


class HeavyBall(Diloco):
    """Applies b alone, without Nesterov's look-ahead."""

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        b = self._b[part]
        b.mul_(self._mu).add_(W_g - w)
        w.copy_(W_g - self._beta * b)


class AllAtOnce(Diloco):
    """Combines the whole model at the end of a block."""

    def __init__(self, *arguments: Any, fragments: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)


class WithoutRate(Slowmo):
    """Keeps the slow momentum in units of weights."""

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        rate, self.optimizer.lr = self.optimizer.lr, 1.0
        super().combine(w, W_g, part)
        self.optimizer.lr = rate


class NotBroadcast(Slowmo):
    """Each learner continues from its own weights."""

    def _finish(self, part: slice) -> None:
        own = self.params.w.clone()
        super()._finish(part)
        self.params.w.copy_(own)


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (check_diloco, Uphill), (check_diloco, HeavyBall), (partial(check_diloco, fragments=2), AllAtOnce),
        (check_slowmo, WithoutRate), (check_slowmo, NotBroadcast),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_mutants_are_caught(check: Callable[[Any], None], mutant: type[BlockStrategy]) -> None:
    with pytest.raises(AssertionError):
        check(mutant)


@pytest.mark.parametrize(
    ("strategy", "key"),
    [(Diloco, "outer_momentum"), (Diloco, "W_g"), (Diloco, "steps"), (Slowmo, "slow_momentum"), (Slowmo, "W_g")],
)
def test_every_key_of_a_state_matters(strategy: type[BlockStrategy], key: str) -> None:
    with pytest.raises(AssertionError):
        check_resume(
            partial(without(strategy, key), block_size=3), OptimizerOptions(), lambda team, s, gradient: gradient
        )
