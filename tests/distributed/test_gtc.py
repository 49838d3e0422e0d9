"""GTC against its definition, applied to the gradients that the learners computed, and mutants that this catches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategies import gtc
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from tests.support.strategy_checks import Seen
from tests.support.toy_problem import Problem, heldout, make_model, start_weights
from tests.support.toy_training import LearnerResult, MakeStrategy, hardware, train, train_single

PROBLEM = Problem()  # 105 rounds of 4 learners, 5 incomplete
TAU = 20.0  # for sums over frames: a ninth of all elements is sent
MEAN_TAU = 0.5
MEAN = partial(Gtc, threshold=MEAN_TAU, frames="mean")


def replay(seen: Seen, tau: float, momentum: str, sums: bool) -> tuple[Tensor, list[Tensor]]:
    """Replays GTC by its definition.

    Args:
        seen: the gradients.
        tau: τ.
        momentum: after or before.
        sums: τ is for sums over a learner's frames.

    Returns:
        Weights [N], and the residual [N] of each learner.
    """
    params = FlatParams(make_model())
    optimizer = Optimizer(params, PROBLEM.options)
    size = len(seen.g)
    residuals = [torch.zeros_like(params.w) for _ in range(size)]
    own_velocity = [torch.zeros_like(params.w) for _ in range(size)]
    for step, rate in enumerate(seen.rate):
        unit = gtc.round_to_exact(tau / (seen.loss_denominator[0][step] if sums else 1.0) / size, size)
        threshold, total = unit * size, torch.zeros_like(params.w)
        for i, r in enumerate(residuals):
            g = seen.g[i][step]
            if momentum == "before":
                g = own_velocity[i].mul_(0.9).add_(g)
            r += g
            sign = torch.where(r.abs() > threshold, r.sign(), 0.0)
            r -= threshold * sign
            total += unit * sign
        if momentum == "before":
            params.w.add_(total, alpha=-rate)
        else:
            params.g.copy_(total)
            optimizer.lr = rate
            optimizer.step()
    return params.w, residuals


def assert_same_bits(results: dict[int, LearnerResult]) -> None:
    for result in results.values():
        assert all(torch.equal(a, b) for a, b in zip(result.consensus, results[0].consensus, strict=True))


def check_replay(make: MakeStrategy, tau: float, momentum: str = "after", sums: bool = False) -> None:
    seen = Seen()
    results = train(PROBLEM, make, wrap=seen)
    w, residuals = replay(seen, tau, momentum, sums)
    assert_same_bits(results)
    for rank, result in results.items():
        assert torch.equal(result.replica, w)
        assert torch.equal(result.strategy.residual, residuals[rank])  # type: ignore[attr-defined]
    counts = results[1].strategy.metrics
    assert counts["elements"] == 105 * len(w) and 0.1 < counts["sent"] / counts["elements"] < 0.95


class Summing(Gtc):
    """Keeps the sum of what was decoded [N], over steps and learners, in `applied`."""

    applied: Tensor | float = 0.0

    def _exchange(self, unit: float) -> None:
        super()._exchange(unit)
        self.applied = self.applied + self.params.g.double() * self.team.size


def check_nothing_is_lost(make: MakeStrategy, epochs: int = 5) -> None:
    """Sent elements and residuals add up to the sum of all gradients."""
    seen = Seen()
    results = train(replace(PROBLEM, epochs=epochs), make, wrap=seen)
    assert len(seen.rate) == 21 * epochs
    first = results[0].strategy
    assert isinstance(first, Summing) and isinstance(first.applied, Tensor)
    left = sum(result.strategy.residual.double() for result in results.values())  # type: ignore[attr-defined]
    gradients = sum(g.double() for rank in results for g in seen.g[rank])
    assert isinstance(gradients, Tensor) and first.applied.abs().max() > 5 * MEAN_TAU
    torch.testing.assert_close(first.applied + left, gradients, rtol=1e-5, atol=1e-4)


def test_bits_equal_the_definition() -> None:
    check_replay(MEAN, MEAN_TAU)
    check_replay(partial(Gtc, threshold=TAU), TAU, sums=True)


def test_momentum_before_the_residual() -> None:
    check_replay(partial(MEAN, momentum="before"), MEAN_TAU, momentum="before")


def test_a_round_with_few_batches_weighs_no_more_than_others() -> None:
    """The last round of an epoch has one batch for 16 learners, whose residuals hold many gradients."""
    problem = Problem(learners=16, batches=160, epochs=6, rounds_per_segment=11, lr=0.05)
    losses = [
        heldout(
            train(replace(problem, batches=batches), partial(Gtc, density=0.05), cluster=hardware(devices_per_host=8))[
                0
            ].replica
        )
        for batches in (160, 161)
    ]
    assert losses[1] < 1.3 * losses[0], losses


def test_sent_and_residual_are_the_sum_of_all_gradients() -> None:
    check_nothing_is_lost(partial(Summing, threshold=TAU), epochs=48)  # 1,008 steps


def test_one_learner_is_local_to_the_bit() -> None:
    alone = replace(PROBLEM, learners=1, joined=4)
    result = train_single(alone, Gtc)
    for ours, theirs in zip(result.consensus, train_single(alone, Local).consensus, strict=True):
        assert torch.equal(ours, theirs)
    assert not result.strategy.metrics and result.strategy.staleness == {0: 105}
    assert torch.equal(train(alone, Gtc)[0].replica, result.replica)


@pytest.mark.parametrize(
    "options", [{"dense_above": 0.0}, {"dense_above": 0.1}, {"bucket": 7}, {"bucket": 54}], ids=str
)
def test_encodings_and_buckets_change_no_bit(options: dict[str, Any]) -> None:
    plain, other = train(PROBLEM, partial(Gtc, threshold=TAU)), train(PROBLEM, partial(Gtc, threshold=TAU, **options))
    assert_same_bits(other)
    assert all(torch.equal(a, b) for a, b in zip(plain[0].consensus, other[0].consensus, strict=True))
    counts = other[0].strategy.metrics
    assert counts["sent"] == plain[0].strategy.metrics["sent"] and not plain[0].strategy.metrics["dense"]
    if options.get("dense_above") == 0.0:
        assert counts["dense"] > 90, "every step in which anything was sent"
    elif "dense_above" in options:
        assert 10 < counts["dense"] < 90


def test_bytes_sent_match_the_counts_and_are_fewer_than_of_sync() -> None:
    sent, in_full = (train(PROBLEM, make)[2].strategy for make in (partial(Gtc, threshold=TAU), Sync))
    lengths = 3 * 4 * 105  # one number per step to each other learner
    assert sum(sent.team.comm_stats.bytes_sent.values()) == 3 * 4 * sent.metrics["sent"] + lengths
    assert sum(sent.team.comm_stats.bytes_sent.values()) < 0.5 * sum(in_full.team.comm_stats.bytes_sent.values())


def test_heldout_loss_is_close_to_sync() -> None:
    sync = heldout(train(PROBLEM, Sync)[0].replica)
    assert heldout(start_weights()) > 1.3 * sync
    for options in ({"threshold": TAU}, {"density": 0.1}, {"threshold": 3.0, "frames": "mean", "momentum": "before"}):
        assert heldout(train(PROBLEM, partial(Gtc, **options))[0].replica) < 1.25 * sync  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0.01, 100.0])
def test_the_threshold_adapts_to_the_given_density(start: float) -> None:
    make = partial(Gtc, threshold=start, density=0.1)
    results, early = train(replace(PROBLEM, epochs=14), make), train(replace(PROBLEM, epochs=10), make)
    assert_same_bits(results)
    assert len({result.strategy.state_dict()["threshold"] for result in results.values()}) == 1
    counts = results[0].strategy.metrics - early[0].strategy.metrics
    assert counts["sent"] / counts["elements"] == pytest.approx(0.1, rel=0.3)


@pytest.mark.parametrize("kind", ["adam", "nesterov"])
def test_other_rules_and_clipping(kind: str) -> None:
    for momentum in ("after", "before"):
        options = OptimizerOptions(kind, clip_norm=0.5)  # type: ignore[arg-type]
        problem = replace(PROBLEM, epochs=2, options=options, lr=0.01)
        results = train(problem, partial(MEAN, momentum=momentum))  # type: ignore[arg-type]
        assert_same_bits(results)
        assert heldout(results[0].replica) < heldout(start_weights())


def test_bad_options_are_rejected() -> None:
    for options, message in (
        ({"threshold": 0}, r"strategy\.threshold=0: must be above 0"), ({"frames": "both"}, r"strategy\.frames=both"),
        ({"density": 1.5}, r"strategy\.density=1\.5"), ({"momentum": "none"}, r"strategy\.momentum=none"),
        ({"dense_above": -1}, r"strategy\.dense_above=-1"), ({"bucket": 2**31 + 1}, "31 bits for the index"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            train(PROBLEM, partial(Gtc, **options))  # type: ignore[arg-type]
    decaying = replace(PROBLEM, options=OptimizerOptions(weight_decay=0.1))
    with pytest.raises(InputError, match="weight decay would decay the residual"):
        train(decaying, partial(Gtc, momentum="before"))


def test_nan_gradients_are_detected() -> None:
    def inject_nan(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
        def injected(on_bucket: BucketHook | None) -> StepResult | None:
            step_result = gradient(on_bucket)
            if team.rank == 2:
                strategy.params.g[5] = float("nan")
            return step_result

        return injected

    with pytest.raises(InputError, match="a gradient is NaN or Inf"):
        train(replace(PROBLEM, epochs=1), Gtc, wrap=inject_nan, cluster=hardware())


# mutants


class Forgets(Summing):
    """Drops what was not sent."""

    def _compressed_step(self, frames: float) -> None:
        super()._compressed_step(frames)
        self.residual.zero_()


class Clears(Summing):
    """Removes a sent element from the residual completely, not only τ."""

    def _exchange(self, unit: float) -> None:
        beyond = (self.residual + self.params.g).abs() > unit * self.team.size
        super()._exchange(unit)
        self.residual[beyond] = 0.0


class WithoutItself(Summing):
    """Decodes only the others' messages."""

    def _receive(self, g: Tensor, work: Any, unit: float) -> None:
        gtc.decode(torch.cat([packed for rank, packed in enumerate(work.wait()) if rank != self.team.rank]), g, unit)


class OneThreshold(Gtc):
    """Uses the same τ whatever the frames of a round."""

    def _compressed_step(self, frames: float) -> None:
        super()._compressed_step(30.0)


@pytest.mark.parametrize("mutant", [Forgets, Clears, WithoutItself])
def test_mutants_are_caught(mutant: type[Gtc]) -> None:
    with pytest.raises(AssertionError):
        check_nothing_is_lost(partial(mutant, threshold=TAU, dense_above=1.0))
    with pytest.raises(AssertionError):
        check_replay(partial(mutant, threshold=MEAN_TAU, frames="mean", dense_above=1.0), MEAN_TAU)


def test_a_wrong_scale_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_replay(partial(OneThreshold, threshold=TAU), TAU, sums=True)
