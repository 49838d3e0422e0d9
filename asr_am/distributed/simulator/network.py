"""Network model: when transfers end, with network cards (NICs) that messages and collectives share.

A message passes the sender's and the receiver's NIC at the same time. It waits until both are free, and does not block
others meanwhile: a NIC takes the oldest of its waiting messages whose other NIC is free. A collective reserves the NICs
of its hosts before the messages that wait. Inside a host nothing waits. What goes to another site passes the NICs at
their own rate, and at the same time the link between the sites, which does one transfer after the other.

With `message_pieces` above 1, messages share the NICs as TCP connections do, of which each pair of learners has one.
A sender's NIC sends a piece of each connection in turn, and the receiver's takes the pieces in the order of their
arrival. Messages of a connection follow each other, and pass the link between two sites after the NICs.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, permutations

from asr_am.distributed.cluster_config import Cluster
from asr_am.distributed.simulator.scheduler import Scheduler

LEAST_PIECE = 65536.0  # bytes


class ServiceQueue:
    """A resource that does one job after the other.

    Attributes:
        free_at: time at which all jobs reserved so far are done, in seconds.
    """

    def __init__(self) -> None:
        self.free_at = 0.0

    def reserve(self, earliest: float, seconds: float) -> float:
        """Reserves a job of `seconds` that must not begin before `earliest`. Returns the time at which it begins."""
        begin = max(earliest, self.free_at)
        self.free_at = begin + seconds
        return begin


class Nic:
    """One direction of a host's network card.

    Attributes:
        free_at: time at which it has transferred all that was begun or reserved, in seconds.
        waiting: messages that wait for it or for their other NIC, the oldest first.
        pieces: of messages, that wait for it.
    """

    def __init__(self) -> None:
        self.free_at = 0.0
        self.pieces: deque[Transfer] = deque()
        self.waiting: OrderedDict[Transfer, None] = OrderedDict()  # whose first entry is found at once


@dataclass(eq=False)
class Transfer:
    """A message between two hosts.

    Attributes:
        out: NIC of the sender.
        into: NIC of the receiver.
        seconds: time that it occupies both.
        arrived: called when it has arrived.
        sites: sites of the sender and the receiver.
        count: length in bytes.
        connection: messages that have not left, of the same learners, with `message_pieces` above 1.
        left: pieces that have not left, with `message_pieces` above 1.
        missing: pieces that have not arrived.
    """

    out: Nic
    into: Nic
    seconds: float
    arrived: Callable[[], None]
    sites: tuple[int, int]
    count: float
    connection: deque[Transfer]
    left: int
    missing: int


class SimNetwork:
    """The NICs of a cluster, and each host's memory and device bus."""

    def __init__(self, hardware: Cluster, scheduler: Scheduler) -> None:
        self._hardware, self._scheduler = hardware, scheduler
        self._cut_off_until: dict[int, float] = {}
        self._out = [Nic() for _ in range(hardware.hosts)]
        self._in = [Nic() for _ in range(hardware.hosts)]
        self._averaging = [ServiceQueue() for _ in range(hardware.hosts)]
        self._buses = [ServiceQueue() for _ in range(hardware.hosts)]
        self._connections: defaultdict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
        self._site_links: defaultdict[tuple[int, int], ServiceQueue] = defaultdict(ServiceQueue)

    def deliver(
        self, source: int, to: int, count: float, arrived: Callable[[], None], connection: tuple[int, int]
    ) -> None:
        """Sends a message.

        Args:
            source: host of the sender.
            to: host of the receiver.
            count: length in bytes.
            arrived: called at the time of its arrival.
            connection: ranks of both.
        """
        hardware, scheduler = self._hardware, self._scheduler
        if source == to:
            scheduler.call_at(scheduler.now + count / hardware.host_bandwidth + hardware.host_latency, arrived)
            return
        sites = hardware.site_of(source), hardware.site_of(to)
        seconds = count / hardware.nic_bandwidth
        shared = hardware.message_pieces > 1
        pieces = max(1, min(hardware.message_pieces, math.ceil(count / LEAST_PIECE)))
        transfer = Transfer(
            self._out[source], self._in[to], seconds / pieces, arrived, sites, count, self._connections[connection],
            pieces, pieces,
        )  # fmt: skip
        begin = self.reachable_at(scheduler.now, source, to)
        start = partial(self._follow if shared else self._begin_or_wait, transfer)
        if begin > scheduler.now:
            scheduler.call_at(begin, start)
        else:
            start()

    def _follow(self, transfer: Transfer) -> None:
        """Lets a message follow those of its connection."""
        transfer.connection.append(transfer)
        if len(transfer.connection) == 1:
            self._queue(transfer.out, transfer)

    def _queue(self, nic: Nic, transfer: Transfer) -> None:
        """Queues a piece of a message at a NIC, which begins it at once if no other is there."""
        nic.pieces.append(transfer)
        if len(nic.pieces) == 1:
            self._begin_piece(nic)

    def _begin_piece(self, nic: Nic) -> None:
        begin = max(self._scheduler.now, nic.free_at)
        nic.free_at = begin + nic.pieces[0].seconds
        self._scheduler.call_at(nic.free_at, partial(self._end_piece, nic))

    def _end_piece(self, nic: Nic) -> None:
        transfer = nic.pieces[0]
        if nic is transfer.out:
            transfer.left -= 1
            if not transfer.left:
                transfer.connection.popleft()
            if transfer.connection:
                nic.pieces.append(transfer.connection[0])
            self._queue(transfer.into, transfer)
        else:
            transfer.missing -= 1
            if not transfer.missing:
                self._arrive(transfer, self._scheduler.now)
        nic.pieces.popleft()
        if nic.pieces:
            self._begin_piece(nic)

    def _begin_or_wait(self, transfer: Transfer) -> None:
        now = self._scheduler.now
        if transfer.out.free_at <= now and transfer.into.free_at <= now:
            self._begin(transfer)
        else:
            transfer.out.waiting[transfer] = transfer.into.waiting[transfer] = None

    def _begin(self, transfer: Transfer) -> None:
        """Begins a transfer, of which both NICs are free."""
        scheduler, out, into = self._scheduler, transfer.out, transfer.into
        end = scheduler.now + transfer.seconds
        out.free_at = into.free_at = end
        scheduler.call_at(end, partial(self._release, out, into))
        self._arrive(transfer, end)

    def _arrive(self, transfer: Transfer, end: float) -> None:
        """Arranges the arrival of a message that has passed both NICs at `end`, and may pass between two sites now."""
        if transfer.sites[0] != transfer.sites[1]:
            link_end = self._through_site_links({transfer.sites: transfer.count}, self._scheduler.now)
            end = max(end, link_end) + self._hardware.site_latency
        self._scheduler.call_at(end + self._hardware.nic_latency, transfer.arrived)

    def _through_site_links(self, counts: Mapping[tuple[int, int], float], earliest: float) -> float:
        """Reserves links between sites for so many bytes each. Returns the time at which the last has passed."""
        end = earliest
        for sites, count in counts.items():
            seconds = count / self._hardware.site_bandwidth
            end = max(end, self._site_links[sites].reserve(earliest, seconds) + seconds)
        return end

    def _release(self, out: Nic, into: Nic) -> None:
        """Begins messages after one has left. All senders that are free choose first, so that they keep their order."""
        self._begin_waiting(out)
        self._scheduler.call_at(self._scheduler.now, partial(self._begin_waiting, into))

    def _begin_waiting(self, nic: Nic) -> None:
        """Begins the oldest message that waited for this NIC and whose other NIC is free."""
        now = self._scheduler.now
        while nic.free_at <= now:  # after a message of no length, the next one may begin
            free = (
                transfer for transfer in nic.waiting if transfer.out.free_at <= now and transfer.into.free_at <= now
            )
            if (transfer := next(free, None)) is None:
                break
            self._begin(transfer)
            del transfer.out.waiting[transfer], transfer.into.waiting[transfer]

    def cut_off(self, host: int, until: float) -> None:
        """Cuts a host off from all others. What is sent meanwhile arrives afterwards, as with TCP."""
        self._cut_off_until[host] = until

    def reachable_at(self, now: float, source: int, to: int) -> float:
        """Returns the earliest time at which two hosts can reach each other."""
        if source == to:
            return now
        return max(now, self._cut_off_until.get(source, now), self._cut_off_until.get(to, now))

    # work of a host, which one job does after the other

    def average(self, host: int, count: float) -> float:
        """Returns the time at which `host` has averaged weights of `count` bytes."""
        seconds = count / self._hardware.averaging_bandwidth
        return self._averaging[host].reserve(self._scheduler.now, seconds) + seconds

    def update(self, host: int, count: float) -> float:
        """Returns the time at which a device of `host` has updated weights of `count` bytes.

        One device does not saturate the bus that the devices of a host share, so the next may begin before it is done.
        """
        hardware = self._hardware
        begin = self._buses[host].reserve(self._scheduler.now, count / hardware.host_update_bandwidth)
        return begin + count / min(hardware.update_bandwidth, hardware.host_update_bandwidth)

    def factor(self, host: int, count: float) -> float:
        """Returns the time at which a device has factored a gradient of `count` bytes."""
        return self._scheduler.now + count / self._hardware.factoring_bandwidth

    # collectives of learners on these hosts, in the order of the ring, that begin now. They return the time of the end.

    def all_reduce(self, hosts: Sequence[int], count: float) -> float:
        """In a ring each link carries 2(λ-1)/λ times the message (section 2 of Zhang et al., ICASSP 2019)."""
        return self._ring(hosts, ring_share(len(hosts)) * count, 2 * (len(hosts) - 1))

    def broadcast(self, hosts: Sequence[int], count: float) -> float:
        """In a chain each link carries the message once."""
        return self._ring(hosts, count, len(hosts) - 1, chain=True)

    def _ring(self, hosts: Sequence[int], count: float, steps: int, chain: bool = False) -> float:
        """Returns the time at which `count` bytes have passed each link, with the latency of `steps` links.

        The links between hosts are the NICs, those inside a host that of its messages. A ring reaches the share
        all_reduce_efficiency of the slowest link's rate, but the NICs are free for others in the rest of the time. The
        link between two sites is reached in full. A ring crosses it in each of its rounds.
        """
        hardware = self._hardware
        if steps == 0:
            return self._scheduler.now
        if len(set(hosts)) == 1:
            seconds = count / (hardware.all_reduce_efficiency * hardware.host_bandwidth)
            return self._scheduler.now + seconds + steps * self._step_latency(hardware.host_latency)
        begin, seconds = self._through_nics(dict.fromkeys(hosts, count), dict.fromkeys(hosts, count))
        end = begin + seconds / hardware.all_reduce_efficiency
        if hardware.sites > 1:
            sites = [hardware.site_of(host) for host in hosts]
            links = pairwise(sites if chain else [*sites, sites[0]])
            crossed = Counter((here, there) for here, there in links if here != there)
            end = max(end, self._through_site_links({link: times * count for link, times in crossed.items()}, begin))
            end += math.ceil(steps / len(hosts)) * crossed.total() * hardware.site_latency
        return end + steps * self._step_latency(hardware.nic_latency)

    def exchange(self, hosts: Sequence[int], counts: Sequence[float]) -> float:
        """Each learner sends its `counts` bytes to every other."""
        hardware, total, size = self._hardware, sum(counts), len(hosts)
        if size == 1:
            return self._scheduler.now
        learners = Counter(hosts)
        host_bytes: defaultdict[int, float] = defaultdict(float)  # bytes of all learners of a host
        for host, count in zip(hosts, counts, strict=True):
            host_bytes[host] += count
        inside = (
            max(host_bytes[host] - count for host, count in zip(hosts, counts, strict=True)) / hardware.host_bandwidth
        )
        if len(learners) == 1:
            return self._scheduler.now + inside + self._step_latency(hardware.host_latency)
        out = {host: host_bytes[host] * (size - learners[host]) for host in learners}
        into = {host: (total - host_bytes[host]) * learners[host] for host in learners}
        begin, seconds = self._through_nics(out, into)
        end = begin + max(inside, seconds, sum(out.values()) / hardware.fabric_bandwidth)
        if len({hardware.site_of(host) for host in learners}) > 1:
            between: defaultdict[tuple[int, int], float] = defaultdict(float)  # bytes from one site to another
            for host, other in permutations(learners, 2):
                if (here := hardware.site_of(host)) != (there := hardware.site_of(other)):
                    between[here, there] += host_bytes[host] * learners[other]
            end = max(end, self._through_site_links(between, begin)) + hardware.site_latency
        return end + self._step_latency(hardware.nic_latency)

    def _step_latency(self, of_message: float) -> float:
        latency = self._hardware.collective_latency
        return of_message if latency is None else latency

    def _through_nics(self, out: Mapping[int, float], into: Mapping[int, float]) -> tuple[float, float]:
        """Reserves the NICs for so many bytes each way. Returns when all are free, and the seconds of the slowest."""
        jobs = [(self._out[host], count) for host, count in out.items()]
        jobs += [(self._in[host], count) for host, count in into.items()]
        begin = max([self._scheduler.now, *(nic.free_at for nic, _ in jobs)])
        for nic, count in jobs:
            nic.free_at = begin + count / self._hardware.nic_bandwidth
            self._scheduler.call_at(nic.free_at, partial(self._begin_waiting, nic))
        return begin, max(count for _, count in jobs) / self._hardware.nic_bandwidth


def ring_share(learners: int) -> float:
    """Returns what each learner sends in a ring all-reduce, as a multiple of the length of the message."""
    return 2 * (learners - 1) / learners
