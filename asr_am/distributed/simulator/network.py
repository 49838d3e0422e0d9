"""When transfers end: links as queues that are booked ahead.

A link takes one transfer after the other, in the order in which they were asked for: a receiving card that waits for
one, which still queues at its sender, takes no other meanwhile. When all of 32 hosts send to all, that is up to twice
the time of a network that would. The whole team's all-reduces are timed by a bandwidth of their own, and leave the
links of the messages free; all else goes through the links that it uses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from asr_am.distributed.cluster_config import Cluster


class ServiceQueue:
    """Something that does one job after the other. free_at: when those it has will be done."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def reserve(self, earliest: float, seconds: float) -> float:
        """When a job of so many seconds begins that may not begin before `earliest`."""
        begin = max(earliest, self.free_at)
        self.free_at = begin + seconds
        return begin


class SimNetwork:
    """A cluster's network cards, one for each direction of each host, and what each host averages and updates with."""

    def __init__(self, hardware: Cluster) -> None:
        self._hardware = hardware
        self._out = [ServiceQueue() for _ in range(hardware.hosts)]
        self._in = [ServiceQueue() for _ in range(hardware.hosts)]
        self._averaging = [ServiceQueue() for _ in range(hardware.hosts)]
        self._buses = [ServiceQueue() for _ in range(hardware.hosts)]

    def deliver(self, now: float, source: int, to: int, count: float) -> float:
        """When a message of `count` bytes from host to host, sent now, is there.

        Between hosts it leaves through the sender's card and comes in, while it leaves, through the receiver's; either
        may make it wait. Inside a host it touches neither.
        """
        hardware = self._hardware
        if source == to:
            return now + count / hardware.host_bandwidth + hardware.host_latency
        seconds = count / hardware.nic_bandwidth
        leaves = self._out[source].reserve(now, seconds)
        return self._in[to].reserve(leaves, seconds) + seconds + hardware.nic_latency

    def average(self, now: float, host: int, count: float) -> float:
        """When `host` has averaged weights of `count` bytes."""
        seconds = count / self._hardware.averaging_bandwidth
        return self._averaging[host].reserve(now, seconds) + seconds

    def update(self, now: float, host: int, count: float) -> float:
        """When a device of `host` has updated weights of `count` bytes.

        A device does not fill the bus that it shares, so the next may begin before it is done.
        """
        hardware = self._hardware
        begin = self._buses[host].reserve(now, count / hardware.host_update_bandwidth)
        return begin + count / min(hardware.update_bandwidth, hardware.host_update_bandwidth)

    def all_reduce_seconds(self, learners: int, count: float) -> float:
        """A ring's time: each link carries 2(λ-1)/λ times the message (section 2 of Zhang et al., ICASSP 2019)."""
        hardware = self._hardware
        if learners == 1:
            return 0.0
        return ring_share(learners) * count / hardware.all_reduce_bandwidth + hardware.all_reduce_latency

    def ring(self, begin: float, hosts: Sequence[int], count: float) -> float:
        """When `count` bytes have gone over each link of a ring, or chain, of learners on these hosts.

        Inside one host at the rate of its messages. Between hosts at the rate of all-reduces; rings that share a
        network card share its rate.
        """
        hardware, steps = self._hardware, len(hosts) - 1
        if steps == 0:
            return begin
        if len(set(hosts)) == 1:
            return begin + count / hardware.host_bandwidth + steps * hardware.host_latency
        begin, seconds = self._through_nics(begin, dict.fromkeys(hosts, count), dict.fromkeys(hosts, count))
        return begin + max(seconds, count / hardware.all_reduce_bandwidth) + hardware.all_reduce_latency

    def exchange(self, begin: float, hosts: Sequence[int], counts: Sequence[float]) -> float:
        """When each of the learners on these hosts has sent its `counts` bytes to every other."""
        hardware, total, size = self._hardware, sum(counts), len(hosts)
        if size == 1:
            return begin
        learners = Counter(hosts)
        here: defaultdict[int, float] = defaultdict(float)  # bytes of a host's learners
        for host, count in zip(hosts, counts, strict=True):
            here[host] += count
        inside = max(here[host] - count for host, count in zip(hosts, counts, strict=True)) / hardware.host_bandwidth
        if len(learners) == 1:
            return begin + inside + hardware.host_latency
        out = {host: here[host] * (size - learners[host]) for host in learners}
        into = {host: (total - here[host]) * learners[host] for host in learners}
        begin, seconds = self._through_nics(begin, out, into)
        return begin + max(inside, seconds, sum(out.values()) / hardware.fabric_bandwidth) + hardware.nic_latency

    def _through_nics(self, begin: float, out: Mapping[int, float], into: Mapping[int, float]) -> tuple[float, float]:
        """When the cards of these hosts are free for so many bytes each way, and the seconds of the slowest."""
        jobs = [(self._out[host], count) for host, count in out.items()]
        jobs += [(self._in[host], count) for host, count in into.items()]
        begin = max([begin, *(nic.free_at for nic, _ in jobs)])
        for nic, count in jobs:
            nic.reserve(begin, count / self._hardware.nic_bandwidth)
        return begin, max(count for _, count in jobs) / self._hardware.nic_bandwidth


def ring_share(learners: int) -> float:
    """What each learner sends in a ring all-reduce, in lengths of the message."""
    return 2 * (learners - 1) / learners
