"""Who of the team lives, in which incarnation, and where its mail goes to.

Changed only by the mail thread, inside `Waiting.change`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Peer:
    """address: of the learner's mail, as ZeroMQ writes it."""

    incarnation: int
    address: str
    alive: bool


class Membership:
    """All learners but for `rank` itself, which lives. left: who closed its team in good order, in that order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.left: list[int] = []
        self._entries = {other: Peer(-1, "", False) for other in range(size) if other != rank}

    def __getitem__(self, rank: int) -> Peer:
        return self._entries[rank]

    def fill(self, addresses: Mapping[int, tuple[int, str]]) -> None:
        """Those that live when this learner comes: {rank: (incarnation, address)}."""
        for rank, (incarnation, address) in addresses.items():
            self.add(rank, incarnation, address)

    def live_ranks(self) -> tuple[int, ...]:
        """Ranks of the living, ascending."""
        return tuple(r for r in range(self.size) if r == self.rank or self._entries[r].alive)

    def add(self, rank: int, incarnation: int, address: str) -> bool:
        """False where this is not news."""
        if not self.is_new(rank, incarnation):
            return False
        self._entries[rank] = Peer(incarnation, address, True)
        return True

    def is_new(self, rank: int, incarnation: int) -> bool:
        return rank in self._entries and incarnation > self._entries[rank].incarnation

    def mark_dead(self, rank: int, incarnation: int) -> bool:
        """False where this is not news. An incarnation that was never heard of can die, too."""
        entry = self._entries.get(rank)
        if entry is None or incarnation < entry.incarnation or (incarnation == entry.incarnation and not entry.alive):
            return False
        self._entries[rank] = Peer(incarnation, "", False)
        return True

    def mark_left(self, rank: int) -> None:
        """In good order: it is not lost, but lives no more."""
        self._entries[rank] = replace(self._entries[rank], alive=False)
        self.left.append(rank)
