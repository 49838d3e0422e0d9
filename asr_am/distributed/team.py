"""The learners that train together, as a strategy sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

from asr_am.distributed.leases import Leases


class Team(Protocol):
    """What every kind of team offers. Collectives and mail come with the first strategy that needs them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def clock(self) -> Literal["wall", "virtual"]: ...

    def now(self) -> float:
        """Seconds."""
        ...

    def leases(self, total: int) -> Leases:
        """The table of an epoch of `total` batches."""
        ...


@dataclass(frozen=True)
class Alone:
    """A team of one learner in this process."""

    rank: int = 0
    size: int = 1
    clock: Literal["wall", "virtual"] = "wall"

    def now(self) -> float:
        return time.monotonic()

    def leases(self, total: int) -> Leases:
        return Leases(total)
