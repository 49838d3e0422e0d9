"""The interface through which a strategy talks to the other learners, whatever connects them.

`Team` is one learner's end. Three modules implement it: `SingleProcess` below, `runtime/team.py` (real processes) and
`simulator/team.py` (a virtual cluster). Its methods fall into four parts:

    collectives     every member of the team, or of a group of it, starts the same calls in the same order
    messages        one learner to another, tagged, never waiting for the receiver
    tasks           communication tasks beside the training task, with locks and events
    control plane   leases, gather and average among the live learners, for the training loop's bookkeeping
                    (validation, checkpoints, statistics). It takes no time on a virtual clock.

*Drained*: an epoch is done in segments, and at the end of each one the team is drained. All batches of the segment are
completed, no collective, exchange or push is under way, and no message that could still arrive changes a weight.
Checkpoints are written and models validated only then. A single worker is drained once it has pushed its last gradient
of the segment. `Strategy.drain` brings about both.

Shapes: N elements of all parameters together, K values.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.leases import LearnerLost as LearnerLost
from asr_am.distributed.leases import Leases, RoundRobinLeases, Segment
from asr_am.errors import InputError

if TYPE_CHECKING:
    from asr_am.distributed.leases import GradientFn

CostKind = Literal["update", "averaging", "factoring"]
"""Work that a virtual cluster charges time for, beside gradients: updating weights on the device (with the transfers
between device and host), and averaging two weight vectors on the host."""


@dataclass(frozen=True)
class Message:
    """A received message.

    Attributes:
        source: rank of the sender.
        tag: kind of message, as given to `Team.register_tag`.
        clock: a number that the sender's algorithm attached: a step, a version, or an exchange.
        tensors: float32 and int32 tensors, on the CPU, in the types in which they were sent.
    """

    source: int
    tag: str
    clock: int
    tensors: tuple[Tensor, ...]


@dataclass
class CommStats:
    """Communication statistics of one learner.

    Attributes:
        bytes_sent: bytes really sent, by destination rank. An all-reduce or a broadcast counts what a ring sends, to
            the next member.
        modelled_bytes: bytes sent as the workload of a virtual cluster sizes them.
        waiting_seconds: seconds that the training task waited for others.
        pull_latency: number of weight shards by seconds (as text, two digits) from the push to the reply with the
            updated shard. Shards that are served on the learner's own rank are not counted.
        messages_sent: messages handed to the network.
        rejected: messages, connections and unauthenticated packets that were refused.
        lost: messages that fault injection dropped.
        overwritten: messages that a newer one of the same tag and destination replaced before they left.
        faults: injected or modelled faults that took place, by kind.
    """

    bytes_sent: Counter[int] = field(default_factory=Counter)
    modelled_bytes: float = 0.0
    waiting_seconds: float = 0.0
    pull_latency: Counter[str] = field(default_factory=Counter)
    messages_sent: int = 0
    rejected: int = 0
    lost: int = 0
    overwritten: int = 0
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class ModelSize:
    """Size of the model that a virtual cluster times.

    Attributes:
        elements: number of all its weights.
        matrices: its weight matrices, as (number, rows, columns). Vectors are left out.
    """

    elements: float
    matrices: Sequence[Sequence[int]]


class Work(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""
        ...

    def wait(self) -> None:
        """Returns when the collective is complete.

        Raises:
            LearnerLost: a member died, so the collective cannot complete.
        """
        ...


class Gather(Protocol):
    """An all-gather under way."""

    def wait(self) -> list[Tensor]:
        """Returns every member's tensor in rank order. They must not be modified.

        Raises:
            LearnerLost: a member died, so the collective cannot complete.
        """
        ...


class Lock(Protocol):
    """The part of `threading.Lock` that strategies use."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exception: object) -> None: ...


class Event(Protocol):
    """The part of `threading.Event` that strategies use."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Task(Protocol):
    """A running communication task."""

    def join(self, timeout: float | None = None) -> None: ...


class Group(Protocol):
    """One member's end of a group of learners that do collectives together: a whole team, or a part (`Team.split`).

    All members start the same collectives in the same order. A tensor must not be touched until `wait` returns.
    """

    @property
    def rank(self) -> int:
        """This learner's number among the members, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of members."""
        ...

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> Work:
        """Starts to replace `x` by its mean over all members, with the same bits on every member.

        `x` and the mean travel in the type `launcher.wire`. The sum is float32. All members wait for their collectives
        in the same order.

        Args:
            x: [N], of the same length on every member.
            modelled: number of elements that a virtual cluster times. None: `x` is timed as a part of the model, scaled
                to the workload's bytes.
        """
        ...

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        """Starts to collect every member's `x`.

        Args:
            x: [n], int32, or float32 that travels in the type `launcher.wire`.
            lengths: n by rank, where members differ. A virtual cluster times `x` as a part of the model (scaled to the
                workload's bytes) if lengths are given, else as a few numbers *about* the model, at their real size.
        """
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Replaces `x` [N], float32 or int32, by that of member `source`.

        Float32 is rounded to the type `launcher.wire`, also at the source.
        """
        ...


class Team(Group, Protocol):
    """One learner's end of the team. The collectives of `Group` act on all of its learners."""

    @property
    def incarnation(self) -> int:
        """The number of restarts of this learner, 0 for its first process."""
        ...

    @property
    def restarts(self) -> int:
        """`incarnation`, and the restarts of the whole team by torchrun or after a death under MPI."""
        ...

    @property
    def launch(self) -> str:
        """The identity of the launch that has started the team, the same for all learners."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that began with this team, ascending. Ranks that were gone when it was restarted are missing."""
        ...

    @property
    def rejoins(self) -> bool:
        """True if this learner was restarted and joins others that train already."""
        ...

    @property
    def hosts(self) -> Sequence[int]:
        """The number of the host of each rank."""
        ...

    @property
    def clock(self) -> Literal["wall", "virtual"]:
        """The kind of time that `now` returns."""
        ...

    @property
    def waits_on_host(self) -> bool:
        """True if `Work.wait` returns after the collective, and raises LearnerLost if that cannot complete. False: a
        CUDA stream waits in its place (NCCL), and may go on with half a sum until the loss is noticed.
        """
        ...

    @property
    def faults(self) -> Faults:
        """The faults that are injected or modelled, which the strategy must cope with (`Strategy.check`)."""
        ...

    @property
    def comm_stats(self) -> CommStats:
        """This learner's statistics, counted by the team."""
        ...

    def live_ranks(self) -> Sequence[int]:
        """Returns the ranks of the live learners, ascending."""
        ...

    def is_gone(self, rank: int) -> bool:
        """Returns whether a learner has died and will not be restarted."""
        ...

    def restart_team(self, reason: str, lost: int | None = None) -> NoReturn:
        """Ends all learners, and starts them again from the last checkpoint. The call does not return.

        For the loss of weights that no live learner has, or of a learner that the others cannot do without. Batches
        done since the checkpoint are handed out again.

        Args:
            reason: what was lost, for the log.
            lost: the learner of which `reason` speaks, if the strategy cannot do without any. None: it can.

        Raises:
            LearnerLost: the team cannot be restarted.
        """
        ...

    def is_loss(self, error: Exception) -> bool:
        """Returns whether an error of this team's calls says that a learner is lost."""
        ...

    def sigterm_as_loss(self) -> AbstractContextManager[None]:
        """Context in which SIGTERM, with which a launcher ends what is left of a team, raises LearnerLost from the
        present or next call of this team. Outside, it ends the process at once, unless it is handled already.
        """
        ...

    def confirm(self) -> None:
        """Returns when the control plane has said that this learner belongs to the team. Else it waits for its end."""
        ...

    # time

    def now(self) -> float:
        """Returns the time in seconds, wall or virtual."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits, in wall or virtual time."""
        ...

    def simulate_cost(self, kind: CostKind, elements: int, scattered: bool = False) -> None:
        """Lets the time for work on `elements` elements pass on a virtual cluster. Does nothing on a real one.

        Args:
            elements: number of elements of the trained model.
            scattered: they are addressed one row at a time, not in sequence.
        """
        ...

    def modelled_size(self) -> ModelSize | None:
        """Returns the size of the model that a virtual cluster times.

        None: it is the trained model itself, or its matrices are not known.
        """
        ...

    def timed(self, gradient: GradientFn) -> GradientFn:
        """Returns the same closure, taking the time that the cluster's devices, stragglers and faults imply."""
        ...

    # collectives

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        """Splits the team into groups. All learners call it with the same argument.

        Args:
            groups: disjoint groups of ascending ranks. They need not cover the team.

        Returns:
            This learner's end of its group, None if it is in none.

        Raises:
            ValueError: the groups overlap, are not ascending, or name unknown ranks.
        """
        ...

    # messages

    def register_tag(self, tag: str, *lengths: int) -> None:
        """Declares a kind of message. Messages that fit no declared tag are rejected and counted.

        Args:
            lengths: number of elements of each tensor of a message. A length of -n allows any up to n.
        """
        ...

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        """Sends a message and returns at once.

        At most one message per tag and destination waits behind the one that the receiver has not yet taken: a newer
        one replaces it (`CommStats.overwritten`). Messages to dead learners are dropped.

        Args:
            clock: a number for `Message.clock`.
            tensors: on any device, copied before the call returns. Those of float32 (weights, gradients) travel in the
                type `launcher.wire`, those of int32 (counters, indices, bits) as they are.
        """
        ...

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        """Waits for the next message.

        Args:
            source: rank of the sender, None for any.
            timeout: seconds to wait, None for no limit.

        Returns:
            The message, or None after `timeout` or when `source` is dead and has left none.
        """
        ...

    def as_sent(self, x: Tensor) -> Tensor:
        """Returns `x` [N] as a receiver has it: rounded to the type `launcher.wire`."""
        ...

    # tasks

    def spawn(self, task: Callable[[], None], name: str) -> Task:
        """Runs a communication task beside the training task.

        A task may loop for ever: `close` ends it in whichever call of the team it waits. An exception that it raises
        is raised in the training task.

        Args:
            name: shown in error messages. A virtual cluster seeds the task's random numbers with it.
        """
        ...

    def lock(self) -> Lock:
        """Returns a lock between the tasks of this learner."""
        ...

    def event(self) -> Event:
        """Returns an event between the tasks of this learner."""
        ...

    # control plane

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        """Returns this learner's access to the batches of a segment.

        Args:
            synchronous: every learner takes one batch per step (`RoundRobinLeases`), instead of leasing batches from
                one queue (`LeaseQueue`).

        Raises:
            StaleSegment: this learner was restarted and the others have finished the segment. Load the newer
                checkpoint and try again.
        """
        ...

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """Collects a few numbers of every live learner. Also a barrier of the live learners.

        Args:
            values: [K], float64.

        Returns:
            The values of each live learner, by rank.
        """
        ...

    def average(self, x: Tensor) -> Tensor:
        """Returns the mean [N] of `x` over the live learners, for validation and checkpoints only.

        It is not part of an algorithm and takes no virtual time.
        """
        ...

    def close(self) -> None:
        """Ends the communication tasks and closes connections."""
        ...


def rounds(team: Team) -> bool:
    """Returns whether `launcher.wire` is a type of 16 bits, to which float32 is rounded."""
    third = torch.tensor([1 / 3])
    return not torch.equal(team.as_sent(third), third)


def shapes_match(lengths: Sequence[int], accepted: Sequence[int] | None) -> bool:
    """Returns whether tensors of these lengths fit a tag, registered with `accepted` (None: no such tag)."""
    if accepted is None or len(lengths) != len(accepted):
        return False
    return all(n == limit or n <= -limit for n, limit in zip(lengths, accepted, strict=True))


def find_group(rank: int, size: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Finds the group of a learner.

    Args:
        groups: disjoint groups of ascending ranks.

    Returns:
        The group's members, None if the learner is in none.

    Raises:
        ValueError: `Team.split` cannot make these groups.
    """
    members = [member for group in groups for member in group]
    if len(set(members)) < len(members) or not set(members) <= set(range(size)):
        raise ValueError(f"groups {groups} are not disjoint, or not of learners 0 to {size - 1}")
    if any(list(group) != sorted(group) for group in groups):
        raise ValueError(f"groups {groups}: ranks must ascend")
    return next((tuple(group) for group in groups if rank in group), None)


class CompletedWork:
    """A collective that needs no wait, as in a team of one."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class CompletedGather:
    """An all-gather that is complete."""

    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.tensors


class SingleProcess:
    """A team of one learner in this process. Messages and tasks raise InputError."""

    rank = 0
    size = 1
    incarnation = restarts = 0
    ranks: Sequence[int] = (0,)
    rejoins = False
    hosts = (0,)
    clock: Literal["wall", "virtual"] = "wall"
    waits_on_host = True
    faults = Faults()

    def __init__(self) -> None:
        self.comm_stats = CommStats()
        self.launch = secrets.token_hex(16)

    def live_ranks(self) -> Sequence[int]:
        return (0,)

    def is_gone(self, rank: int) -> bool:
        return False

    def restart_team(self, reason: str, lost: int | None = None) -> NoReturn:
        raise LearnerLost(0, reason)

    def is_loss(self, error: Exception) -> bool:
        return isinstance(error, LearnerLost)

    def sigterm_as_loss(self) -> AbstractContextManager[None]:
        return nullcontext()

    def confirm(self) -> None:
        pass

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def simulate_cost(self, kind: CostKind, elements: int, scattered: bool = False) -> None:
        pass

    def modelled_size(self) -> ModelSize | None:
        return None

    def timed(self, gradient: GradientFn) -> GradientFn:
        return gradient

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> Work:
        return CompletedWork()

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        return CompletedGather([x])

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        pass

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        return None if find_group(0, 1, groups) is None else self

    def register_tag(self, tag: str, *lengths: int) -> None:
        raise InputError("a team of one cannot exchange messages: use launcher=virtual or launcher=process")

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        raise InputError("a team of one cannot send messages: use launcher=virtual or launcher=process")

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        raise InputError("a team of one cannot receive messages: use launcher=virtual or launcher=process")

    def as_sent(self, x: Tensor) -> Tensor:
        return x

    def spawn(self, task: Callable[[], None], name: str) -> Task:
        raise InputError("a team of one has no communication tasks: use launcher=virtual or launcher=process")

    def lock(self) -> Lock:
        raise InputError("a team of one has no communication tasks to lock out: use launcher=virtual or process")

    def event(self) -> Event:
        raise InputError("a team of one has no communication tasks to wait for: use launcher=virtual or process")

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        return RoundRobinLeases(segment, self.rank, self.size, self.gather)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        return {0: values}

    def average(self, x: Tensor) -> Tensor:
        return x.clone()

    def close(self) -> None:
        pass
