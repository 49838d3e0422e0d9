"""What a learner continues with from a checkpoint: its own part, that of another learner, or a mean of all parts.

A learner that the checkpoint does not know, as it was dead, takes the part of the first one. In a team of another size
every learner takes what `Strategy.merge` makes of all parts. All teams of a run share batches of the same total, and
checkpoints are made after whole rounds, so the examples that are done are the same for both teams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from asr_am.distributed.strategy import REPLICA, Strategy
from asr_am.distributed.team import Team
from asr_am.train.checkpoint import Checkpoints, TrainProgress


class LearnerPart(NamedTuple):
    """What a learner continues with.

    Attributes:
        strategy: state of its strategy.
        statistics: running statistics of its model, by name.
        counted: the parts whose counts it continues: its own, and those of former learners whose place it takes.
        rng: state of torch's generator. None: it keeps its own.
        threads: threads of arithmetic of the learner that saved the part. None: there was none.
    """

    strategy: dict[str, Any]
    statistics: Mapping[str, Tensor]
    counted: list[dict[str, Any]]
    rng: Tensor | None
    threads: int | None


def learner_part(checkpoints: Checkpoints, state: dict[str, Any], team: Team) -> LearnerPart:
    """Reads a learner's part of a checkpoint.

    Args:
        checkpoints: the run's checkpoints, of which one was loaded.
        state: result of `Checkpoints.load`.
        team: the learner's end of its team.
    """
    first, rank = state["members"][0], team.rank
    if rank not in state["members"]:
        part = checkpoints.load_learner(first)
        return LearnerPart(part["strategy"], part["statistics"], [], None, None)
    part = checkpoints.load_learner(rank)
    own = part["strategy"]
    if not own.keys() >= REPLICA:
        own = checkpoints.load_learner(first)["strategy"] | own
    return LearnerPart(own, part["statistics"], [part], part["rng"], part["threads"])


def merged_part(checkpoints: Checkpoints, state: dict[str, Any], team: Team, strategy: Strategy) -> LearnerPart:
    """Does `learner_part` for a checkpoint of a team of another size. `strategy` is the learner's."""
    parts = {rank: checkpoints.load_learner(rank) for rank in state["members"]}
    learners = TrainProgress(**state["cursor"]).learners
    merged = strategy.merge([part["strategy"] for rank, part in parts.items() if rank < learners])
    counted = [part for rank, part in parts.items() if rank % team.size == team.rank]
    return LearnerPart(merged, parts[state["members"][0]]["statistics"], counted, None, None)
