"""Parameter servers: every server applies every batch once, although messages are lost and learners die.

The tests compare the numbers of the batches that each server applied, not counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.param_server.server import ParameterServer
from asr_am.distributed.param_server.weight_shards import (
    NO_PUSH,
    PushId,
    make_push,
    pack_answer,
    pack_metadata,
    read_answer,
)
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from tests.support.soak import Applied, check_applied, make_cluster, record_applied
from tests.support.toy_problem import Problem
from tests.support.toy_training import LearnerResult, MakeStrategy, hardware, train

PROBLEM = Problem(batches=58, epochs=1, rounds_per_segment=4, lr=0.02)
ASYNC, PSP = partial(PsAsync, staleness_aware=True, servers=2, timeout=2.0), partial(Psp, servers=2, timeout=2.0)
in_time = partial(train, PROBLEM, limit=2000.0)


@pytest.fixture
def applied() -> Iterator[Applied]:
    """(segment, batch) of the gradients that were applied, by shard and incarnation of the server."""
    with record_applied() as log:
        yield log


def assert_each_once(applied: Applied, servers: Sequence[tuple[int, int]] = ((0, 0), (1, 0))) -> None:
    every = [(number, b) for number, (_, batches) in enumerate(PROBLEM.segments) for b in batches]
    for server in servers:
        assert sorted(applied[server]) == every, f"shard {server[0]}"


def duplicates(results: dict[int, LearnerResult]) -> int:
    return sum(result.strategy.metrics["duplicate_gradients"] for result in results.values())


# acknowledgements


def with_unrequested_answers(make: MakeStrategy) -> MakeStrategy:
    """Loses every fifth push of learner 1 to server 0, which answers learner 1 although it has received none.

    The answer stands for a late answer to an earlier push that was resent.
    """

    def wrapped(params: FlatParams, optimizer: Optimizer, team: Any) -> Strategy:
        strategy: Any = make(params, optimizer, team)
        send, pushes = team.send, Counter[int]()

        def lossy(to: int, tag: str, *rest: Any) -> None:
            pushes[to] += tag == "push"
            if tag != "push" or to != 0 or pushes[to] % 5:
                send(to, tag, *rest)

        def answer() -> None:
            while True:
                team.sleep(0.25)
                with strategy.server.lock:
                    strategy.server.send(1)

        if team.rank == 1:
            team.send = lossy
        if team.rank == 0:
            team.spawn(answer, "unrequested answers")
        return strategy

    return wrapped


def test_a_push_is_resent_until_that_push_is_acknowledged(applied: Applied) -> None:
    in_time(with_unrequested_answers(ASYNC))
    assert_each_once(applied)


@pytest.mark.parametrize("seed", range(6))
def test_no_gradient_is_lost_where_messages_are_lost_and_late(seed: int, applied: Applied) -> None:
    faults = {"lost_share": 0.1, "late_share": 0.1, "late_seconds": 5.0}
    results = in_time(partial(ASYNC, timeout=3.0), cluster=hardware(faults=faults), seed=seed)
    assert_each_once(applied)
    assert duplicates(results) == 0, "a push that is resent is recognised by its identity"


class SatisfiedByVersion(PsAsync):
    """A mutant that takes any later version of a shard for the answer to its own push."""

    def _flush(self) -> None:
        self.worker.wait_for_next_step()


def test_a_worker_that_trusts_versions_is_caught(applied: Applied) -> None:
    in_time(with_unrequested_answers(partial(SatisfiedByVersion, servers=2, timeout=2.0)))
    with pytest.raises(AssertionError, match="shard 0"):
        assert_each_once(applied)


# a learner that dies between its push and the completion of the batch


def stalling_after_its_push(make: MakeStrategy, rank: int, stalled: list[int]) -> MakeStrategy:
    """Lets a learner sleep from its fifth push on, before it completes the batch. The batch goes to `stalled`."""

    def wrapped(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        strategy: Any = make(params, optimizer, team)
        push, count = strategy._push, 0

        def stall(step_result: Any, *rest: Any) -> None:
            nonlocal count
            push(step_result, *rest)
            count += 1
            if count == 5:
                stalled.append(step_result.lease.batch)
                team.sleep(1000.0)

        if team.rank == rank and team.incarnation == 0:
            strategy._push = stall
        return strategy

    return wrapped


def crash(*learners: int) -> dict[str, Any]:
    return {"crashes": [{"learner": learner, "at": 100.0, "restart_after": 0.0} for learner in learners]}


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("make", [ASYNC, PSP], ids=["ps_async", "psp"])
def test_a_server_that_lives_on_applies_a_batch_once(make: MakeStrategy, rank: int, applied: Applied) -> None:
    """Learner 1 is only a worker. Learner 2 dies together with its server, of shard 1."""
    stalled: list[int] = []
    results = in_time(stalling_after_its_push(make, rank, stalled), cluster=hardware(faults=crash(rank)))
    (batch,) = stalled
    alive = [(0, 0), (1, 0)] if rank == 1 else [(0, 0)]
    for server in alive:
        assert batch in {b for _, b in applied[server]} and max(Counter(applied[server]).values()) == 1
    if make is ASYNC:
        assert_each_once(applied, alive)
    assert duplicates(results) == len(alive)
    assert any(released == batch for record in results[0].records for released, _ in record.released)


def test_a_server_that_applies_a_batch_twice_is_caught(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterServer, "take_new", lambda server, pushes: pushes)
    stalled: list[int] = []
    in_time(stalling_after_its_push(ASYNC, 1, stalled), cluster=hardware(faults=crash(1)))
    assert all([b for _, b in applied[server]].count(stalled[0]) == 2 for server in ((0, 0), (1, 0)))


# the bound


def losing_pushes(make: MakeStrategy, unreachable: dict[int, int]) -> MakeStrategy:
    """Loses all pushes from each learner's third one on to one server. `unreachable`: server's rank by learner."""

    def wrapped(params: FlatParams, optimizer: Optimizer, team: Any) -> Strategy:
        send, pushes = team.send, Counter[int]()

        def lossy(to: int, tag: str, *rest: Any) -> None:
            pushes[to] += tag == "push"
            if tag != "push" or to != unreachable[team.rank] or pushes[to] < 3:
                send(to, tag, *rest)

        if team.rank in unreachable and team.incarnation == 0:
            team.send = lossy
        return make(params, optimizer, team)

    return wrapped


def test_two_learners_that_rejoin_do_not_wait_for_each_other(applied: Applied) -> None:
    """Server 0 has the third push of learner 1, server 2 that of learner 3. Both learners die, and rejoin."""
    make = losing_pushes(partial(ASYNC, bound=0), {1: 2, 3: 0})
    results = in_time(make, cluster=hardware(faults=crash(1, 3)))
    assert sorted(results) == [0, 1, 2, 3]
    check_applied(PROBLEM, applied, results, at_least_once=True)


@pytest.mark.parametrize("seed", [9, 13, 19, 21, 23])
def test_a_bound_of_0_never_hangs(seed: int, applied: Applied) -> None:
    """Once, learner 3 pulled for ever with seed 21: its late push arrived when the team was drained, and was kept."""
    cluster = make_cluster("ps_async", seed)
    results = train(PROBLEM, partial(ASYNC, timeout=3.0, bound=0), cluster=cluster, seed=seed)
    check_applied(PROBLEM, applied, results, at_least_once=True)
    assert all(torch.equal(result.replica, results[0].replica) for result in results.values())


@pytest.mark.parametrize("bound", [None, 0])
def test_a_dedicated_server_that_rejoins_is_no_worker(bound: int | None) -> None:
    make = partial(PsAsync, staleness_aware=True, servers=2, timeout=2.0, apart=True, bound=bound)
    cluster = hardware(hosts=3, faults={"crashes": [{"learner": 4, "at": 5.1, "restart_after": 1.0}]})
    assert sorted(in_time(make, cluster=cluster, servers=2)) == [0, 1, 2, 3, 4, 5]


# the format


def test_numbers_in_messages_are_exact() -> None:
    push_id = PushId(2**24 - 1, 3, 2**24 - 2)
    push = make_push(3, 7, torch.zeros(2), pack_metadata(123456789.25, 0.1, 2**40 + 1, 2**48 - 1, push_id))
    assert (push.frames, push.lr, push.batch, push.digest, push.id) == (
        123456789.25, 0.1, 2**40 + 1, 2**48 - 1, push_id,
    )  # fmt: skip
    assert read_answer(pack_answer(push_id, 5)) == (push_id, 5) and read_answer(pack_answer(NO_PUSH, 0))[0] == NO_PUSH
    assert NO_PUSH < PushId(0, 0, 1) < PushId(0, 1, 1) < PushId(1, 0, 1)
