"""`launcher.wire`: weights and gradients travel in 16 bits, and sums are float32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.slowmo import Slowmo
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.wire_dtype import WIRE_DTYPES
from tests.support.soak import SHORT, STRATEGIES, WITH_SERVERS
from tests.support.toy_training import hardware, train
from tests.support.transport_fixtures import transports

COMPRESSED = {"gtc", "htm", "topk"}  # send int32, apart from blocks of htm
N = 100_001


def sent_bytes(name: str, wire: str) -> tuple[int, float]:
    """Returns the bytes that all learners sent in a run, and the loss of its last epoch."""
    results = train(SHORT, STRATEGIES[name], cluster=hardware(jitter=0.0), wire=wire)  # type: ignore[arg-type]
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
        few_weights = 0.65 if name in WITH_SERVERS else 0.54  # beside the counters in messages with servers
        assert 0.49 < half / full < few_weights


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


@pytest.mark.parametrize("kind", [Bmuf, Diloco, Slowmo])
def test_blocks_without_changes_leave_the_weights_alone(kind: type[Bmuf]) -> None:
    """Changes are averaged, so the weights themselves are not rounded."""
    problem = replace(SHORT, lr=1e-12)  # too small to change a weight
    results = train(problem, partial(kind, block_size=2), cluster=hardware(jitter=0.0), wire="bfloat16")
    expected = train(problem, Sync)[0].replica
    assert all(torch.equal(result.replica, expected) for result in results.values())


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
