"""The blocks of the weights that servers hold, and what workers and servers write to each other about them.

W [N] is cut into S blocks of n = ⌈N/S⌉ elements, wherever parameters begin and end; the last block is filled up with
zeros. Server i is a rank of the team, and holds block i.

Letters, worker to server:  push   ⟨g_i, t⟩ [n], note [NOTE]      a gradient of the weights of step (or version) t
                            away   number of a rest, t [1]        nothing more before that rest; steps below t may
                                                                  still be under way
                            pull                                  asks for the block
Letters, server to worker:  weights ⟨w_i, t⟩ [n]                  the block, and its version
                            heard   number of a rest              answers away
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asr_am.distributed.team import Message
from asr_am.errors import InputError

METADATA_LEN = 6  # float32 numbers, the bytes of three doubles


@dataclass(frozen=True)
class Shards:
    """elements: N of all weights. ranks: of the servers, ascending."""

    elements: int
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        """n, elements of a block."""
        return -(-self.elements // len(self.ranks))

    def of(self, x: Tensor, block: int) -> Tensor:
        """The part of `x` [N] that is block `block`, without what fills it up."""
        return x[block * self.size : (block + 1) * self.size]

    def padded(self, x: Tensor, block: int) -> Tensor:
        """A block of `x` [N], on the CPU, filled up with zeros [n]."""
        whole = torch.zeros(self.size)
        part = self.of(x, block)
        whole[: len(part)] = part
        return whole


def place_servers(hosts: Sequence[int], servers: int | None, apart: bool = False) -> tuple[int, ...]:
    """The ranks that servers stand beside: `servers` of them spread over all ranks; None: the first of each host.

    hosts: of each rank. apart: the last ranks are servers' own. InputError where there are not that many ranks.
    """
    size = len(hosts)
    if apart:
        if not isinstance(servers, int) or not 1 <= servers < size:
            raise InputError(f"strategy.servers={servers}: of {size} ranks, 1 to {size - 1} can be servers apart")
        return tuple(range(size - servers, size))
    if servers is None:
        return tuple(rank for rank in range(size) if hosts[rank] not in hosts[:rank])
    if not isinstance(servers, int) or not 1 <= servers <= size:
        raise InputError(f"strategy.servers={servers}: must be 1 to {size}, at most one beside each learner")
    return tuple(i * size // servers for i in range(servers))


@dataclass(frozen=True)
class Push:
    """A worker's gradient g [n] of its batch's mean loss over `frames` frames. rate: learning rate it asks for."""

    worker: int
    t: int
    g: Tensor
    frames: float
    lr: float
    batch: int


def pack_metadata(frames: float, lr: float, batch: int) -> Tensor:
    """Three doubles as bytes of float32 numbers [NOTE], so that no bit is lost."""
    return torch.tensor([frames, lr, batch], dtype=torch.float64).view(torch.float32)


def read_push(message: Message) -> Push:
    g, note = message.tensors
    frames, lr, batch = note.clone().view(torch.float64).tolist()
    return Push(message.source, message.clock, g, frames, lr, int(batch))


def mean_gradient(g: Tensor, pushes: Sequence[Push]) -> None:
    """Set `g` [n] to the mean over all frames of the gradients' batches: the more frames, the more weight.

    Added in the order of the batches, so that it does not matter who computed which, or came first.
    """
    frames = sum(push.frames for push in pushes)
    g.zero_()
    for push in sorted(pushes, key=lambda push: push.batch):
        g.add_(push.g, alpha=push.frames / frames)


def lr_of(pushes: Sequence[Push]) -> float:
    """The learning rate of a step: that of its first batch."""
    return min(pushes, key=lambda push: push.batch).lr
