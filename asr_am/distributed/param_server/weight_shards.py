"""The shards of the weights that servers hold, and the messages between workers and servers.

W [N] is cut into S shards of n = ⌈N/S⌉ elements, regardless of where parameters begin and end. The last shard is padded
with zeros. Server i is a rank of the team and holds shard i.

Messages from worker to server, by tag (clock, then tensors):

    push     t, g_i [n], metadata [METADATA_LEN]    a gradient taken at the weights of step (or version) t. The metadata
                                                    names its batch and the push (`PushId`)
    away     number of the drain, t [1]             the worker is drained: it pushes nothing more before that drain.
                                                    Pushes of steps below t may still be under way
    pull     the worker's incarnation               asks for the shard, when the worker is drained or rejoins
    copy     t, w_i [n]                             answers lost: the worker's newest copy of the shard (or `NO_COPY`)

Messages from server to worker:

    weights  t, w_i [n], answer [ANSWER_LEN]        the shard in version t. The answer has the `PushId` of the worker's
                                                    newest push that the server has applied, or dropped for good, and
                                                    the steps of the slowest other worker (`ps_async` with a bound)
    heard    number of the drain                    acknowledges away
    lost     0                                      asks for the worker's copy, after a restart of the server

A worker resends its push until the server answers it: with an acknowledgement of that push (`ps_async`), or with a
later step (`ps_sync`, `psp`). Under `ps_async` a higher version alone is no answer, as the pushes of others raise it
too. A server recognises a push that it has received before by its `PushId`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asr_am.distributed.team import Message
from asr_am.errors import InputError

METADATA_LEN = 11  # four float64 numbers reinterpreted as int32, and a PushId
NO_COPY = -1  # clock of a copy that is only a checkpoint's, of a worker that has not pulled since it rejoined
ANSWER_LEN = 4  # a PushId, and a number of steps


class PushId(NamedTuple):
    """Identity of a push among those of its worker. It ascends from push to push, also over restarts.

    Attributes:
        segment: number of drains before it.
        incarnation: number of restarts of the worker.
        step: number of the push in the segment, from 1. A worker that rejoins continues from the slowest one's.
    """

    segment: int
    incarnation: int
    step: int


NO_PUSH = PushId(-1, 0, 0)  # precedes every push


@dataclass(frozen=True)
class Shards:
    """The partition of the weights.

    Attributes:
        elements: N, elements of all weights.
        ranks: rank of the server of each shard, ascending.
    """

    elements: int
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        """n, the elements of a shard."""
        return -(-self.elements // len(self.ranks))

    def of(self, x: Tensor, shard: int) -> Tensor:
        """Returns the part of `x` [N] that belongs to a shard, without padding."""
        return x[shard * self.size : (shard + 1) * self.size]

    def padded(self, x: Tensor, shard: int) -> Tensor:
        """Returns a copy [n] of a shard of `x` [N], on the CPU and padded with zeros."""
        padded = torch.zeros(self.size)
        part = self.of(x, shard)
        padded[: len(part)] = part
        return padded


def place_servers(
    hosts: Sequence[int], servers: int | None, dedicated: bool = False, ranks: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Chooses the ranks of the servers.

    Args:
        servers: number of servers, spread over all ranks. None: the first rank of each host.
        dedicated: the servers are the last ranks, which do nothing else (`strategy.apart`).
        ranks: the ranks that are there, None for all. Without the others there may be fewer servers.

    Returns:
        The ranks, ascending.

    Raises:
        InputError: there are not as many ranks, or no rank is left for a server.
    """
    size = len(hosts)
    ranks = range(size) if ranks is None else ranks
    if dedicated:
        if not isinstance(servers, int) or not 1 <= servers < size:
            raise InputError(
                f"strategy.servers={servers}: with strategy.apart=true, 1 to {size - 1} of {size} ranks can be servers"
            )
        if not (left := tuple(rank for rank in ranks if rank >= size - servers)):
            raise InputError("no rank for a parameter server is left: start the same command again")
        return left
    if servers is None:
        first = {hosts[rank]: rank for rank in reversed(ranks)}  # of each host
        return tuple(sorted(first.values()))
    if not isinstance(servers, int) or not 1 <= servers <= size:
        raise InputError(f"strategy.servers={servers}: must be 1 to {size}, at most one beside each learner")
    servers = min(servers, len(ranks))
    return tuple(ranks[i * len(ranks) // servers] for i in range(servers))


@dataclass(frozen=True)
class Push:
    """A worker's gradient for one shard.

    Attributes:
        t: step or version of the weights that the gradient was taken at.
        g: gradient [n] of the batch's mean loss over its frames.
        lr: learning rate that the worker's schedule asks for.
        id: identity of the push, the same when it is resent.
    """

    worker: int
    t: int
    g: Tensor
    frames: float
    lr: float
    batch: int
    digest: int
    id: PushId


def pack_metadata(frames: float, lr: float, batch: int, digest: int, push_id: PushId) -> Tensor:
    """Packs numbers into an int32 tensor [METADATA_LEN], which messages carry without loss."""
    numbers = torch.tensor([frames, lr, batch, digest], dtype=torch.float64).view(torch.int32)
    return torch.cat([numbers, torch.tensor(push_id, dtype=torch.int32)])


def make_push(worker: int, t: int, g: Tensor, metadata: Tensor) -> Push:
    """Returns the push of a gradient [n] with packed metadata [METADATA_LEN]."""
    frames, lr, batch, digest = metadata[:8].clone().view(torch.float64).tolist()
    return Push(worker, t, g, frames, lr, int(batch), int(digest), PushId(*map(int, metadata[8:].tolist())))


def read_push(message: Message) -> Push:
    """Returns the push that a message carries."""
    g, metadata = message.tensors
    return make_push(message.source, message.clock, g, metadata)


def pack_answer(acknowledged: PushId, slowest: int) -> Tensor:
    """Packs the answer [ANSWER_LEN] of a server to a worker (see the table of messages)."""
    return torch.tensor([*acknowledged, slowest], dtype=torch.int32)


def read_answer(answer: Tensor) -> tuple[PushId, int]:
    """Returns the newest push that is acknowledged, and the steps of the slowest other worker."""
    segment, incarnation, step, slowest = map(int, answer.tolist())
    return PushId(segment, incarnation, step), slowest


def mean_gradient(g: Tensor, pushes: Sequence[Push]) -> None:
    """Sets `g` [n] to the mean of the gradients over all frames of their batches.

    Gradients are added in the order of their batches, so the result depends neither on which worker computed a batch
    nor on the order of arrival.
    """
    frames = sum(push.frames for push in pushes)
    g.zero_()
    for push in sorted(pushes, key=lambda push: push.batch):
        g.add_(push.g, alpha=push.frames / frames)


def lr_of(pushes: Sequence[Push]) -> float:
    """Returns the learning rate of a step: that of its first batch."""
    return min(pushes, key=lambda push: push.batch).lr
