"""What the survivors of a synchronous team save when it loses a learner, so that little or nothing is done again.

A strategy with equal replicas changes weights, optimizer and residuals only after its collectives. A loss that
interrupts a step so leaves a survivor with its state after the step before. It saves that, with what it has done since
the checkpoint. The leader of the next team makes a checkpoint of these files, as if the segment had ended there.

With other strategies the state of a lost learner follows from those of the others only at the end of a block of steps,
which may be one step. Each then copies its state, unless the last copy is only some steps older, and as a survivor
saves the copy. The steps since are done again, and counted as `steps repeated`.

A survivor may have completed one step or block more than another. The latest that somebody has saved the model of
counts, as the gradients of all learners are in it. A learner that is dead, or whose state is of another step, continues
with what another one has. Its residual is lost, and counted as `residuals lost`. The mean of the others replaces a
momentum that is lost, and weights where learners never have the same. That is near the mean of all while most of the
learners have theirs (`SHARES`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from asr_am.distributed.leases import (
    Completion,
    Leases,
    LossSums,
    RoundRobinLeases,
    Segment,
    SegmentRecord,
    completions_of,
)
from asr_am.distributed.strategy import REPLICA, Strategy, mean_state
from asr_am.distributed.team import CommStats, Team
from asr_am.errors import InputError
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.comm_metrics import comm_stats_to_dict, load_comm_stats

Part = dict[str, Any]  # of a checkpoint: what one learner saves
Saved = dict[str, Any]  # what one survivor saves
COPIES = 2  # learners of each host that save the replica
STEPS_BETWEEN_COPIES = 5  # so that they cost little: a copy moves about as much memory as an update
SHARES = {"optimizer": 0.5, "weights": 0.75}
"""Share of the learners that must have saved what they have of their own, else the last checkpoint counts."""
log = logging.getLogger(__name__)


class Survivor:
    """This learner, as it may survive the loss of another one.

    Args:
        strategy: its strategy.
        team: its end of the team.
        checkpoints: where it saves its state.
        part: returns its part of a checkpoint, with its replica.

    Attributes:
        saves: when another learner is lost, it can save its state after the last completed step or block.
    """

    def __init__(self, strategy: Strategy, team: Team, checkpoints: Checkpoints, part: Callable[[], Part]) -> None:
        self._strategy, self._team, self._checkpoints, self._part = strategy, team, checkpoints, part
        equal = strategy.equal_replicas or strategy.continues_at_blocks
        known = strategy.synchronous and equal and team.waits_on_host and team.size > 1
        self.saves = known and checkpoints.on_disk
        self._after_block: Saved | None = None  # a copy of the state after a block of this segment
        self._memory: Saved | None = None  # of the last copy, for the next one

    def begin(self, leases: Leases, updates: int) -> None:
        """Begins a segment.

        Args:
            leases: its leases.
            updates: those before.
        """
        if not self.saves:
            return
        assert isinstance(leases, RoundRobinLeases)
        self._leases, self._updates, self._begin = leases, updates, self._team.now()
        self._after_block = None
        if self._strategy.continues_at_blocks:
            self._strategy.at_block_end = self._copy

    def _copy(self) -> None:
        """Copies the state, in which a block has ended, unless the last copy is only some steps older."""
        last = self._after_block["steps"] if self._after_block else 0
        if self._leases.steps >= last + STEPS_BETWEEN_COPIES:
            self._after_block = None  # a signal may interrupt the copying
            self._after_block = self._memory = copied(self._to_save(), self._memory)

    def _to_save(self) -> Saved:
        """Returns the present state, without the replica if enough others of this host save it."""
        part, leases, team = self._part(), self._leases, self._team
        state, hosts = part["strategy"], team.hosts
        others = sum(hosts[rank] == hosts[team.rank] for rank in range(team.rank))
        if self._strategy.equal_replicas and others >= COPIES:
            state = {name: value for name, value in state.items() if name not in REPLICA}
        return {
            "part": {**part, "strategy": state}, "learners": team.size, "steps": leases.steps,
            "seconds": team.now() - self._begin, "done": leases.own_rows(),
            "totals": list(astuple(leases.own_totals())), "repeated": 0,
        }  # fmt: skip

    def save(self) -> None:
        """Saves the state after the last completed step or block: another learner was lost in the next one."""
        if not self.saves:
            return
        try:
            saved = self._after_block if self._strategy.continues_at_blocks else self._to_save()
            if saved is None or not saved["steps"] or not math.isfinite(saved["totals"][0]):
                return
            saved["repeated"] = self._leases.steps - saved["steps"]
            self._checkpoints.save_survivor(self._updates, self._team.rank, saved)
        except (InputError, OSError) as problem:
            log.warning("learner %d cannot save its steps since the last checkpoint: %s", self._team.rank, problem)


def copied(state: Any, memory: Any) -> Any:
    """Returns a copy of a nested state. Its tensors take the place of those of `memory`, an earlier copy, if they fit.

    Fresh memory would take ten times as long to copy to.
    """
    if isinstance(state, Tensor):
        if isinstance(memory, Tensor) and (memory.shape, memory.dtype, memory.device) == (
            state.shape, state.dtype, state.device
        ):  # fmt: skip
            return memory.copy_(state)
        return state.clone()
    if isinstance(state, dict):
        known = memory if isinstance(memory, dict) else {}
        return {name: copied(value, known.get(name)) for name, value in state.items()}
    if isinstance(state, list | tuple):
        parts = memory if isinstance(memory, list | tuple) else []
        return type(state)(copied(value, part) for value, part in zip_longest(state, parts[: len(state)]))
    return state


class Survivors(NamedTuple):
    """The survivors that have completed the same number of steps of a segment.

    Attributes:
        learners: number of learners of the team.
        steps: completed steps.
        saved: by rank, what they have saved.
        state: the strategy's, of one of them, with weights and optimizer.
        repeated: completed steps after these, which are done again.
    """

    learners: int
    steps: int
    saved: dict[int, Saved]
    state: dict[str, Any]
    repeated: int

    @classmethod
    def of(cls, found: Mapping[int, Saved], residuals: Sequence[str] = ()) -> Survivors | None:
        """Returns those that are furthest.

        Args:
            found: what survivors of one launch have saved, by rank.
            residuals: of their strategy.

        Returns:
            None if too few have saved their state after the same step, or none of them the replica.
        """
        share = max((SHARES.get(name, 0.0) for name in residuals), default=0.0)
        furthest = max((saved["steps"] + saved["repeated"] for saved in found.values()), default=0)
        replicas = [saved for saved in found.values() if saved["part"]["strategy"].keys() >= REPLICA]
        for last in sorted(replicas, key=lambda saved: -saved["steps"]):
            alike = {rank: saved for rank, saved in found.items() if saved["steps"] == last["steps"]}
            if len(alike) >= share * last["learners"]:
                return cls(last["learners"], last["steps"], alike, last["part"]["strategy"], furthest - last["steps"])
        return None

    @property
    def lost(self) -> set[int]:
        """Ranks of the learners that have not saved their state after these steps."""
        return set(range(self.learners)) - self.saved.keys()

    @property
    def seconds(self) -> float:
        """Duration of the segment so far."""
        return max(float(saved["seconds"]) for saved in self.saved.values())

    def record(self, segment: Segment, examples: Sequence[int]) -> SegmentRecord:
        """Returns the record of the steps. What the other learners did follows from the steps.

        Args:
            segment: the batches of these steps.
            examples: number of examples of each of them.
        """
        rows = {rank: saved["done"] for rank, saved in self.saved.items()}
        done = {completion.batch: completion for completion in completions_of(rows)}
        for batch, count in zip(range(segment.begin, segment.end), examples, strict=True):
            owner = batch % segment.learners
            done.setdefault(batch, Completion(batch, owner, 0, count, True, segment.digest(batch)))
        return SegmentRecord(segment, tuple(done[batch] for batch in sorted(done)))

    def totals(self, batches: int) -> LossSums:
        """Returns the sums over all batches of the steps, with the means of those of the survivors."""
        columns = zip(*(saved["totals"] for saved in self.saved.values()), strict=True)
        loss, correct, frames, known = (float(sum(column)) for column in columns)
        scale = batches / max(known, 1.0)
        return LossSums(loss * scale, correct * scale, frames * scale, batches)

    def statistics(self) -> dict[str, Tensor]:
        """Returns the means of their models' running statistics."""
        return dict(mean_state([dict(saved["part"]["statistics"]) for saved in self.saved.values()]))

    def parts(self, strategy: Strategy, former: Mapping[int, Part]) -> Iterator[tuple[int, Part]]:
        """Yields rank and part of each learner for a checkpoint after the steps.

        Args:
            strategy: makes the states of those that are lost.
            former: by rank, the parts in the checkpoint before of those that are lost. Empty if there was none.
        """
        statistics = self.statistics()
        for rank in range(self.learners):
            part = self.saved[rank]["part"] if rank in self.saved else self._part_of_lost(rank, strategy, former)
            state = part["strategy"]
            if self.repeated:
                before = state["counts"].get("steps repeated", 0)
                counts = {**state["counts"], "steps repeated": before + self.repeated}
                state = {**state, "counts": counts}
            if strategy.equal_replicas:
                state = {name: value for name, value in state.items() if name not in REPLICA}
                state |= {name: self.state[name] for name in REPLICA} if rank == 0 else {}
            yield rank, {**part, "strategy": state, "statistics": statistics}

    def _part_of_lost(self, rank: int, strategy: Strategy, former: Mapping[int, Part]) -> Part:
        """Returns the part of a learner that has saved nothing. What it counted since the checkpoint is not known."""
        part = next(iter(self.saved.values()))["part"]
        state = strategy.state_of_lost(rank, {other: saved["part"]["strategy"] for other, saved in self.saved.items()})
        continued = [part for number, part in former.items() if number % self.learners == rank]  # as in `merged_part`
        stale = max(part["strategy"]["staleness"], default=0)  # of hybrid 1 after its first step, of others 0
        counts, staleness, usage = Counter[str](), Counter({stale: self.steps}), CommStats()
        for counted in continued:
            counts.update(counted["strategy"]["counts"])
            staleness.update(counted["strategy"]["staleness"])
        if continued:
            load_comm_stats(usage, [counted["usage"] for counted in continued])
        if strategy.residuals:
            counts["residuals lost"] += 1
        state |= {"staleness": dict(staleness), "counts": dict(counts)}
        return {**part, "strategy": state, "usage": comm_stats_to_dict(usage), "rng": None}
