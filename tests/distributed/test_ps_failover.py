"""Parameter servers when learners die, and take their servers along; and when the network loses letters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from tests.support.toy_problem import Problem, make_model
from tests.support.toy_training import Life, MakeStrategy, hardware, train

PROBLEM = Problem(batches=64, epochs=2, rounds_per_segment=8, lr=0.02)
FORGIVING: dict[str, MakeStrategy] = {
    "psp": partial(Psp, servers=2, c=2, timeout=2.0), "ps_async": partial(PsAsync, servers=2, timeout=2.0),
}  # fmt: skip


def crash(learner: int, at: float, restart_after: float | None) -> dict[str, Any]:
    return {"faults": {"crashes": [{"learner": learner, "at": at, "restart_after": restart_after}]}}


def assert_trained(lives: dict[int, Life]) -> None:
    first = next(iter(lives.values()))
    assert first.totals[-1].mean_loss < 0.97 * first.totals[0].mean_loss
    assert all(torch.equal(life.replica, first.replica) for life in lives.values()), "all have the servers' weights"


@pytest.mark.parametrize("name", FORGIVING)
def test_the_others_go_on_without_a_worker(name: str) -> None:
    lives = train(PROBLEM, FORGIVING[name], cluster=hardware(**crash(1, 5.1, None)))
    assert sorted(lives) == [0, 2, 3]
    assert_trained(lives)


@dataclass(frozen=True)
class Recovery:
    """Of server 1: version and weights [n] of its block as of the checkpoint, and with a worker's copy."""

    old_t: int
    old_w: Tensor
    t: int
    w: Tensor


def watching(make: MakeStrategy, recoveries: list[Recovery]) -> MakeStrategy:
    """The strategy, with what becomes of the block of rank 2 when that is restarted."""

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


@pytest.mark.parametrize("name", FORGIVING)
@pytest.mark.parametrize("learner", [1, 2])
def test_a_learner_comes_back_with_its_server(name: str, learner: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 2 has block 1; a worker's copy of it is newer than any checkpoint."""
    recoveries: list[Recovery] = []
    with caplog.at_level(logging.INFO):
        lives = train(PROBLEM, watching(FORGIVING[name], recoveries), cluster=hardware(**crash(learner, 12.0, 1.5)))
    assert sorted(lives) == [0, 1, 2, 3]
    assert_trained(lives)
    assert f"learner {learner} is back, with the servers' weights" in caplog.text
    assert len(lives[learner].did) > 2, "it works again"
    if learner == 2:
        (recovery,) = recoveries
        assert recovery.t > recovery.old_t and not torch.equal(recovery.w, recovery.old_w)
        assert "copy and no momentum" in caplog.text


@pytest.mark.parametrize("name", FORGIVING)
def test_a_restarted_server_does_not_take_a_copy_that_was_never_pulled(name: str) -> None:
    """Worker 1 is back before server 1, from the checkpoint, while the others have a newer copy of the block."""
    recoveries: list[Recovery] = []
    both = [{"learner": 1, "at": 12.0, "restart_after": 0.5}, {"learner": 2, "at": 12.0, "restart_after": 1.5}]
    train(PROBLEM, watching(FORGIVING[name], recoveries), cluster=hardware(faults={"crashes": both}))
    (recovery,) = recoveries
    assert recovery.t > recovery.old_t and not torch.equal(recovery.w, recovery.old_w)


def test_at_rest_a_block_whose_server_is_dead_stays_of_its_version() -> None:
    def live(team: Team) -> None:
        params = FlatParams(make_model())
        strategy = Psp(params, Optimizer(params, OptimizerOptions()), team, servers=3)
        strategy.worker.versions[:] = [5, 3, 4]
        strategy._pull_final([5, -1, 4])
        assert strategy.worker.versions == [5, 3, 5], "a block that nobody could pull is no newer than it was"

    run(live)


@pytest.mark.parametrize("name", FORGIVING)
def test_a_restarted_server_asks_again_whom_its_question_does_not_reach(name: str) -> None:
    recoveries: list[Recovery] = []

    def deaf(params: FlatParams, optimizer: Optimizer, team: Any) -> Strategy:
        strategy = watching(FORGIVING[name], recoveries)(params, optimizer, team)
        post, lost = team.send, set()

        def lose(to: int, tag: str, *rest: Any) -> None:
            if tag != "lost" or to in lost:
                post(to, tag, *rest)
            lost.add(to)

        if team.incarnation == 1:
            team.send = lose
        return strategy

    assert_trained(train(PROBLEM, deaf, cluster=hardware(**crash(2, 12.0, 1.5))))
    (recovery,) = recoveries
    assert recovery.t > recovery.old_t and not torch.equal(recovery.w, recovery.old_w)


@pytest.mark.parametrize("name", FORGIVING)
def test_a_server_that_dies_at_rest_may_come_back_older(name: str) -> None:
    """With its last update, which all have agreed to pull, and nobody has."""

    def dying(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        strategy: Any = FORGIVING[name](params, optimizer, team)
        agree = strategy._gather_versions

        def late() -> list[int]:
            first = strategy._drain_count == 1 and team.incarnation == 0
            if first and team.rank == 2:
                strategy.server.t += 1
            versions: list[int] = agree()
            if first:
                team.sleep(100.0)
            return versions

        strategy._gather_versions = late
        return strategy

    lives = train(PROBLEM, dying, cluster=hardware(**crash(2, 100.0, 1.0)))
    assert sorted(lives) == [0, 1, 2, 3]
    assert_trained(lives)


@pytest.mark.parametrize("name", FORGIVING)
def test_a_block_that_nobody_serves_any_more_ends_the_run(name: str) -> None:
    with pytest.raises(LearnerLost, match="learner 2 died, the server of block 1; start the same command again"):
        train(PROBLEM, FORGIVING[name], cluster=hardware(**crash(2, 5.1, None)))


@pytest.mark.parametrize("learner", [1, 2])
@pytest.mark.parametrize("restart_after", [None, 0.0])
def test_ps_sync_ends_and_names_the_lost_learner(learner: int, restart_after: float | None) -> None:
    with pytest.raises(LearnerLost, match=f"learner {learner} died") as caught:
        train(PROBLEM, partial(PsSync, servers=2, timeout=2.0), cluster=hardware(**crash(learner, 5.1, restart_after)))
    assert caught.value.rank == learner


@pytest.mark.parametrize("make", [PsSync, PsAsync, Psp], ids=lambda make: make.name)
def test_what_the_network_loses_is_sent_again(make: Callable[..., Strategy]) -> None:
    """Every gradient is applied once, as without losses: where servers wait for all, to the same bits."""
    short = replace(PROBLEM, batches=32, epochs=1)
    lossy = hardware(faults={"lost_share": 0.1})
    whole, lives = (train(short, partial(make, servers=2, timeout=3.0), cluster=on) for on in (hardware(), lossy))
    assert sum(life.strategy.team.comm_stats.faults["lost"] for life in lives.values()) > 10
    assert all(torch.equal(life.replica, lives[0].replica) for life in lives.values())
    if make is PsAsync:
        staleness = [sum(life.strategy.staleness.total() for life in run.values()) for run in (whole, lives)]
        assert staleness == [64, 64]
    else:
        assert torch.equal(lives[0].replica, whole[0].replica)


def test_parts_of_the_norm_that_the_network_loses_are_told_again() -> None:
    clipped = replace(PROBLEM, batches=32, epochs=1, options=OptimizerOptions(momentum=0.9, clip_norm=0.8))
    lossy = hardware(faults={"lost_share": 0.1})
    make = partial(PsSync, servers=3, timeout=3.0)
    whole, lives = (train(clipped, make, cluster=on) for on in (hardware(), lossy))
    assert all(torch.equal(life.replica, whole[0].replica) for life in lives.values())
    assert lives[0].strategy.team.now() > whole[0].strategy.team.now() + 5.0, (
        "something was waited for, and asked again"
    )


# mistakes


def mistaken(name: str, **methods: Any) -> MakeStrategy:
    """The strategy with servers that do some things otherwise."""

    def make(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        strategy = FORGIVING[name](params, optimizer, team)
        server = strategy.server  # type: ignore[attr-defined]
        for method, does in methods.items():
            if server is not None:
                setattr(server, method, partial(does, server))
        return strategy

    return make


def keep(server: ParameterServer) -> None:
    """Does not look for a copy that is newer than the checkpoint's."""


def test_a_server_without_the_workers_copies_would_go_back() -> None:
    after = []

    def start(server: ParameterServer) -> None:
        if server.team.incarnation == 1:
            after.append(server.t)
        ParameterServer.start(server)

    for methods in ({}, {"recover": keep}):
        make = mistaken("ps_async", start=start, **methods)  # type: ignore[arg-type]
        train(PROBLEM, make, cluster=hardware(**crash(2, 12.0, 1.5)))
    assert after[0] > after[1] + 3, "it would be as of the last checkpoint"


def test_blocks_of_a_small_model() -> None:
    blocks = Shards(5, (0, 1, 2, 3))
    assert [len(blocks.of(torch.zeros(5), block)) for block in range(4)] == [2, 2, 1, 0]
