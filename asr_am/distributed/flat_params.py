"""Flat parameters: a model's parameters and gradients as two one-dimensional tensors.

Every algorithm adds, averages or sends complete weight vectors. On one flat buffer each of these is one call.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from asr_am.errors import InputError

BucketHook = Callable[[int, int], None]
"""Called in the backward pass as f(begin, end) when these elements of the gradient are ready. It may start transfers
and must not wait."""


class FlatParams:
    """Flat weights `w` [N] and gradient `g` [N] of a model, whose parameters become views of them.

    Args:
        model: on its device already. Its trainable parameters must share one dtype.

    Attributes:
        w: weights [N].
        g: gradient [N].
        ends: end of each parameter in `w`, in order of registration.
        bucket_bytes: least size of a bucket. NCCL needs larger ones than gloo for its speed.
        shapes: shape of each parameter.

    Raises:
        ValueError: the parameters differ in dtype or device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if len({(p.dtype, p.device) for p in self._parameters}) != 1:
            raise ValueError("a model's parameters must share one dtype and one device")
        self.w = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self.g = torch.zeros_like(self.w)
        self.bucket_bytes = (4 if self.w.device.type == "cpu" else 25) << 20
        self.shapes = [p.shape for p in self._parameters]
        self.ends = torch.tensor([p.numel() for p in self._parameters]).cumsum(0).tolist()
        begins = [0, *self.ends[:-1]]
        for parameter, begin, end in zip(self._parameters, begins, self.ends, strict=True):
            parameter.data = self.w[begin:end].view_as(parameter)
        self._last_buckets: tuple[int, list[tuple[list[nn.Parameter], int, int]]] | None = None
        self.rebind_grads()

    def rebind_grads(self) -> None:
        """Makes the parameters' `grad` views of `g` again, after something replaced them."""
        for parameter, end in zip(self._parameters, self.ends, strict=True):
            parameter.grad = self.g[end - parameter.numel() : end].view_as(parameter)

    def __len__(self) -> int:
        return len(self.w)

    def check(self) -> None:
        """Checks that all parameters and gradients are still views of `w` and `g`.

        `p.data = ...`, `zero_grad(set_to_none=True)`, `model.to(...)` and cuDNN's `flatten_parameters` all break that.

        Raises:
            RuntimeError: one is not.
        """
        item = self.w.element_size()
        for parameter, end in zip(self._parameters, self.ends, strict=True):
            offset = (end - parameter.numel()) * item
            if parameter.data_ptr() != self.w.data_ptr() + offset:
                raise RuntimeError("a parameter is no longer a view of the flat weights")
            if parameter.grad is None or parameter.grad.data_ptr() != self.g.data_ptr() + offset:
                raise RuntimeError("a gradient is no longer a view of the flat gradients")

    @contextmanager
    def notify_buckets(self, on_bucket: BucketHook | None, bucket_bytes: int | None = None) -> Iterator[None]:
        """Calls `on_bucket` in the backward pass inside the context when all gradients of a bucket are complete.

        Buckets are reported from the last element to the first, each once, whatever order the backward pass takes and
        whichever parameters it leaves out. All learners must start their collectives in the same order.

        Args:
            on_bucket: called as on_bucket(begin, end), None to do nothing.
            bucket_bytes: least size of a bucket, which consists of complete parameters. None: the attribute's.

        Raises:
            InputError: in the backward pass, if it adds to a gradient that seemed complete.
        """
        if on_bucket is None:
            yield
            return
        buckets = self._buckets(bucket_bytes)
        missing = [set(map(id, members)) for members, _, _ in buckets]
        next_bucket = 0

        def ready(parameter: nn.Parameter, bucket: int) -> None:
            nonlocal next_bucket
            if id(parameter) not in missing[bucket]:
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} gets its gradient in several parts, as under "
                    "torch.utils.checkpoint with use_reentrant=True; set use_reentrant=False, or strategy.overlap=false"
                )
            missing[bucket].remove(id(parameter))
            while next_bucket < len(buckets) and not missing[next_bucket]:
                _, begin, end = buckets[next_bucket]
                next_bucket += 1
                on_bucket(begin, end)

        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda parameter, k=k: ready(parameter, k))
            for k, (members, _, _) in enumerate(buckets)
            for parameter in members
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for _, begin, end in buckets[next_bucket:]:
            on_bucket(begin, end)

    def notify_all_buckets(self, on_bucket: BucketHook | None, bucket_bytes: int | None = None) -> None:
        """Calls `on_bucket` as `notify_buckets` would, for a learner without data, whose `g` is zero."""
        if on_bucket is not None:
            for _, begin, end in self._buckets(bucket_bytes):
                on_bucket(begin, end)

    def _buckets(self, bucket_bytes: int | None) -> list[tuple[list[nn.Parameter], int, int]]:
        """Returns (parameters, begin, end) of each bucket, from the last to the first: as gradients become ready."""
        least = self.bucket_bytes if bucket_bytes is None else bucket_bytes
        if self._last_buckets is not None and self._last_buckets[0] == least:
            return self._last_buckets[1]
        buckets: list[tuple[list[nn.Parameter], int, int]] = []
        members: list[nn.Parameter] = []
        end = len(self.w)
        for parameter, stop in zip(reversed(self._parameters), reversed(self.ends), strict=True):
            members.append(parameter)
            begin = stop - parameter.numel()
            if (end - begin) * self.w.element_size() >= least or begin == 0:
                buckets.append((members, begin, end))
                members, end = [], begin
        self._last_buckets = least, buckets
        return buckets
