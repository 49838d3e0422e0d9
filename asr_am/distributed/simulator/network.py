"""Network model: end times of transfers, with links as queues that are reserved ahead.

A link serves one transfer after the other, in the order of the requests. Hence head-of-line blocking: a NIC waiting for
a transfer that still queues at its sender accepts no other. When each of 32 hosts sends to all others, this takes up to
twice the time of a network without such blocking. All-reduces of the whole team have a bandwidth of their own and leave
the links free for messages. All other transfers go through the links that they use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from asr_am.distributed.cluster_config import Cluster


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


class SimNetwork:
    """The NICs of a cluster, one queue for each direction of each host, and each host's memory and device bus."""

    def __init__(self, hardware: Cluster) -> None:
        self._hardware = hardware
        self._cut_off_until: dict[int, float] = {}
        self._out = [ServiceQueue() for _ in range(hardware.hosts)]
        self._in = [ServiceQueue() for _ in range(hardware.hosts)]
        self._averaging = [ServiceQueue() for _ in range(hardware.hosts)]
        self._buses = [ServiceQueue() for _ in range(hardware.hosts)]

    def deliver(self, now: float, source: int, to: int, count: float) -> float:
        """Returns the arrival time of a message.

        Between hosts it passes the sender's and the receiver's NIC at the same time, and may wait for either. Inside a
        host it uses no NIC.

        Args:
            now: time at which it is sent, in seconds.
            source: host of the sender.
            to: host of the receiver.
            count: length in bytes.
        """
        hardware = self._hardware
        if source == to:
            return now + count / hardware.host_bandwidth + hardware.host_latency
        seconds = count / hardware.nic_bandwidth
        leaves = self._out[source].reserve(self.reachable_at(now, source, to), seconds)
        return self._in[to].reserve(leaves, seconds) + seconds + hardware.nic_latency

    def cut_off(self, host: int, until: float) -> None:
        """Cuts a host off from all others. What is sent meanwhile arrives afterwards, as with TCP."""
        self._cut_off_until[host] = until

    def reachable_at(self, now: float, source: int, to: int) -> float:
        """Returns the earliest time at which two hosts can reach each other."""
        if source == to:
            return now
        return max(now, self._cut_off_until.get(source, now), self._cut_off_until.get(to, now))

    def average(self, now: float, host: int, count: float) -> float:
        """Returns the time at which `host` has averaged weights of `count` bytes."""
        seconds = count / self._hardware.averaging_bandwidth
        return self._averaging[host].reserve(now, seconds) + seconds

    def update(self, now: float, host: int, count: float) -> float:
        """Returns the time at which a device of `host` has updated weights of `count` bytes.

        One device does not saturate the bus that the devices of a host share, so the next may begin before it is done.
        """
        hardware = self._hardware
        begin = self._buses[host].reserve(now, count / hardware.host_update_bandwidth)
        return begin + count / min(hardware.update_bandwidth, hardware.host_update_bandwidth)

    def all_reduce_seconds(self, learners: int, count: float) -> float:
        """Returns the seconds of the whole team's all-reduce of `count` bytes.

        In a ring each link carries 2(λ-1)/λ times the message (section 2 of Zhang et al., ICASSP 2019).
        """
        hardware = self._hardware
        if learners == 1:
            return 0.0
        return ring_share(learners) * count / hardware.all_reduce_bandwidth + hardware.all_reduce_latency

    def ring(self, begin: float, hosts: Sequence[int], count: float) -> float:
        """Returns the time at which `count` bytes have passed each link of a ring or chain of learners.

        Inside one host the rate is that of messages. Between hosts it is that of all-reduces, and rings that share a
        NIC share its rate.

        Args:
            begin: earliest time, in seconds.
            hosts: host of each learner, in the order of the ring.
            count: bytes.
        """
        hardware, steps = self._hardware, len(hosts) - 1
        if steps == 0:
            return begin
        if len(set(hosts)) == 1:
            return begin + count / hardware.host_bandwidth + steps * hardware.host_latency
        begin, seconds = self._through_nics(begin, dict.fromkeys(hosts, count), dict.fromkeys(hosts, count))
        return begin + max(seconds, count / hardware.all_reduce_bandwidth) + hardware.all_reduce_latency

    def exchange(self, begin: float, hosts: Sequence[int], counts: Sequence[float]) -> float:
        """Returns the time at which each of the learners on these hosts has sent its `counts` bytes to every other."""
        hardware, total, size = self._hardware, sum(counts), len(hosts)
        if size == 1:
            return begin
        learners = Counter(hosts)
        host_bytes: defaultdict[int, float] = defaultdict(float)  # bytes of all learners of a host
        for host, count in zip(hosts, counts, strict=True):
            host_bytes[host] += count
        inside = (
            max(host_bytes[host] - count for host, count in zip(hosts, counts, strict=True)) / hardware.host_bandwidth
        )
        if len(learners) == 1:
            return begin + inside + hardware.host_latency
        out = {host: host_bytes[host] * (size - learners[host]) for host in learners}
        into = {host: (total - host_bytes[host]) * learners[host] for host in learners}
        begin, seconds = self._through_nics(begin, out, into)
        return begin + max(inside, seconds, sum(out.values()) / hardware.fabric_bandwidth) + hardware.nic_latency

    def _through_nics(self, begin: float, out: Mapping[int, float], into: Mapping[int, float]) -> tuple[float, float]:
        """Reserves the NICs for so many bytes each way. Returns when all are free, and the seconds of the slowest."""
        jobs = [(self._out[host], count) for host, count in out.items()]
        jobs += [(self._in[host], count) for host, count in into.items()]
        begin = max([begin, *(nic.free_at for nic, _ in jobs)])
        for nic, count in jobs:
            nic.reserve(begin, count / self._hardware.nic_bandwidth)
        return begin, max(count for _, count in jobs) / self._hardware.nic_bandwidth


def ring_share(learners: int) -> float:
    """Returns what each learner sends in a ring all-reduce, as a multiple of the length of the message."""
    return 2 * (learners - 1) / learners
