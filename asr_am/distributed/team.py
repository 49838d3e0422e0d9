"""The learners that train together, as a strategy sees them. Nothing here says how they are connected.

Three kinds of call: *collectives* (all learners of the team or of a group of it, in the same order), *mail* (one to
one, never waiting for the receiver), and the *control plane* (leases, gather, average: what measuring and validating
need, between the living; it takes no time on a virtual clock).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from asr_am.distributed.leases import LearnerLost as LearnerLost
from asr_am.distributed.leases import Leases, RoundRobinLeases, Segment
from asr_am.errors import InputError

if TYPE_CHECKING:
    from asr_am.distributed.leases import GradientFn

CostKind = Literal["update", "averaging"]
"""Work beside the gradient that a virtual cluster has a price for: updating weights on the device (with what moves
between it and the host), averaging two weight vectors on the host."""


@dataclass(frozen=True)
class Message:
    """A message. clock: a number that the sender's algorithm gave it."""

    source: int
    tag: str
    clock: int
    tensors: tuple[Tensor, ...]


@dataclass
class CommStats:
    """What a learner did on its team's network.

    bytes_sent: by the learner each went to, in real bytes; of an all-reduce or a broadcast, what a ring sends, to its
    next member. modelled_bytes: the same, of the workload that a virtual cluster times. waiting_seconds: of the
    training task, for others. pull_seconds: blocks of weights by the seconds (two digits) between the push that asked
    another rank for one and its coming. refused: letters, and strangers' connections and messages. lost, superseded:
    letters. faults: injected or modelled ones that took place, by kind.
    """

    bytes_sent: Counter[int] = field(default_factory=Counter)
    modelled_bytes: float = 0.0
    idle_seconds: float = 0.0
    pull_latency: Counter[str] = field(default_factory=Counter)
    messages_sent: int = 0
    rejected: int = 0
    lost: int = 0
    overwritten: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Until it is complete; LearnerLost where that cannot happen any more."""
        ...


class Gather(Protocol):
    """An all-gather under way."""

    def wait(self) -> list[Tensor]:
        """Every member's tensor, by rank, not to be changed; LearnerLost as for `Work`."""
        ...


class Lock(Protocol):
    def __enter__(self) -> object: ...
    def __exit__(self, *exception: object) -> None: ...


class Event(Protocol):
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Task(Protocol):
    def join(self, timeout: float | None = None) -> None: ...


class Group(Protocol):
    """One member's end of `size` learners that do collectives together: a whole team, or a part of it (`Team.split`).

    rank: among the members. All members start the same collectives in the same order; a tensor must not be touched
    before `wait` returns.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def start_all_reduce_mean(self, x: Tensor) -> Work:
        """Replace x [N] by its mean over all members, the same bits for all."""
        ...

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        """Every member's x [n], int32 or float32. lengths: n by rank, where they differ.

        Where nobody says lengths, x is a few numbers *about* the model, timed as they are; else it is parts of the
        model, timed as those of the workload are.
        """
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Replace x [N] by that of member `source`."""
        ...


class Team(Group, Protocol):
    """One learner's end of a team of `size`. incarnation: 0, and one more after each restart of this learner. hosts: a
    number for the host of each rank.
    """

    @property
    def incarnation(self) -> int: ...
    @property
    def hosts(self) -> Sequence[int]: ...
    @property
    def clock(self) -> Literal["wall", "virtual"]: ...
    @property
    def comm_stats(self) -> CommStats: ...

    def live_ranks(self) -> Sequence[int]:
        """Ranks of the living, ascending."""
        ...

    def now(self) -> float:
        """Seconds, wall or virtual."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def simulate_cost(self, kind: CostKind, elements: int) -> None:
        """Let the time for work on so many elements pass: on a virtual cluster, nothing on a real one."""
        ...

    def timed(self, gradient: GradientFn) -> GradientFn:
        """The same closure, taking the time that the cluster's devices, stragglers and faults make it take."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        """The one of these disjoint groups, of ascending ranks, that this learner is in; called by all learners."""
        ...

    # mail

    def register_tag(self, tag: str, *lengths: int) -> None:
        """Letters `tag` have float32 tensors of these lengths, on any device; all others are refused and counted.

        A length of -n stands for any up to n.
        """
        ...

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        """Send a letter and return at once; the tensors may be changed afterwards. A letter that still waits for the
        one before it (of the same tag, to the same learner) to be collected is replaced. To the dead: nothing.
        """
        ...

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        """The next letter, on the CPU; None after `timeout` seconds, or when `source` is dead and left none behind."""
        ...

    # tasks

    def spawn(self, task: Callable[[], None], name: str) -> Task:
        """Run a communication task beside the training task; what it raises is raised in the training task.

        It may loop for ever: `close` ends it in whatever call of the team it waits.
        """
        ...

    def lock(self) -> Lock: ...
    def event(self) -> Event: ...

    # control plane

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        """This learner's access to the batches of a segment. in_step: everybody takes one batch a step."""
        ...

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """Every living learner's `values` [K], float64 and few, by rank; also a barrier of the living."""
        ...

    def average(self, x: Tensor) -> Tensor:
        """The mean [N] over the living learners. Not part of an algorithm: for validation and checkpoints."""
        ...

    def close(self) -> None:
        """End communication tasks, give back connections."""
        ...


def shapes_match(lengths: Sequence[int], accepted: Sequence[int] | None) -> bool:
    """Whether a letter with tensors of these lengths is one that was accepted; None: no such tag was."""
    if accepted is None or len(lengths) != len(accepted):
        return False
    return all(n == limit or n <= -limit for n, limit in zip(lengths, accepted, strict=True))


def find_group(rank: int, size: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The members of the group that learner `rank` of `size` is in. ValueError for groups that `split` cannot make."""
    members = [member for group in groups for member in group]
    if len(set(members)) < len(members) or not set(members) <= set(range(size)):
        raise ValueError(f"groups {groups} are not disjoint, or not of learners 0 to {size - 1}")
    if any(list(group) != sorted(group) for group in groups):
        raise ValueError(f"groups {groups}: ranks must ascend")
    return next((tuple(group) for group in groups if rank in group), None)


class CompletedWork:
    """A collective of one."""

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class CompletedGather:
    """An all-gather that is complete."""

    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.tensors


class SingleProcess:
    """A team of one learner in this process."""

    rank = 0
    size = 1
    incarnation = 0
    hosts = (0,)
    clock: Literal["wall", "virtual"] = "wall"

    def __init__(self) -> None:
        self.comm_stats = CommStats()

    def live_ranks(self) -> Sequence[int]:
        return (0,)

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def simulate_cost(self, kind: CostKind, elements: int) -> None:
        pass

    def timed(self, gradient: GradientFn) -> GradientFn:
        return gradient

    def start_all_reduce_mean(self, x: Tensor) -> Work:
        return CompletedWork()

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        return CompletedGather([x])

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        pass

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        return None if find_group(0, 1, groups) is None else self

    def register_tag(self, tag: str, *lengths: int) -> None:
        raise InputError("a team of one has nobody to write to; use launcher=virtual or launcher=process")

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        raise InputError("a team of one has nobody to write to")

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        raise InputError("a team of one has nobody to hear from")

    def spawn(self, task: Callable[[], None], name: str) -> Task:
        raise InputError("a team of one has no communication tasks")

    def lock(self) -> Lock:
        raise InputError("a team of one has nothing to lock")

    def event(self) -> Event:
        raise InputError("a team of one has nobody to wait for")

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        return RoundRobinLeases(segment, self.rank, self.size, self.gather)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        return {0: values}

    def average(self, x: Tensor) -> Tensor:
        return x.clone()

    def close(self) -> None:
        pass
