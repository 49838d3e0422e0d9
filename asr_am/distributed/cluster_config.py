"""What a run is timed on, and what goes wrong in it: hardware, workload, and faults, as plain values from config.

`conf/cluster/*.yaml` describe hardware and faults, `conf/workload/*.yaml` what is timed on the hardware. Both act on
virtual teams (modelled); of a real one only faults and emulated computing time do (injected).
Units: seconds, bytes, bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asr_am.errors import InputError
from asr_am.options import build


@dataclass(frozen=True)
class Crash:
    """Learner `learner` dies at time `at`, and starts anew after `restart_after` seconds; None: never."""

    learner: int
    at: float
    restart_after: float | None = None

    def __post_init__(self) -> None:
        _require_whole("cluster.faults.crashes: learner", self.learner, least=0)
        _require("cluster.faults.crashes: at", self.at, least=0.0)
        if self.restart_after is not None:
            _require("cluster.faults.crashes: restart_after", self.restart_after, least=0.0)


@dataclass(frozen=True)
class Faults:
    """slow: learner -> factor on the seconds of its batches. late_share of all letters, or of those with the tag
    `late_tag`, take late_seconds longer than the links make them; lost_share of all letters never arrive.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    crashes: Sequence[Crash] = ()
    late_share: float = 0.0
    late_seconds: float = 0.0
    lost_share: float = 0.0
    late_tag: str | None = None

    def __post_init__(self) -> None:
        for learner, factor in self.slow.items():
            _require_whole("cluster.faults.slow: learner", learner, least=0)
            _require(f"cluster.faults.slow.{learner}", factor, least=1.0)
        _require("cluster.faults.late_share", self.late_share, least=0.0, most=1.0)
        _require("cluster.faults.late_seconds", self.late_seconds, least=0.0)
        _require("cluster.faults.lost_share", self.lost_share, least=0.0, most=1.0)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Faults:
        """From plain config values; InputError names a key that is unknown or whose value is wrong."""
        _require_mapping("cluster.faults", values)
        given = dict(values)
        slow = given.pop("slow", None) or {}
        crashes = given.pop("crashes", None) or ()
        _require_mapping("cluster.faults.slow", slow)
        if not isinstance(crashes, Sequence) or isinstance(crashes, str):
            raise InputError(f"cluster.faults.crashes: must be a list, not {crashes!r}")
        given["slow"] = {_to_rank("cluster.faults.slow", key): factor for key, factor in slow.items()}
        given["crashes"] = tuple(build(Crash, crash, "cluster.faults.crashes") for crash in crashes)
        return build(cls, given, "cluster.faults")

    def check(self, learners: int) -> None:
        """InputError where a fault is meant for a learner that a team of `learners` does not have."""
        for key, named in (("slow", list(self.slow)), ("crashes", [crash.learner for crash in self.crashes])):
            if named and max(named) >= learners:
                raise InputError(
                    f"cluster.faults.{key}: there is no learner {max(named)} among {learners}; "
                    f"learners are numbered 0 to {learners - 1}"
                )


@dataclass(frozen=True)
class Cluster:
    """Hosts with equal devices, one learner on each, placed host by host.

    nic_bandwidth: of a host's network card, in each direction, shared by its learners; nic_latency: of a message
    between hosts. fabric_bandwidth: most that all hosts together send to each other when all send to all.
    host_bandwidth, host_latency: of messages inside a host. all_reduce_bandwidth: through each learner's link in a
    ring. overlap_speed: share of its computing speed that a device keeps while a collective of its learner is
    transferred. update_bandwidth: price of a weight update, per device. averaging_bandwidth: price of averaging
    weights, per host, shared by its learners. host_update_bandwidth: most that the updates of a host's devices reach
    together, on the bus that they share. jitter: sigma of the lognormal factor, of mean 1, on the seconds of a batch.
    """

    name: str
    hosts: int
    devices_per_host: int
    device: str
    nic_bandwidth: float
    nic_latency: float
    host_bandwidth: float
    host_latency: float
    all_reduce_bandwidth: float
    all_reduce_latency: float
    overlap_speed: float
    update_bandwidth: float
    averaging_bandwidth: float
    host_update_bandwidth: float = math.inf
    fabric_bandwidth: float = math.inf
    jitter: float = 0.0
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for key in ("hosts", "devices_per_host"):
            _require_whole(f"cluster.{key}", getattr(self, key), least=1)
        for key in ("nic", "host", "all_reduce", "update", "averaging", "host_update", "fabric"):
            _require(f"cluster.{key}_bandwidth", getattr(self, f"{key}_bandwidth"), above=0.0, most=math.inf)
        for key in ("nic_latency", "host_latency", "all_reduce_latency", "jitter"):
            _require(f"cluster.{key}", getattr(self, key), least=0.0)
        _require("cluster.overlap_speed", self.overlap_speed, above=0.0, most=1.0)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Cluster:
        """From plain config values; InputError names a key that is unknown, missing, or whose value is wrong."""
        return build(cls, {**values, "faults": Faults.build(values.get("faults") or {})}, "cluster")

    @property
    def devices(self) -> int:
        return self.hosts * self.devices_per_host

    def host_of(self, rank: int) -> int:
        return rank // self.devices_per_host

    def check(self, learners: int) -> None:
        """InputError where `learners` do not fit, or a fault is meant for one that there is not."""
        if learners > self.devices:
            raise InputError(
                f"learners={learners}: cluster {self.name} has {self.hosts} hosts x {self.devices_per_host} devices; "
                f"use at most {self.devices} learners, or raise cluster.hosts"
            )
        self.faults.check(learners)


@dataclass(frozen=True)
class Workload:
    """What a batch costs. bytes: of all dense weights, None: those of the model that is trained.

    seconds_per_batch: by device, for a full batch; or frames_per_second: by device. emulate: real learners sleep, so
    that each batch takes these seconds.
    """

    name: str
    bytes: float | None = None
    seconds_per_batch: Mapping[str, float] | None = None
    frames_per_second: Mapping[str, float] | None = None
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.bytes is not None:
            _require("workload.bytes", self.bytes, above=0.0)
        if (self.seconds_per_batch is None) == (self.frames_per_second is None):
            raise InputError("workload: give one of seconds_per_batch and frames_per_second (the other: null)")
        for key in ("seconds_per_batch", "frames_per_second"):
            for device, value in (getattr(self, key) or {}).items():
                _require(f"workload.{key}.{device}", value, above=0.0)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Workload:
        """From plain config values; InputError names a key that is unknown, missing, or whose value is wrong."""
        return build(cls, values, "workload")

    def check(self, device: str) -> None:
        """InputError where the workload has no figure for `device`."""
        key = "seconds_per_batch" if self.seconds_per_batch is not None else "frames_per_second"
        known = getattr(self, key)
        if device not in known:
            raise InputError(f"workload.{key}: no figure for device {device!r}, only for {', '.join(known)}; add one")

    def seconds(self, device: str, frames: float, full: float) -> float:
        """Seconds of computing for a batch of `frames` frames, where the largest batches have `full`."""
        if self.seconds_per_batch is not None:
            return self.seconds_per_batch[device] * (frames / full if full else 0.0)
        assert self.frames_per_second is not None
        return frames / self.frames_per_second[device]


def _require_mapping(key: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"{key}: must be a mapping of keys to values, not {value!r}")


def _to_rank(key: str, value: object) -> int:
    """A config's mapping may have its learners' numbers as text."""
    try:
        return int(str(value))
    except ValueError:
        raise InputError(f"{key}: {value!r} is not a learner's number") from None


def _require_whole(key: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{key}: must be a whole number of at least {least}, not {value!r}")


def _require(
    key: str, value: float, least: float = -math.inf, above: float = -math.inf, most: float | None = None
) -> None:
    """InputError unless value >= least, > above and <= most (None: finite)."""
    below = math.isfinite(value) if most is None else value <= most
    if least <= value and above < value and below:
        return
    bounds = [f"at least {least:g}"] if least > -math.inf else [f"above {above:g}"]
    bounds += [f"at most {most:g}"] if most is not None and most < math.inf else []
    raise InputError(f"{key}: must be a number {' and '.join(bounds)}, not {value!r}")
