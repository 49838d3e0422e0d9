"""The mean of several tensors over a group by one all-reduce, which costs one latency instead of one per tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.team import Group


class PackedMean:
    """An all-reduce of several tensors under way (`Work`). It starts when this is made.

    Args:
        tensors: of any shapes, the same on every member. `wait` replaces them by their means.
        modelled: see `Group.start_all_reduce_mean`.
    """

    def __init__(self, group: Group, tensors: Sequence[Tensor], modelled: float | None = None) -> None:
        self._tensors = tensors
        self._flat = torch.cat([x.reshape(-1) for x in tensors])
        self._work = group.start_all_reduce_mean(self._flat, modelled)

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.wait()
        for x, mean in zip(self._tensors, self._flat.split([x.numel() for x in self._tensors]), strict=True):
            x.copy_(mean.view(x.shape))
