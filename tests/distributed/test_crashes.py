"""Death of a learner: ADPSGD continues and takes a replacement in, synchronous algorithms end and name it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import LearnerLost, Team
from tests.support.toy_problem import Problem
from tests.support.toy_training import KeptCheckpoints, LearnerResult, MakeStrategy, hardware, train

PROBLEM = Problem(batches=63, epochs=2)


@dataclass
class Sent:
    """A sent message, with the sender's buffer `x` at that time."""

    source: int
    incarnation: int
    to: int
    tag: str
    weights: Tensor | None
    x: Tensor


@dataclass
class Rejoined:
    """A replacement just after `rejoin`, with True in `momentum` if its optimizer has any."""

    rank: int
    x: Tensor
    w: Tensor
    momentum: bool


def watch(make: MakeStrategy, seen: list[Sent | Rejoined]) -> MakeStrategy:
    """Wraps a strategy so that its messages and rejoins are appended to `seen`, in order."""

    def build(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        send = team.send

        def watched_send(to: int, tag: str, clock: int, *tensors: Tensor) -> None:
            weights = tensors[0].clone() if tensors else None
            assert isinstance(strategy, Adpsgd)
            seen.append(Sent(team.rank, team.incarnation, to, tag, weights, strategy._x.clone()))
            send(to, tag, clock, *tensors)

        team.send = watched_send  # type: ignore[method-assign]
        strategy = make(params, optimizer, team)
        assert isinstance(strategy, Adpsgd)
        rejoin = strategy.rejoin

        def watched_rejoin() -> None:
            rejoin()
            momentum = bool(optimizer.state_dict()["state"])
            seen.append(Rejoined(team.rank, strategy._x.clone(), params.w.clone(), momentum))

        strategy.rejoin = watched_rejoin  # type: ignore[method-assign]
        return strategy

    return build


def crashing(*crashes: tuple[int, float, float | None], **changes: object) -> dict[str, object]:
    """Returns changes of `hardware` with these crashes: (learner, at, restart_after)."""
    faults = {"crashes": [{"learner": rank, "at": at, "restart_after": after} for rank, at, after in crashes]}
    return {**changes, "faults": faults}


def check_rejoin(make: MakeStrategy, *learners: int) -> dict[int, LearnerResult]:
    """All batches are done once. A replacement sends no weights before it has copied current ones from a neighbour."""
    seen: list[Sent | Rejoined] = []
    crashes = crashing(*((learner, 8.1 + 0.05 * k, 1.5) for k, learner in enumerate(learners)), host_latency=0.1)
    results = train(PROBLEM, watch(make, seen), cluster=hardware(**crashes))
    assert sorted(results) == [0, 1, 2, 3]
    assert sorted(event.rank for event in seen if isinstance(event, Rejoined)) == sorted(learners)
    for position, rejoined in enumerate(seen):
        if isinstance(rejoined, Rejoined):
            before = [event for event in seen[:position] if isinstance(event, Sent)]
            sent = [event for event in before if (event.source, event.incarnation) == (rejoined.rank, 1)]
            shared = [event for event in sent if event.weights is None or len(event.weights)]
            assert {event.tag for event in shared} == {"join"}
            *_, welcome = (event for event in before if event.tag == "welcome" and event.to == rejoined.rank)
            assert welcome.weights is not None and torch.equal(welcome.weights, welcome.x)
            assert torch.equal(rejoined.x, welcome.x) and torch.equal(rejoined.w, welcome.x) and not rejoined.momentum
    return results


@pytest.mark.parametrize("learner", range(4))
def test_adpsgd_continues_and_takes_a_replacement_in(learner: int) -> None:
    results = check_rejoin(Adpsgd, learner)
    segment_of_the_crash = next(record for record in results[(learner + 1) % 4].records if record.released)
    assert [owner for _, owner in segment_of_the_crash.released] == [learner], "its batch was handed out again"
    again = {done.batch: done.owner for done in segment_of_the_crash.completions}
    assert again[segment_of_the_crash.released[0][0]] != learner
    assert len(results[learner].computed) > 10, "it works again"


def test_replacements_do_not_copy_from_each_other() -> None:
    for pair in ((0, 1), (2, 1), (0, 2)):
        check_rejoin(Adpsgd, *pair)


def test_a_ring_made_odd_by_a_death_continues() -> None:
    for dead in (0, 1):
        results = train(PROBLEM, Adpsgd, cluster=hardware(**crashing((dead, 8.1, None))))
        assert sorted(results) == [rank for rank in range(4) if rank != dead]
        for result in results.values():
            assert result.totals[-1].mean_loss < 0.7 * result.totals[0].mean_loss
            assert result.replica.isfinite().all()
    alone = train(PROBLEM, Adpsgd, cluster=hardware(**crashing((0, 3.0, None), (1, 3.1, None), (3, 8.1, None))))
    assert list(alone) == [2] and alone[2].totals[-1].mean_loss < 0.8 * alone[2].totals[0].mean_loss


def test_when_all_learners_die_all_batches_since_the_checkpoint_are_done_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Sent | Rejoined] = []
    checkpoints = KeptCheckpoints()
    saved: dict[int, Tensor] = {}

    def build(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        if team.rank not in saved and checkpoints.updates:
            saved[team.rank] = checkpoints.load_learner(team.rank)["strategy"]["x"]
        return watch(Adpsgd, seen)(params, optimizer, team)

    cluster = hardware(**crashing((0, 20.0, 1.0), (1, 20.5, 5.0)))
    with caplog.at_level(logging.WARNING):
        results = train(replace(PROBLEM, learners=2), build, cluster=cluster, checkpoints=checkpoints)
    assert len(results) == 2 and "all learners start again from the last checkpoint" in caplog.text
    assert not any(isinstance(event, Rejoined) for event in seen), "both begin with the weights of the checkpoint"
    first_sent = next(event for event in seen if isinstance(event, Sent) and event.incarnation > 0)
    assert torch.equal(first_sent.x, saved[first_sent.source]) or first_sent.tag == "weights"
    for result in results.values():
        for record in result.records:
            assert {done.incarnation for done in record.completions} == {result.strategy.team.incarnation}


@pytest.mark.parametrize("restart_after", [0.0, 0.3, 3.0])
def test_a_learner_without_weights_does_not_go_on_alone(restart_after: float) -> None:
    """Learner 1 rejoins, and the others die before it has their weights."""
    crashes = crashing((1, 8.1, 1.0), *((rank, 9.13, restart_after) for rank in (0, 2, 3)), host_latency=0.1)
    results = train(PROBLEM, Adpsgd, cluster=hardware(**crashes))
    assert sorted(results) == [0, 1, 2, 3]
    records = next(iter(results.values())).records
    assert all(not done.applied or done.incarnation > 0 for done in records[0].completions)


@pytest.mark.parametrize("make", [Sync, partial(Sync, form="weights"), Hybrid, Dpsgd, partial(Dpsgd, mixing="ring")])
def test_a_synchronous_run_ends_and_names_the_lost_learner(make: Callable[..., Strategy]) -> None:
    for learner in range(4):
        with pytest.raises(LearnerLost, match=f"learner {learner} .*start the same command again") as caught:
            train(PROBLEM, make, cluster=hardware(**crashing((learner, 8.1, None))))
        assert caught.value.rank == learner


# mutants


class Eager(Adpsgd):
    """Gossips from the start, with weights of a checkpoint."""

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        if team.incarnation > 0:
            super()._begin_gossip()

    def _begin_gossip(self) -> None:
        if self.team.incarnation == 0:
            super()._begin_gossip()


class Stubborn(Adpsgd):
    """Keeps the weights of the last checkpoint."""

    def rejoin(self) -> None:
        self._request_weights()
        self._begin_gossip()


class Inheriting(Adpsgd):
    """Keeps the momentum of the last checkpoint."""

    def rejoin(self) -> None:
        before = self.optimizer.state_dict()
        super().rejoin()
        self.optimizer.load_state_dict(before)


@pytest.mark.parametrize("mutant", [Eager, Stubborn, Inheriting])
def test_mutants_are_caught(mutant: type[Strategy]) -> None:
    with pytest.raises(AssertionError):
        check_rejoin(mutant, 2, 1)  # 1 asks 2, which has just asked 3
