"""`launcher.wire`: weights and gradients travel in 16 bits, and sums are float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.slowmo import Slowmo
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import CompletedGather, CompletedWork, Gather, SingleProcess, Work
from asr_am.distributed.wire_dtype import WIRE_DTYPES, rounded
from asr_am.errors import InputError
from tests.support.soak import SHORT, STRATEGIES, WITH_SERVERS
from tests.support.toy_training import hardware, train
from tests.support.transport_fixtures import transports

COMPRESSED = {"gtc", "htm", "topk"}  # send int32, apart from blocks of htm
N = 100_001


def sent_bytes(name: str, wire: str) -> tuple[int, float]:
    """Returns the bytes that all learners sent in a run, and the loss of its last epoch."""
    problem = replace(SHORT, rounds_per_segment=20)  # weights that are not rounded when the team is drained count too
    results = train(problem, STRATEGIES[name], cluster=hardware(jitter=0.0), wire=wire)  # type: ignore[arg-type]
    stats = [result.strategy.team.comm_stats for result in results.values()]
    return sum(sum(each.bytes_sent.values()) for each in stats), results[0].totals[-1].mean_loss


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_sends_half_the_bytes_and_learns_as_before(name: str, wire: str) -> None:
    (full, loss), (half, other) = sent_bytes(name, "float32"), sent_bytes(name, wire)
    assert abs(other / loss - 1) < 0.05
    if name in COMPRESSED:
        assert half / full > 0.7
    else:
        most = 0.75 if name in WITH_SERVERS else 0.54  # beside the counters in messages with servers
        assert 0.49 < half / full < most


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_sums_are_float32(wire: str) -> None:
    """1 + 2^-9 is not in bfloat16, nor 1 + 2^-12 in float16: the sum of 16-bit numbers must not be rounded to them."""
    dtype = WIRE_DTYPES[wire]
    small = torch.finfo(dtype).eps / 4

    def mean(team: object) -> float:
        x = torch.tensor([1.0 if team.rank == 0 else small])  # type: ignore[attr-defined]
        team.start_all_reduce_mean(x).wait()  # type: ignore[attr-defined]
        return float(x)

    size = 8
    cluster = SimCluster(hardware(), Workload("toy", seconds_per_batch={"toy": 1.0}), size, 1, wire=wire)  # type: ignore[arg-type]
    expected = float(torch.tensor((1 + (size - 1) * small) / size).to(dtype))
    assert set(cluster.run(mean).values()) == {expected} and expected > 1 / size


def test_gossip_between_equal_learners_changes_nothing() -> None:
    """Both partners use what the other has received, so rounding adds nothing to the sum of their weights."""
    problem = replace(SHORT, lr=1e-12)  # too small to change a weight
    results = train(problem, partial(Adpsgd, timeout=3.0), cluster=hardware(jitter=0.0), wire="bfloat16")
    expected = train(problem, Sync)[0].replica
    assert sum(result.strategy.metrics["exchanges"] for result in results.values()) > 5
    assert all(torch.equal(result.replica, expected) for result in results.values())
    assert not torch.equal(expected.bfloat16().float(), expected)


WHOLE_WEIGHTS = {
    "sync-weights": partial(Sync, form="weights"), "hybrid": Hybrid, "dpsgd": Dpsgd,
    "bmuf": partial(Bmuf, block_size=2), "diloco": partial(Diloco, block_size=2),
    "slowmo": partial(Slowmo, block_size=2),
    "bmuf-groups": partial(Bmuf, block_size=2, inner=partial(Sync, form="weights"), group_size=2),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE_WEIGHTS)
def test_averages_without_changes_leave_the_weights_alone(name: str) -> None:
    """Changes are sent, or the rounding of the own weights is kept, so that many small updates are not lost."""
    problem = replace(SHORT, lr=1e-12)  # too small to change a weight
    results = train(problem, WHOLE_WEIGHTS[name], cluster=hardware(jitter=0.0), wire="bfloat16")  # type: ignore[arg-type]
    expected = train(problem, Sync)[0].replica
    assert all(torch.equal(result.replica, expected) for result in results.values())


@pytest.mark.parametrize("name", ["adpsgd-groups", *sorted(WITH_SERVERS)])
def test_a_drained_team_has_the_weights_of_leaders_and_servers_to_the_bit(name: str) -> None:
    results = train(SHORT, STRATEGIES[name], cluster=hardware(jitter=0.0), wire="bfloat16")
    replicas = [result.replica for result in results.values()]
    assert all(not torch.equal(replica.bfloat16().float(), replica) for replica in replicas)
    groups = [replicas[:2], replicas[2:]] if name == "adpsgd-groups" else [replicas]
    assert all(torch.equal(replica, group[0]) for group in groups for replica in group)


class ManyLearners(SingleProcess):
    """One of 300 learners, which all have the same gradient. Counts the all-reduces."""

    size = 300
    reduced = 0

    def __init__(self, wire: str) -> None:
        super().__init__()
        self.wire = WIRE_DTYPES[wire]

    def as_sent(self, x: Tensor) -> Tensor:
        return rounded(x, self.wire)

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> Work:
        self.reduced += 1
        return CompletedWork()

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        return CompletedGather([x] * self.size)


@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_signs_of_gtc_are_sent_dense_where_their_sums_are_exact(wire: str) -> None:
    """Bfloat16 cannot tell the sums of more than 256 signs apart."""
    params, team = FlatParams(nn.Linear(3, 2)), ManyLearners(wire)
    optimizer = Optimizer(params, OptimizerOptions(momentum=0.0))
    strategy = Gtc(params, optimizer, team, threshold=0.5, frames="mean", dense_above=0.0)

    def gradient(on_bucket: BucketHook | None) -> StepResult:
        params.g.fill_(1.0)
        return StepResult(Lease(None, 0, 0, 1.0), 1.0, 0, 0.1, torch.zeros(()), torch.zeros(()))

    strategy.step(gradient)
    assert (team.reduced, strategy.metrics["dense"]) == ((0, 0) if wire == "bfloat16" else (1, 1))


def test_squares_of_adam_are_not_averaged_in_float16() -> None:
    problem = replace(SHORT, options=OptimizerOptions(kind="adam"))
    make = partial(Bmuf, block_size=2, momentum="average")
    with pytest.raises(InputError, match=r"^launcher\.wire=float16: .* use launcher\.wire=bfloat16$"):
        train(problem, make, wire="float16")
    train(problem, make, wire="bfloat16")


@pytest.mark.parametrize("one_host", [False, True])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_messages_are_rounded_and_counters_are_not(wire: str, one_host: bool) -> None:
    dtype = WIRE_DTYPES[wire]
    x, numbers = torch.randn(N), torch.arange(5, dtype=torch.int32) + (1 << 30)
    with transports(2, one_host=one_host, wire=dtype) as (a, b):
        b.transport.register_tag("w", (N, 5, 3))
        a.transport.send(1, "w", 0, (x, numbers, torch.ones(3)))
        first, second, third = b.recv("w").tensors
        assert first.dtype == torch.float32 and torch.equal(first, x.to(dtype).float())
        assert second.dtype == torch.int32 and torch.equal(second, numbers) and third.tolist() == [1.0] * 3
        assert a.comm_stats.bytes_sent == {1: 4 * ((N + 1) // 2 + 5 + 2)}


def test_all_learners_have_the_same_bits() -> None:
    results = train(SHORT, Sync, wire="bfloat16")
    assert all(torch.equal(result.replica, results[0].replica) for result in results.values())
    assert not torch.equal(results[0].replica, train(SHORT, Sync)[0].replica)
