"""Membership: which learners are alive, in which incarnation, and at which address.

Changed only in callbacks of the event loop, inside `WaitMonitor.change`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol


@dataclass(frozen=True)
class Peer:
    """Another learner.

    Attributes:
        incarnation: number of its restarts, -1 before it is known.
        address: ZeroMQ address of its transport.
        alive: it is running.
    """

    incarnation: int
    address: str
    alive: bool


@cache
def shared_peer(incarnation: int, address: str, alive: bool) -> Peer:
    """Returns one object for all that know a learner in this state: virtual learners share a process."""
    return Peer(incarnation, address, alive)


class Membership:
    """State of all other learners.

    Attributes:
        left: ranks that have closed their team in good order, in that order.
        ranks: ranks that began with the team, or began again after it was restarted.
        gone: ranks that died and are not restarted.
        rejoins: this learner joins others that train already.
        complete: the supervisor has told who is alive.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.left: list[int] = []
        self.ranks = tuple(range(size))
        self.gone: set[int] = set()
        self.rejoins = False
        self.complete = False
        self._peers = dict.fromkeys(range(size), shared_peer(-1, "", False))
        self._peers.pop(rank, None)
        self._changes = 0
        self._live: tuple[int, tuple[int, ...]] = (-1, ())  # what `live_ranks` returned after so many changes

    def __getitem__(self, rank: int) -> Peer:
        return self._peers[rank]

    def fill(self, addresses: Mapping[int, Sequence[Any]] | Mapping[str, Sequence[Any]]) -> None:
        """Adds the learners that are alive when this one connects: {rank: (incarnation, address)}.

        This learner may be among them. Ranks are strings if the addresses have travelled as JSON.
        """
        found = {int(rank): shared_peer(*address, True) for rank, address in addresses.items()}
        if self._changes:  # else all are new
            found = {rank: peer for rank, peer in found.items() if self.is_new(rank, peer.incarnation)}
        found.pop(self.rank, None)
        self._peers.update(found)
        self._changes += 1

    def live_ranks(self) -> tuple[int, ...]:
        """Returns the ranks of live learners, ascending."""
        changes, live = self._live
        if changes != self._changes:
            changes = self._changes  # read first: another thread may change the peers meanwhile
            live = tuple(r for r in range(self.size) if r == self.rank or self._peers[r].alive)
            self._live = changes, live
        return live

    def _set(self, rank: int, incarnation: int, address: str, alive: bool) -> None:
        self._peers[rank] = shared_peer(incarnation, address, alive)
        self._changes += 1

    def add(self, rank: int, incarnation: int, address: str) -> bool:
        """Adds an incarnation of a learner. Returns False if it is already known."""
        if not self.is_new(rank, incarnation):
            return False
        self._set(rank, incarnation, address, True)
        return True

    def is_new(self, rank: int, incarnation: int) -> bool:
        return rank in self._peers and incarnation > self._peers[rank].incarnation

    def mark_dead(self, rank: int, incarnation: int) -> bool:
        """Marks an incarnation as dead, even an unknown one. Returns False if its death is already known."""
        peer = self._peers.get(rank)
        if peer is None or incarnation < peer.incarnation or (incarnation == peer.incarnation and not peer.alive):
            return False
        self._set(rank, incarnation, "", False)
        return True

    def mark_left(self, rank: int) -> None:
        """Marks a learner that has left in good order: it is not alive, but not lost either."""
        self._set(rank, self._peers[rank].incarnation, self._peers[rank].address, False)
        self.left.append(rank)


class Peers(Protocol):
    """The messages of a learner, as far as they depend on who is alive."""

    def on_peer_started(self, rank: int, incarnation: int, address: str) -> None: ...
    def on_peer_died(self, rank: int, incarnation: int) -> None: ...


def apply_event(membership: Membership, event: Mapping[str, Any], peers: Peers) -> None:
    """Applies an event that the supervisor has sent (`coordinator.Coordinator`) to a learner."""
    if event["news"] == "peers":
        membership.fill(event["peers"])
        membership.ranks, membership.rejoins = tuple(event["ranks"]), event["rejoins"]
        membership.gone.update(event["gone"])
        membership.complete = True
    elif event["news"] == "born":
        peers.on_peer_started(event["rank"], event["incarnation"], event["address"])
    elif event["news"] == "died":
        if event["gone"]:
            membership.gone.add(event["rank"])
        peers.on_peer_died(event["rank"], event["incarnation"])
