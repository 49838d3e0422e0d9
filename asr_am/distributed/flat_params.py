"""A model's parameters and gradients as two one-dimensional tensors.

Every algorithm here adds, averages or sends whole weight vectors; on one flat buffer each of these is one call.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

BucketHook = Callable[[int, int], None]
"""Told in the backward pass that elements begin..end of the gradient are ready. It starts transfers, never waits."""


class FlatParams:
    """`w` [N] and `g` [N] hold the values and the gradients of `model`; its parameters become views of them.

    The parameters must share a dtype and a device, and the model must be on its device already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if len({(p.dtype, p.device) for p in self._parameters}) != 1:
            raise ValueError("a model's parameters must share one dtype and one device")
        self.w = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self.g = torch.zeros_like(self.w)
        self.ends = torch.tensor([p.numel() for p in self._parameters]).cumsum(0).tolist()
        begins = [0, *self.ends[:-1]]
        for parameter, begin, end in zip(self._parameters, begins, self.ends, strict=True):
            parameter.data = self.w[begin:end].view_as(parameter)
        self.rebind_grads()

    def rebind_grads(self) -> None:
        """Make the parameters' gradients views of `g`, again where they were set to something else."""
        for parameter, end in zip(self._parameters, self.ends, strict=True):
            parameter.grad = self.g[end - parameter.numel() : end].view_as(parameter)

    def __len__(self) -> int:
        return len(self.w)

    def check(self) -> None:
        """RuntimeError where a parameter or its gradient was re-pointed away from `w` and `g`.

        `p.data = ...`, `zero_grad(set_to_none=True)`, `model.to(...)` and cuDNN's `flatten_parameters` all do that.
        """
        item = self.w.element_size()
        for parameter, end in zip(self._parameters, self.ends, strict=True):
            offset = (end - parameter.numel()) * item
            if parameter.data_ptr() != self.w.data_ptr() + offset:
                raise RuntimeError("a parameter no longer is a view of the flat weights")
            if parameter.grad is None or parameter.grad.data_ptr() != self.g.data_ptr() + offset:
                raise RuntimeError("a gradient no longer is a view of the flat gradients")

    @contextmanager
    def notify_buckets(self, on_bucket: BucketHook | None, bucket_bytes: int = 4 << 20) -> Iterator[None]:
        """Call `on_bucket(begin, end)` in the backward pass inside, each time all gradients of a bucket are complete.

        Buckets are whole parameters of at least `bucket_bytes` together. They come from the last element to the first,
        each once, whatever order the backward pass takes and whatever it leaves out: a collective must be started in
        the same order by all.
        """
        if on_bucket is None:
            yield
            return
        buckets = self._buckets(bucket_bytes)
        missing = [len(members) for members, _, _ in buckets]
        told = 0

        def ready(bucket: int) -> None:
            nonlocal told
            missing[bucket] -= 1
            while told < len(buckets) and missing[told] == 0:
                _, begin, end = buckets[told]
                told += 1
                on_bucket(begin, end)

        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, k=k: ready(k))
            for k, (members, _, _) in enumerate(buckets)
            for parameter in members
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for _, begin, end in buckets[told:]:
            on_bucket(begin, end)

    def notify_all_buckets(self, on_bucket: BucketHook | None, bucket_bytes: int = 4 << 20) -> None:
        """What a backward pass inside `announce` calls, in its order: for a learner without data, whose `g` is zero."""
        if on_bucket is not None:
            for _, begin, end in self._buckets(bucket_bytes):
                on_bucket(begin, end)

    def _buckets(self, bucket_bytes: int) -> list[tuple[list[nn.Parameter], int, int]]:
        """Parameters grouped from the last to the first, as their gradients become ready: (members, begin, end)."""
        buckets: list[tuple[list[nn.Parameter], int, int]] = []
        members: list[nn.Parameter] = []
        end = len(self.w)
        for parameter, stop in zip(reversed(self._parameters), reversed(self.ends), strict=True):
            members.append(parameter)
            begin = stop - parameter.numel()
            if (end - begin) * self.w.element_size() >= bucket_bytes or begin == 0:
                buckets.append((members, begin, end))
                members, end = [], begin
        return buckets
