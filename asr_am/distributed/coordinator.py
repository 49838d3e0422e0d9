"""The supervisor's side of the control plane: `ControlPlane` behind messages of plain values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from asr_am.distributed.control_plane import Barrier, ControlPlane, MemberState
from asr_am.distributed.leases import Completion, LossSums, Segment, StaleSegment

log = logging.getLogger(__name__)

ControlMessage = dict[str, Any]


@dataclass
class Registration:
    """Connection state of one learner.

    Attributes:
        address: where its transport listens, None before it has registered.
        peers_sent: it has been sent the addresses of the others.
    """

    address: str | None = None
    peers_sent: bool = False


class Coordinator:
    """Front of `ControlPlane` for processes: answers requests when they can be, and announces deaths and joins.

    Free of sockets: messages leave through `send(rank, message)`.

    Attributes:
        started: all learners that begin the run have registered.
    """

    def __init__(
        self, size: int, send: Callable[[int, ControlMessage], None], incarnations: Mapping[int, int] | None = None
    ) -> None:
        """Expects the learners that begin.

        Args:
            incarnations: number of restarts of each learner that begins, by rank. None: all ranks begin anew.
        """
        self._send = send
        self._plane = ControlPlane()
        self._registrations: dict[int, Registration] = {}
        self._newcomers: dict[int, None] = {}  # ranks that have registered, and do not know the others yet
        # id of the request that each learner waits with, by rank in the order of arrival
        self._pending_leases: dict[int, int] = {}
        self._pending_barriers: dict[int, tuple[Barrier, int]] = {}
        self._gone: list[int] = []  # ranks that died and are not restarted
        self._ranks: list[int] = []  # ranks that began
        for rank, incarnation in (incarnations or dict.fromkeys(range(size), 0)).items():
            self.expect(rank, incarnation)
        self.started = False

    @property
    def members(self) -> dict[int, MemberState]:
        """Learners that are alive or being started, by rank."""
        return self._plane.members

    @property
    def weights_lost(self) -> bool:
        """See `ControlPlane.weights_lost`."""
        return self.started and self._plane.weights_lost

    # membership

    def expect(self, rank: int, incarnation: int) -> None:
        """Notes that a learner is being started."""
        self._plane.add(rank, incarnation)
        self._registrations[rank] = Registration()

    def register(self, rank: int, incarnation: int, address: str) -> None:
        """Registers a learner. It is sent the addresses of the others once all that begin the run have registered."""
        self.members[rank].incarnation, self._registrations[rank].address = incarnation, address
        self._newcomers[rank] = None
        self._send_peers()

    def leave(self, rank: int, reason: str | None, gone: bool = False) -> None:
        """Removes a learner that died, or that has finished (no reason). The second call for a learner does nothing.

        Args:
            reason: how it died.
            gone: it will not be restarted.
        """
        self._leave({rank: reason}, gone)

    def finish(self, ranks: Iterable[int]) -> None:
        """Removes learners that have finished at the same time. None of them is told of another."""
        self._leave(dict.fromkeys(ranks, None), gone=False)

    def _leave(self, reasons: Mapping[int, str | None], gone: bool) -> None:
        registrations = {rank: self._registrations.pop(rank, None) for rank in reasons}
        for rank, reason in reasons.items():
            member, registration = self.members.get(rank), registrations[rank]
            if gone:
                self._gone.append(rank)
            if gone or (registration is not None and registration.peers_sent):  # others may have heard it
                incarnation = 0 if member is None else member.incarnation
                news = {"news": "died", "incarnation": incarnation, "reason": reason or "finished", "gone": gone}
                self._tell_others(rank, news)
            if member is not None:
                self._forget(rank)
        if any(registration is not None for registration in registrations.values()):
            self._answer_barriers()
            self._answer_leases()
            self._send_peers()

    def _forget(self, rank: int) -> None:
        self._newcomers.pop(rank, None)
        self._pending_leases.pop(rank, None)
        self._pending_barriers.pop(rank, None)
        if released := self._plane.lose(rank):
            log.info("unfinished batches of learner %d, which others compute: %s", rank, ", ".join(map(str, released)))

    def _send_peers(self) -> None:
        """Sends the addresses of live learners to those that have registered and do not know them yet."""
        begin = False
        if not self.started and self._newcomers and len(self._newcomers) == len(self._registrations):
            self.started, self._ranks = True, sorted(self.members)
            begin = True
            for member in self.members.values():
                member.joined = True
        if not self.started or not self._newcomers:
            return
        joined = {
            rank: [member.incarnation, self._registrations[rank].address]
            for rank, member in self.members.items() if member.joined
        }  # fmt: skip
        news = {"news": "peers", "peers": joined, "ranks": self._ranks, "gone": self._gone, "rejoins": not begin}
        for rank in self._newcomers:
            self._send(rank, news)
            self._registrations[rank].peers_sent = True
        self._newcomers.clear()

    def _tell_others(self, rank: int, news: ControlMessage) -> None:
        news = {**news, "rank": rank}
        for other, registration in self._registrations.items():
            if other != rank and registration.peers_sent:
                self._send(other, news)

    # requests

    def handle(self, rank: int, request: ControlMessage) -> None:
        """Serves a request of a registered learner. What it raises is that learner's error."""
        op = request.get("op")
        if op == "open":
            self._open_segment(rank, request)
        elif op == "lease":
            self._pending_leases[rank] = request["id"]
            self._answer_leases([rank])  # nothing has changed for the others
        elif op == "complete":
            self._complete(rank, request)
        elif op == "totals":
            self._answer(rank, request["id"], astuple(self._plane.totals(rank)))
        elif op == "record":
            record = self._plane.record(rank)
            values = {
                "end": record.segment.end, "completions": record.completions, "released": record.released,
                "lost": record.lost,
            }  # fmt: skip
            self._answer(rank, request["id"], values)
        elif op == "stop":
            self._plane.stop(rank)
            self._answer(rank, request["id"], None)
            self._answer_leases()
        elif op == "gather":
            barrier = self._plane.arrive(rank, request["kind"], request["values"])
            self._pending_barriers[rank] = barrier, request["id"]
            self._answer_barriers([barrier])  # nothing has changed for the others
        elif op == "confirm":
            self._answer(rank, request["id"], None)
        elif op == "bye":
            self.leave(rank, None)
        else:
            raise ValueError(f"unknown request: {op!r}")

    def _open_segment(self, rank: int, request: ControlMessage) -> None:
        values = request["segment"]
        segment = Segment(**{**values, "frames": tuple(values["frames"]), "digests": tuple(values["digests"])})
        try:
            joins = self._plane.open_segment(rank, segment)
        except StaleSegment as error:
            self._send(rank, {"id": request["id"], "kind": "outdated", "error": str(error)})
            return
        if joins:
            log.info("learner %d is back", rank)
            news = {
                "news": "born",
                "incarnation": self.members[rank].incarnation,
                "address": self._registrations[rank].address,
            }
            self._tell_others(rank, news)
        self._answer(rank, request["id"], None)
        self._answer_barriers()

    def _complete(self, rank: int, request: ControlMessage) -> None:
        completion = Completion(
            request["batch"], rank, self.members[rank].incarnation, request["examples"], request["applied"],
            request["digest"],
        )  # fmt: skip
        if self._plane.complete(completion, LossSums(*request["totals"])):
            self._answer_leases()

    # answers

    def _answer_barriers(self, barriers: Collection[Barrier] | None = None) -> None:
        if barriers is None:
            barriers = {id(barrier): barrier for barrier, _ in self._pending_barriers.values()}.values()
        for barrier in barriers:
            self._plane.complete_barrier(barrier)
        if all(barrier.result is None for barrier in barriers):
            return
        for rank, (barrier, request_id) in list(self._pending_barriers.items()):
            if barrier.result is not None:
                del self._pending_barriers[rank]
                self._answer(rank, request_id, barrier.result)

    def _answer_leases(self, ranks: Sequence[int] | None = None) -> None:
        for rank in list(self._pending_leases) if ranks is None else ranks:
            answered, lease = self._plane.lease(rank)
            if answered:
                request_id = self._pending_leases.pop(rank)
                self._answer(rank, request_id, None if lease is None else dict(vars(lease)))

    def _answer(self, rank: int, request_id: int, value: object) -> None:
        self._send(rank, {"id": request_id, "value": value})
