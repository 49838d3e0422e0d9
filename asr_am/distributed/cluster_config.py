"""Cluster, workload and fault configuration, as plain validated values.

`conf/cluster/*.yaml` describe hardware and faults, `conf/workload/*.yaml` the work that is timed on the hardware. A
virtual cluster models all of it. On real processes only faults and emulated computing time apply (injected).

Units: seconds, bytes, bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asr_am.errors import InputError
from asr_am.options import build

HOUR = 3600.0  # seconds


@dataclass(frozen=True)
class Crash:
    """A crash of one learner.

    Attributes:
        at: time of its death, in seconds from the start.
        restart_after: seconds until it is restarted, None for never.
    """

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
    """Faults of a cluster.

    Attributes:
        slow: factor on the seconds of a learner's batches, by learner.
        late_share: share of messages that arrive late_seconds later than the links imply.
        late_seconds: at most an hour.
        lost_share: share of messages that never arrive, at most 0.9: lost ones are sent again until one arrives.
        late_tag: only messages with this tag are late, None for all.
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
            _require(f"cluster.faults.slow.{learner}", factor, least=1.0, most=1e6)
        _require("cluster.faults.late_share", self.late_share, least=0.0, most=1.0)
        _require("cluster.faults.late_seconds", self.late_seconds, least=0.0, most=HOUR)
        _require("cluster.faults.lost_share", self.lost_share, least=0.0, most=0.9)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Faults:
        """Builds the faults from plain config values. Raises InputError that names an unknown key or a bad value."""
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
        """Raises InputError if a fault names a learner that a team of `learners` does not have."""
        for key, named in (("slow", list(self.slow)), ("crashes", [crash.learner for crash in self.crashes])):
            if named and max(named) >= learners:
                raise InputError(
                    f"cluster.faults.{key}: there is no learner {max(named)} among {learners}; "
                    f"learners are numbered 0 to {learners - 1}"
                )


@dataclass(frozen=True)
class Cluster:
    """Hosts with equal devices, one learner on each device, placed host by host.

    Attributes:
        device: kind of device, a key of the workload's figures.
        nic_bandwidth: of a host's network card in each direction, shared by its learners.
        nic_latency: of a message between hosts.
        message_pieces: pieces of a message between hosts. Connections take turns at a network card after each, as those
            of TCP do. With one piece, a message passes as a whole.
        host_bandwidth: of messages inside a host.
        host_latency: of messages inside a host.
        collective_latency: of each step of a collective. None: the latency of messages on its links.
        all_reduce_efficiency: rate that a ring or chain of learners reaches, relative to that of messages on its links.
        overlap_speed: share of its computing speed that a device keeps while a collective of its learner is
            transferred.
        update_bandwidth: bytes of weights that a device updates per second.
        averaging_bandwidth: bytes of weights that a host averages per second, shared by its learners.
        factoring_bandwidth: bytes of a gradient that a device factors per second, for PowerSGD.
        scatter_cost: cost of adding an element by its row's number, relative to adding it in sequence.
        host_update_bandwidth: most that the updates of a host's devices reach together, on their shared bus.
        fabric_bandwidth: most that all hosts together send to each other when all send to all.
        sites: number of places with equally many hosts each, in the order of the hosts.
        site_bandwidth: of the link from one site to another, in each direction, shared by all their learners.
        site_latency: of a message between sites, on top of nic_latency.
        jitter: sigma of the lognormal factor, with mean 1, on the seconds of a batch.
    """

    name: str
    hosts: int
    devices_per_host: int
    device: str
    nic_bandwidth: float
    nic_latency: float
    host_bandwidth: float
    host_latency: float
    all_reduce_efficiency: float
    overlap_speed: float
    update_bandwidth: float
    averaging_bandwidth: float
    message_pieces: int = 1
    collective_latency: float | None = None
    factoring_bandwidth: float = math.inf
    scatter_cost: float = 1.0
    host_update_bandwidth: float = math.inf
    fabric_bandwidth: float = math.inf
    sites: int = 1
    site_bandwidth: float = math.inf
    site_latency: float = 0.0
    jitter: float = 0.0
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for key in ("hosts", "devices_per_host", "sites", "message_pieces"):
            _require_whole(f"cluster.{key}", getattr(self, key), least=1)
        if self.hosts % self.sites:
            raise InputError(f"cluster.sites={self.sites}: does not divide cluster.hosts={self.hosts}")
        for key in ("nic", "host", "update", "averaging", "factoring", "host_update", "fabric", "site"):
            _require(f"cluster.{key}_bandwidth", getattr(self, f"{key}_bandwidth"), least=1.0, most=math.inf)
        for key in ("all_reduce_efficiency", "scatter_cost"):
            _require(f"cluster.{key}", getattr(self, key), above=0.0)
        for key in ("nic_latency", "host_latency", "site_latency", "collective_latency"):
            if (seconds := getattr(self, key)) is not None:
                _require(f"cluster.{key}", seconds, least=0.0, most=HOUR)
        _require("cluster.jitter", self.jitter, least=0.0, most=3.0)  # one of 5 has times that are hardly ever above 0
        _require("cluster.overlap_speed", self.overlap_speed, above=0.0, most=1.0)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Cluster:
        """Builds the cluster from plain config values. Raises InputError that names a bad, unknown or missing key."""
        return build(cls, {**values, "faults": Faults.build(values.get("faults") or {})}, "cluster")

    @property
    def devices(self) -> int:
        return self.hosts * self.devices_per_host

    def host_of(self, rank: int) -> int:
        return rank // self.devices_per_host

    def site_of(self, host: int) -> int:
        return host * self.sites // self.hosts

    def check(self, learners: int) -> None:
        """Raises InputError if `learners` do not fit on the cluster, or a fault names one outside the team."""
        if learners > self.devices:
            raise InputError(
                f"learners={learners}: cluster {self.name} has {self.hosts} hosts x {self.devices_per_host} devices; "
                f"use at most {self.devices} learners, or raise cluster.hosts"
            )
        self.faults.check(learners)


@dataclass(frozen=True)
class Workload:
    """Cost of a batch. Exactly one of `seconds_per_batch` and `frames_per_second` is given.

    Attributes:
        bytes: of all dense weights, None for those of the model that is trained.
        matrices: weight matrices of the model, as (number, rows, columns). Strategies that compress matrices are timed
            as if they divided `bytes` by what they divide these by. None: by what they divide the trained model's by.
        seconds_per_batch: seconds of a full batch, by kind of device.
        frames_per_second: speed, by kind of device.
        emulate: real learners sleep so that each batch takes these seconds.
    """

    name: str
    bytes: float | None = None
    seconds_per_batch: Mapping[str, float] | None = None
    frames_per_second: Mapping[str, float] | None = None
    emulate: bool = False
    matrices: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if self.bytes is not None:
            _require("workload.bytes", self.bytes, above=0.0)
        if self.matrices and (
            self.bytes is None or not all(len(matrix) == 3 and min(matrix) > 0 for matrix in self.matrices)
        ):
            raise InputError("workload.matrices: must be [number, rows, columns] each, and workload.bytes given")
        if (self.seconds_per_batch is None) == (self.frames_per_second is None):
            raise InputError("workload: give one of seconds_per_batch and frames_per_second (the other: null)")
        for device, value in (self.seconds_per_batch or {}).items():
            _require(f"workload.seconds_per_batch.{device}", value, above=0.0, most=24 * HOUR)
        for device, value in (self.frames_per_second or {}).items():
            _require(f"workload.frames_per_second.{device}", value, least=1e-3)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Workload:
        """Builds the workload from plain config values. Raises InputError that names a bad, unknown or missing key."""
        return build(cls, values, "workload")

    def check(self, device: str) -> None:
        """Raises InputError if the workload has no figure for `device`."""
        key = "seconds_per_batch" if self.seconds_per_batch is not None else "frames_per_second"
        known = getattr(self, key)
        if device not in known:
            raise InputError(f"workload.{key}: no figure for device {device!r}, only for {', '.join(known)}; add one")

    def seconds(self, device: str, frames: float, full: float) -> float:
        """Returns the seconds of computing of a batch.

        Args:
            full: frames of the largest batches.
        """
        if self.seconds_per_batch is not None:
            return self.seconds_per_batch[device] * (frames / full if full else 0.0)
        assert self.frames_per_second is not None
        return frames / self.frames_per_second[device]


FORWARD = 1 / 3  # share of the forward pass in a batch's time: the backward pass is twice the work


def bucket_share(begin: int, length: int) -> float:
    """Returns the share of a batch's time after which the gradient of elements begin..length is complete."""
    return FORWARD + (1 - FORWARD) * (1 - begin / length)


def _require_mapping(key: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"{key}: must be a mapping of keys to values, not {value!r}")


def _to_rank(key: str, value: object) -> int:
    """Returns a learner's number, which may be text as a key of a config's mapping."""
    try:
        return int(str(value))
    except ValueError:
        raise InputError(f"{key}: {value!r} is not a learner's number") from None


def _require_whole(key: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{key}: must be an integer of at least {least}, not {value!r}")


def _require(
    key: str, value: float, least: float = -math.inf, above: float = -math.inf, most: float | None = None
) -> None:
    """Raises InputError unless value >= least, > above and <= most (None: finite)."""
    below = math.isfinite(value) if most is None else value <= most
    if least <= value and above < value and below:
        return
    bounds = [f"at least {least:g}"] if least > -math.inf else [f"above {above:g}"]
    bounds += [f"at most {most:g}"] if most is not None and most < math.inf else []
    raise InputError(f"{key}: must be a number {' and '.join(bounds)}, not {value!r}")
