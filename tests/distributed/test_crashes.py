"""A learner that dies: ADPSGD goes on and takes it back; algorithms in step end, and name it."""

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
from tests.support.toy_training import Checkpoints, Life, MakeStrategy, hardware, train

PROBLEM = Problem(batches=63, epochs=2)


@dataclass
class Sent:
    """A letter. x: of the sender when it sent it."""

    source: int
    incarnation: int
    to: int
    tag: str
    weights: Tensor | None
    x: Tensor


@dataclass
class Joined:
    """A replacement just after `join`. momentum: whether it has any."""

    rank: int
    x: Tensor
    w: Tensor
    momentum: bool


def watch(make: MakeStrategy, seen: list[Sent | Joined]) -> MakeStrategy:
    """The same strategies, and what they send, and how they join, in order."""

    def build(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        post = team.send

        def watched_post(to: int, tag: str, clock: int, *tensors: Tensor) -> None:
            weights = tensors[0].clone() if tensors else None
            assert isinstance(strategy, Adpsgd)
            seen.append(Sent(team.rank, team.incarnation, to, tag, weights, strategy._x.clone()))
            post(to, tag, clock, *tensors)

        team.send = watched_post  # type: ignore[method-assign]
        strategy = make(params, optimizer, team)
        assert isinstance(strategy, Adpsgd)
        join = strategy.rejoin

        def watched_join() -> None:
            join()
            momentum = bool(optimizer.state_dict()["state"])
            seen.append(Joined(team.rank, strategy._x.clone(), params.w.clone(), momentum))

        strategy.rejoin = watched_join  # type: ignore[method-assign]
        return strategy

    return build


def crashing(*crashes: tuple[int, float, float | None], **changes: object) -> dict[str, object]:
    """Hardware on which learners (who, when, back after) crash."""
    faults = {"crashes": [{"learner": who, "at": at, "restart_after": after} for who, at, after in crashes]}
    return {**changes, "faults": faults}


def check_rejoin(make: MakeStrategy, *learners: int) -> dict[int, Life]:
    """All batches are done once; replacements give nobody weights before they have a neighbour's, of that time."""
    seen: list[Sent | Joined] = []
    crashes = crashing(*((learner, 8.1, 1.5) for learner in learners), host_latency=0.1)
    lives = train(PROBLEM, watch(make, seen), cluster=hardware(**crashes))
    assert sorted(lives) == [0, 1, 2, 3]
    assert sorted(event.rank for event in seen if isinstance(event, Joined)) == sorted(learners)
    for place, joined in enumerate(seen):
        if isinstance(joined, Joined):
            before = [event for event in seen[:place] if isinstance(event, Sent)]
            own = [event for event in before if (event.source, event.incarnation) == (joined.rank, 1)]
            assert {event.tag for event in own} == {"join"}
            *_, welcome = (event for event in before if event.tag == "welcome" and event.to == joined.rank)
            assert welcome.weights is not None and torch.equal(welcome.weights, welcome.x)
            assert torch.equal(joined.x, welcome.x) and torch.equal(joined.w, welcome.x) and not joined.momentum
    return lives


@pytest.mark.parametrize("learner", range(4))
def test_adpsgd_goes_on_and_takes_a_replacement_in(learner: int) -> None:
    lives = check_rejoin(Adpsgd, learner)
    segment_of_the_crash = next(record for record in lives[(learner + 1) % 4].records if record.released)
    assert [owner for _, owner in segment_of_the_crash.released] == [learner], "its batch was handed out again"
    again = {done.batch: done.owner for done in segment_of_the_crash.completions}
    assert again[segment_of_the_crash.released[0][0]] != learner
    assert len(lives[learner].did) > 10, "it works again"


def test_replacements_do_not_take_in_each_other() -> None:
    for pair in ((0, 1), (1, 2), (0, 2)):
        check_rejoin(Adpsgd, *pair)


def test_a_ring_made_odd_by_a_death_goes_on() -> None:
    for dead in (0, 1):
        lives = train(PROBLEM, Adpsgd, cluster=hardware(**crashing((dead, 8.1, None))))
        assert sorted(lives) == [rank for rank in range(4) if rank != dead]
        for life in lives.values():
            assert life.totals[-1].mean_loss < 0.7 * life.totals[0].mean_loss
            assert life.replica.isfinite().all()
    alone = train(PROBLEM, Adpsgd, cluster=hardware(**crashing((0, 3.0, None), (1, 3.1, None), (3, 8.1, None))))
    assert list(alone) == [2] and alone[2].totals[-1].mean_loss < 0.8 * alone[2].totals[0].mean_loss


def test_when_nobody_is_left_to_ask_the_last_checkpoint_counts(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Sent | Joined] = []
    checkpoints = Checkpoints()
    saved: list[Tensor] = []

    def look(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        if team.incarnation == 1 and (state := checkpoints.load(team.rank)):
            saved.append(state["x"])
        return watch(Adpsgd, seen)(params, optimizer, team)

    cluster = hardware(**crashing((0, 20.0, 1.0), (1, 20.5, 1.0)))
    with caplog.at_level(logging.WARNING):
        lives = train(replace(PROBLEM, learners=2), look, cluster=cluster, checkpoints=checkpoints)
    assert len(lives) == 2 and "learner 0 is back; nobody answered" in caplog.text
    (first, *_) = (event for event in seen if isinstance(event, Joined))
    assert torch.equal(first.x, saved[0]) and first.momentum


@pytest.mark.parametrize("make", [Sync, partial(Sync, form="weights"), Hybrid, Dpsgd, partial(Dpsgd, mixing="ring")])
def test_in_step_the_run_ends_and_names_the_lost_learner(make: Callable[..., Strategy]) -> None:
    for learner in range(4):
        with pytest.raises(LearnerLost, match=f"learner {learner} .*start the same command again") as caught:
            train(PROBLEM, make, cluster=hardware(**crashing((learner, 8.1, None))))
        assert caught.value.rank == learner


# mistakes


class Eager(Adpsgd):
    """Gossips from its first moment, with weights that are not worth it."""

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
        super().join()
        self.optimizer.load_state_dict(before)


@pytest.mark.parametrize("mistake", [Eager, Stubborn, Inheriting])
def test_the_limit_catches(mistake: type[Strategy]) -> None:
    with pytest.raises(AssertionError):
        check_rejoin(mistake, 1, 2)
