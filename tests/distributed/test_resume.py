"""A run that continues from a checkpoint gives the same bits as one that never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.powersgd import Powersgd
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategies.slowmo import Slowmo
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategies.topk import Topk
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from tests.support.strategy_checks import check_resume, without

SYNCHRONOUS = {
    "sync": Sync, "sync of weights": partial(Sync, form="weights"), "hybrid": Hybrid, "dpsgd": Dpsgd,
    "dpsgd on a ring": partial(Dpsgd, mixing="ring"), "gtc": partial(Gtc, threshold=20.0),
    "gtc with momentum before": partial(Gtc, threshold=20.0, density=0.1, momentum="before"),
    "bmuf": partial(Bmuf, block_size=3), "htm": partial(Htm, group_size=2, threshold=20.0, block_size=3),
    "diloco": partial(Diloco, block_size=3), "diloco in fragments": partial(Diloco, block_size=3, fragments=2),
    "slowmo": partial(Slowmo, block_size=3), "powersgd": partial(Powersgd, rank=1),
    "slowmo of powersgd": partial(Slowmo, block_size=3, inner=partial(Powersgd, rank=1), group_size=2),
    "topk": partial(Topk, density=0.1),
}  # fmt: skip


def in_phase(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
    """Lets each learner start its gradients at its own phase of a two-second period.

    Events after a checkpoint then happen in the same order when the run is resumed.
    """

    def timed(on_bucket: BucketHook | None) -> StepResult | None:
        begin = 2 * (math.floor(team.now() / 2) + 1) + team.rank / 16
        team.sleep(begin - team.now())
        return gradient(on_bucket)

    return timed


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("make", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_synchronous_strategies_resume_with_the_same_bits(make: Callable[..., Strategy], kind: str) -> None:
    check_resume(make, OptimizerOptions(kind), lambda team, strategy, gradient: gradient)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"group_size": 2}, {"partners": "random", "delay_by_one": True}, {"partners": "exponential"}]
)
def test_adpsgd_resumes_with_the_same_bits_if_events_keep_their_order(options: dict[str, Any]) -> None:
    check_resume(partial(Adpsgd, **options), OptimizerOptions(), in_phase)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("make", [PsSync, PsAsync, partial(Psp, c=2, b=0.5)], ids=["ps_sync", "ps_async", "psp"])
def test_parameter_servers_resume_with_the_same_bits(make: Callable[..., Strategy], kind: str) -> None:
    check_resume(partial(make, servers=2), OptimizerOptions(kind), in_phase)  # type: ignore[arg-type]


# mutants: states that lack something


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        (Sync, "weights"), (Sync, "optimizer"), (Sync, "staleness"), (Hybrid, "weights"), (Hybrid, "pushed"),
        (Hybrid, "optimizer"), (Hybrid, "steps"), (Dpsgd, "weights"), (Dpsgd, "optimizer"), (Dpsgd, "steps"),
        (Adpsgd, "weights"), (Adpsgd, "x"), (Adpsgd, "optimizer"), (Adpsgd, "merged"), (Adpsgd, "exchanges"),
        (Adpsgd, "counts"), (PsSync, "weights"), (PsAsync, "weights"), (PsAsync, "server"),
        (PsAsync, "versions"), (PsAsync, "staleness"), (Psp, "weights"), (Psp, "server"),
    ],
)  # fmt: skip
def test_every_key_of_a_state_matters(strategy: type[Strategy], key: str) -> None:
    with pytest.raises(AssertionError):
        check_resume(without(strategy, key), OptimizerOptions(), in_phase)
