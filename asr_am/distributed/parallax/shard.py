"""Splitting the input between learners."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from asr_am.distributed.team import Team
from asr_am.errors import InputError

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Shard(Generic[Batch]):
    """Every `size`th batch from the `rank`th on. In an incomplete last round, learners without a batch get None, so
    that all take the same number of steps: `Runner.run` takes a None as a batch without examples.
    """

    dataset: Iterable[Batch]
    rank: int
    size: int

    def __iter__(self) -> Iterator[Batch | None]:
        batches = iter(self.dataset)
        while own := list(islice(batches, self.size)):
            yield own[self.rank] if self.rank < len(own) else None


def shard(dataset: Iterable[Batch], team: Team | None = None) -> Shard[Batch]:
    """This learner's part of a dataset of batches, which must come in the same order for all (table 2 of the paper).

    team: None for that which RANK and WORLD_SIZE tell of, as torchrun sets them; without these, one learner.
    """
    if team is not None:
        return Shard(dataset, team.rank, team.size)
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise InputError(f"RANK and WORLD_SIZE: must be whole numbers ({error})") from None
    if not 0 <= rank < size:
        raise InputError(f"RANK={rank}, WORLD_SIZE={size}: the rank must be below the size")
    return Shard(dataset, rank, size)
