"""When transfers end: links as queues that are booked ahead.

A link takes one transfer after the other, in the order in which they were asked for. Collectives are timed by a
bandwidth of their own, and leave the links of the messages free.
"""

from __future__ import annotations

from asr_am.distributed.cluster import Cluster


class Queue:
    """Something that does one job after the other. free_at: when those it has will be done."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def book(self, earliest: float, seconds: float) -> float:
        """When a job of so many seconds begins that may not begin before `earliest`."""
        begin = max(earliest, self.free_at)
        self.free_at = begin + seconds
        return begin


class Network:
    """A cluster's network cards, one for each direction of each host, and what each host averages and updates with."""

    def __init__(self, hardware: Cluster) -> None:
        self._hardware = hardware
        self._out = [Queue() for _ in range(hardware.hosts)]
        self._in = [Queue() for _ in range(hardware.hosts)]
        self._averaging = [Queue() for _ in range(hardware.hosts)]
        self._buses = [Queue() for _ in range(hardware.hosts)]

    def deliver(self, now: float, source: int, to: int, count: float) -> float:
        """When a message of `count` bytes from host to host, sent now, is there.

        Between hosts it leaves through the sender's card and comes in, while it leaves, through the receiver's; either
        may make it wait. Inside a host it touches neither.
        """
        hardware = self._hardware
        if source == to:
            return now + count / hardware.host_bandwidth + hardware.host_latency
        seconds = count / hardware.nic_bandwidth
        leaves = self._out[source].book(now, seconds)
        return self._in[to].book(leaves, seconds) + seconds + hardware.nic_latency

    def average(self, now: float, host: int, count: float) -> float:
        """When `host` has averaged weights of `count` bytes."""
        seconds = count / self._hardware.averaging_bandwidth
        return self._averaging[host].book(now, seconds) + seconds

    def update(self, now: float, host: int, count: float) -> float:
        """When a device of `host` has updated weights of `count` bytes.

        A device does not fill the bus that it shares, so the next may begin before it is done.
        """
        hardware = self._hardware
        begin = self._buses[host].book(now, count / hardware.host_update_bandwidth)
        return begin + count / min(hardware.update_bandwidth, hardware.host_update_bandwidth)

    def all_reduce_seconds(self, learners: int, count: float) -> float:
        """A ring's time: each link carries 2(λ-1)/λ times the message (section 2 of Zhang et al., ICASSP 2019)."""
        hardware = self._hardware
        if learners == 1:
            return 0.0
        return ring_share(learners) * count / hardware.all_reduce_bandwidth + hardware.all_reduce_latency


def ring_share(learners: int) -> float:
    """What each learner sends in a ring all-reduce, in lengths of the message."""
    return 2 * (learners - 1) / learners
