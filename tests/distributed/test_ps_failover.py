"""Parameter servers when learners die together with their servers, and when the network loses messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.param_server.server import ParameterServer
from asr_am.distributed.param_server.weight_shards import Shards
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import LearnerLost, Team
from tests.support.round_cluster import run
from tests.support.toy_problem import Problem, heldout, make_model, start_weights
from tests.support.toy_training import LearnerResult, MakeStrategy, hardware, train

PROBLEM = Problem(batches=64, epochs=2, rounds_per_segment=8, lr=0.02)
FAULT_TOLERANT: dict[str, MakeStrategy] = {
    "psp": partial(Psp, servers=2, c=2, timeout=2.0),
    "ps_async": partial(PsAsync, staleness_aware=True, servers=2, timeout=2.0),
}  # fmt: skip


def crash(learner: int, at: float, restart_after: float | None) -> dict[str, Any]:
    return {"faults": {"crashes": [{"learner": learner, "at": at, "restart_after": restart_after}]}}


def assert_trained(results: dict[int, LearnerResult]) -> None:
    first = next(iter(results.values()))
    assert first.totals[-1].mean_loss < 0.97 * first.totals[0].mean_loss
    assert all(torch.equal(result.replica, first.replica) for result in results.values()), (
        "all ranks have the servers' weights"
    )


@pytest.mark.parametrize("name", FAULT_TOLERANT)
def test_the_others_continue_without_a_worker(name: str) -> None:
    results = train(PROBLEM, FAULT_TOLERANT[name], cluster=hardware(**crash(1, 5.1, None)))
    assert sorted(results) == [0, 2, 3]
    assert_trained(results)


@dataclass(frozen=True)
class Recovery:
    """Version and weights [n] of the shard of server 1: of the checkpoint, and after recovery."""

    old_t: int
    old_w: Tensor
    t: int
    w: Tensor


def watching(make: MakeStrategy, recoveries: list[Recovery]) -> MakeStrategy:
    """Wraps the strategy so that the recovery of the server on rank 2 is appended to `recoveries`."""

    def watched(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        strategy = make(params, optimizer, team)
        if team.rank == 2 and team.incarnation == 1:
            server = strategy.server  # type: ignore[attr-defined]
            recover = server.recover

            def watch() -> None:
                before = server.t, server.w.clone()
                recover()
                recoveries.append(Recovery(*before, server.t, server.w.clone()))

            server.recover = watch
        return strategy

    return watched


@pytest.mark.parametrize("name", FAULT_TOLERANT)
@pytest.mark.parametrize("learner", [1, 2])
def test_a_learner_rejoins_with_its_server(name: str, learner: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 2 has shard 1. A worker's copy of it is newer than any checkpoint."""
    recoveries: list[Recovery] = []
    with caplog.at_level(logging.INFO):
        results = train(
            PROBLEM, watching(FAULT_TOLERANT[name], recoveries), cluster=hardware(**crash(learner, 12.0, 1.5))
        )
    assert sorted(results) == [0, 1, 2, 3]
    assert_trained(results)
    assert f"learner {learner} rejoined with the servers' weights" in caplog.text
    assert len(results[learner].computed) > 2, "it trains again"
    if learner == 2:
        (recovery,) = recoveries
        assert recovery.t > recovery.old_t and not torch.equal(recovery.w, recovery.old_w)
        assert "copy, without momentum" in caplog.text


@pytest.mark.parametrize("name", FAULT_TOLERANT)
def test_a_restarted_server_does_not_take_a_copy_that_was_never_pulled(name: str) -> None:
    """Worker 1 restarts from the checkpoint before server 1 does, while the others have a newer copy of the shard."""
    recoveries: list[Recovery] = []
    both = [{"learner": 1, "at": 12.0, "restart_after": 0.5}, {"learner": 2, "at": 12.0, "restart_after": 1.5}]
    train(PROBLEM, watching(FAULT_TOLERANT[name], recoveries), cluster=hardware(faults={"crashes": both}))
    (recovery,) = recoveries
    assert recovery.t > recovery.old_t and not torch.equal(recovery.w, recovery.old_w)


@pytest.mark.parametrize("name", FAULT_TOLERANT)
@pytest.mark.parametrize("after", [0.0, 1.002])  # rank 2 has just restarted and asks rank 0 for a copy
def test_two_servers_that_die_one_after_the_other_do_not_wait_for_each_other(name: str, after: float) -> None:
    seconds: list[float] = []

    def timed(server: ParameterServer) -> None:
        begin = server.team.now()
        ParameterServer.recover(server)
        seconds.append(server.team.now() - begin)

    both = [{"learner": rank, "at": at, "restart_after": 1.0} for rank, at in ((2, 12.0), (0, 12.0 + after))]
    make = with_methods(name, recover=timed)
    assert sorted(train(PROBLEM, make, cluster=hardware(faults={"crashes": both}))) == [0, 1, 2, 3]
    assert len(seconds) == 2 and max(seconds) < 2.0


def test_a_shard_of_a_dead_server_keeps_its_version_when_drained() -> None:
    def run_learner(team: Team) -> None:
        params = FlatParams(make_model())
        strategy = Psp(params, Optimizer(params, OptimizerOptions()), team, servers=3)
        strategy.worker.versions[:] = [5, 3, 4]
        strategy._pull_final([5, -1, 4])
        assert strategy.worker.versions == [5, 3, 5], "a shard that cannot be pulled is no newer than before"

    run(run_learner)


@pytest.mark.parametrize("name", FAULT_TOLERANT)
def test_a_restarted_server_retries_lost_requests(name: str) -> None:
    recoveries: list[Recovery] = []

    def lossy(params: FlatParams, optimizer: Optimizer, team: Any) -> Strategy:
        strategy = watching(FAULT_TOLERANT[name], recoveries)(params, optimizer, team)
        send, lost = team.send, set()

        def lose(to: int, tag: str, *rest: Any) -> None:
            if tag != "lost" or to in lost:
                send(to, tag, *rest)
            lost.add(to)

        if team.incarnation == 1:
            team.send = lose
        return strategy

    assert_trained(train(PROBLEM, lossy, cluster=hardware(**crash(2, 12.0, 1.5))))
    (recovery,) = recoveries
    assert recovery.t > recovery.old_t and not torch.equal(recovery.w, recovery.old_w)


@pytest.mark.parametrize("at", [7.25, 13.0])  # rank 3 still computes for seconds
def test_drained_workers_tell_a_restarted_server_at_once(at: float) -> None:
    """Else the server waits for their gradients, until they repeat after `timeout` that they are drained."""
    crashes = [{"learner": 2, "at": at, "restart_after": 0.3}]
    make = partial(Psp, servers=2, c=2, timeout=1000.0)
    assert_trained(train(PROBLEM, make, cluster=hardware(faults={"crashes": crashes, "slow": {3: 4.0}}), limit=900.0))


@pytest.mark.parametrize("name", FAULT_TOLERANT)
def test_a_server_that_dies_when_drained_may_restart_older(name: str) -> None:
    """Its last update is lost, although all workers were about to pull it."""

    def dying(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        strategy: Any = FAULT_TOLERANT[name](params, optimizer, team)
        gather_versions = strategy._gather_versions

        def late() -> list[int]:
            first = strategy._drain_count == 1 and team.incarnation == 0
            if first and team.rank == 2:
                strategy.server.t += 1
            versions: list[int] = gather_versions()
            if first:
                team.sleep(100.0)
            return versions

        strategy._gather_versions = late
        return strategy

    results = train(PROBLEM, dying, cluster=hardware(**crash(2, 100.0, 1.0)))
    assert sorted(results) == [0, 1, 2, 3]
    assert_trained(results)


@pytest.mark.parametrize("name", FAULT_TOLERANT)
def test_a_server_that_is_gone_for_good_goes_to_another_rank(name: str, caplog: pytest.LogCaptureFixture) -> None:
    results = train(PROBLEM, FAULT_TOLERANT[name], cluster=hardware(**crash(2, 12.1, None)))
    assert "learner 2, the server of shard 1, is gone for good: all learners start again" in caplog.text
    assert "without momentum" not in caplog.text
    assert sorted(results) == [0, 1, 3]
    assert heldout(results[0].consensus[-1]) < 0.9 * heldout(start_weights())
    assert [rank for rank, result in results.items() if result.strategy.server is not None] == [0, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sparing", [False, True])
def test_psp_waits_for_the_workers_that_are_left(sparing: bool) -> None:
    make = partial(Psp, servers=2, timeout=3.0, c=4, sparing=sparing)
    results = train(PROBLEM, make, cluster=hardware(**crash(2, 12.1, None)))
    assert sorted(results) == [0, 1, 3]
    assert heldout(results[0].consensus[-1]) < 0.9 * heldout(start_weights())


@pytest.mark.parametrize("lost", [1, 2])
def test_psp_with_reduced_messages_does_not_wait_for_the_turn_of_a_dead_worker(lost: int) -> None:
    """Rank 2 has a server, so the others start again as workers 0, 1 and 3."""
    make = partial(Psp, servers=2, timeout=60.0, c=1, sparing=True)
    results = train(PROBLEM, make, cluster=hardware(**crash(lost, 12.1, None)))
    assert sorted(results) == [rank for rank in range(4) if rank != lost]
    assert results[0].strategy.team.now() < 60.0


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("left", [(0, 1, 3), (0, 3), (3,)])
def test_servers_that_move_keep_their_momentum(kind: Literal["sgd", "adam"], left: tuple[int, ...]) -> None:
    """Three shards of one checkpoint go to as many, to two, and to one."""
    options = OptimizerOptions(kind=kind)
    saved: list[dict[str, Any]] = []
    before: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}

    def momentum(server: ParameterServer) -> Tensor:
        return server.optimizer.state_dict()["state"][0]["exp_avg" if kind == "adam" else "momentum_buffer"]

    def run_learner(team: Any) -> None:
        params = FlatParams(make_model())
        whole: Any = PsAsync(params, Optimizer(params, options), team, servers=3)
        if whole.server is not None:
            whole.server.g.copy_(torch.arange(len(whole.server.g)) + 1000.0 * whole.server.index)
            whole.server.update(0.1)
            before[whole.server.index] = momentum(whole.server)
        saved.append(whole.state_dict())
        team.sleep(1000.0)  # until all have saved
        team._membership.ranks = left  # of the team that starts again
        smaller: Any = PsAsync(params, Optimizer(params, options), team, servers=3)
        smaller.load_state_dict(whole.state_dict())
        smaller.load_moved(lambda: saved)
        if team.rank in left and smaller.server is not None:
            after[smaller.server.index] = momentum(smaller.server)

    run(run_learner)
    assert len(after) == len(left)
    count = len(FlatParams(make_model()))
    joined = [torch.cat([shards[index] for index in sorted(shards)])[:count] for shards in (before, after)]
    assert torch.equal(*joined) and joined[0].count_nonzero() > count // 2


@pytest.mark.parametrize("name", FAULT_TOLERANT)
def test_batches_whose_updates_died_with_all_copies_are_done_again(name: str) -> None:
    crashes = [{"learner": rank, "at": 12.0 + rank / 10, "restart_after": 3.0} for rank in range(4)]
    results = train(PROBLEM, FAULT_TOLERANT[name], cluster=hardware(faults={"crashes": crashes}))
    assert sorted(results) == [0, 1, 2, 3]
    assert heldout(results[0].consensus[-1]) < 0.9 * heldout(start_weights())
    for result in results.values():
        assert all(done.incarnation > 0 for done in result.records[0].completions)


@pytest.mark.parametrize("learner", [1, 2])
def test_ps_sync_starts_again_or_names_the_learner_that_is_gone(learner: int) -> None:
    make = partial(PsSync, servers=2, timeout=2.0)
    with pytest.raises(LearnerLost, match=f"learner {learner} died") as caught:
        train(PROBLEM, make, cluster=hardware(**crash(learner, 5.1, None)))
    assert caught.value.rank == learner
    again, whole = (train(PROBLEM, make, cluster=hardware(**faults)) for faults in (crash(learner, 5.1, 0.0), {}))
    assert torch.equal(again[0].replica, whole[0].replica)


@pytest.mark.parametrize("make", [PsSync, PsAsync, Psp], ids=lambda make: make.name)
def test_lost_messages_are_resent(make: Callable[..., Strategy]) -> None:
    """Every gradient is applied once. Where servers wait for all, the bits are those of a run without losses."""
    short = replace(PROBLEM, batches=32, epochs=1)
    lossy = hardware(faults={"lost_share": 0.1})
    intact, results = (train(short, partial(make, servers=2, timeout=3.0), cluster=on) for on in (hardware(), lossy))
    assert sum(result.strategy.team.comm_stats.faults["lost"] for result in results.values()) > 10
    assert all(torch.equal(result.replica, results[0].replica) for result in results.values())
    if make is PsAsync:
        staleness = [sum(result.strategy.staleness.total() for result in run.values()) for run in (intact, results)]
        assert staleness == [64, 64]
    else:
        assert torch.equal(results[0].replica, intact[0].replica)


def test_lost_parts_of_the_norm_are_resent() -> None:
    clipped = replace(PROBLEM, batches=32, epochs=1, options=OptimizerOptions(momentum=0.9, clip_norm=0.8))
    lossy = hardware(faults={"lost_share": 0.1})
    make = partial(PsSync, servers=3, timeout=3.0)
    intact, results = (train(clipped, make, cluster=on) for on in (hardware(), lossy))
    assert all(torch.equal(result.replica, intact[0].replica) for result in results.values())
    assert results[0].strategy.team.now() > intact[0].strategy.team.now() + 5.0, (
        "a part of the norm was awaited and asked for again"
    )


# mutants


def with_methods(name: str, **methods: Any) -> MakeStrategy:
    """Returns the strategy with some methods of its servers replaced."""

    def make(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        strategy = FAULT_TOLERANT[name](params, optimizer, team)
        server = strategy.server  # type: ignore[attr-defined]
        for method, does in methods.items():
            if server is not None:
                setattr(server, method, partial(does, server))
        return strategy

    return make


def keep(server: ParameterServer) -> None:
    """Keeps the checkpoint's weights instead of a newer copy."""


def test_without_recovery_a_server_falls_back_to_the_checkpoint() -> None:
    after = []

    def start(server: ParameterServer) -> None:
        if server.team.incarnation == 1:
            after.append(server.t)
        ParameterServer.start(server)

    for methods in ({}, {"recover": keep}):
        make = with_methods("ps_async", start=start, **methods)  # type: ignore[arg-type]
        train(PROBLEM, make, cluster=hardware(**crash(2, 12.0, 1.5)))
    assert after[0] > after[1] + 3, "it has the version of the last checkpoint"


def test_shards_of_a_small_model() -> None:
    shards = Shards(5, (0, 1, 2, 3))
    assert [len(shards.of(torch.zeros(5), shard)) for shard in range(4)] == [2, 2, 1, 0]
