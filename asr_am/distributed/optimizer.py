"""The update rule on flat parameters: torch's optimizers over one vector, after clipping.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn


class FlatTensors(Protocol):
    """Weights w [N] and gradient g [N]: a model's `FlatParams`, or a shard of them."""

    w: Tensor
    g: Tensor


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of the update rule.

    Attributes:
        kind: sgd, nesterov, adam (with decoupled weight decay), or adagrad (without momentum).
        momentum: momentum, Adam's β1. Adam's β2 is 0.98.
        clip_norm: upper limit of the gradient's norm, 0 for none.
        accumulator: first value of Adagrad's sums.
    """

    kind: Literal["sgd", "nesterov", "adam", "adagrad"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    accumulator: float = 1e-6


def make_rule(options: OptimizerOptions, parameters: list[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
    """Makes torch's optimizer of these parameters. Its learning rate is set before each step."""
    if options.kind == "adam":
        betas = (float(options.momentum), 0.98)
        return torch.optim.AdamW(parameters, lr=0.0, betas=betas, weight_decay=options.weight_decay, fused=fused)
    if options.kind == "adagrad":
        return torch.optim.Adagrad(
            parameters, lr=0.0, weight_decay=options.weight_decay, initial_accumulator_value=options.accumulator
        )
    return torch.optim.SGD(
        parameters, lr=0.0, momentum=options.momentum, nesterov=options.kind == "nesterov",
        weight_decay=options.weight_decay, fused=fused,
    )  # fmt: skip


class Optimizer:
    """Applies W <- W - lr x update(g) to flat parameters.

    Args:
        options: the rule. Raises ValueError for an unknown kind.

    Attributes:
        lr: learning rate, set before each step by the caller.
    """

    def __init__(self, params: FlatTensors, options: OptimizerOptions) -> None:
        if options.kind not in ("sgd", "nesterov", "adam", "adagrad"):
            raise ValueError(f"unknown optimizer {options.kind!r}: sgd, nesterov, adam or adagrad")
        self.params, self.options = params, options
        self._flat = nn.Parameter(params.w)  # shares the storage
        self._flat.grad = params.g

    @cached_property  # not in __init__: the first one of a process imports torch._dynamo, which takes 1.6 s
    def _torch(self) -> torch.optim.Optimizer:
        # On a CPU fused rules round differently where a tensor ends, so a shard differs in its last bits from the same
        # part of all weights. For 40 M weights Adam then takes 26 instead of 193 ms, SGD 18 instead of 33.
        fused = self._flat.is_cuda or (self.options.kind == "adam" and self._flat.device.type == "cpu")
        return make_rule(self.options, [self._flat], fused)

    @property
    def lr(self) -> float:
        return self._torch.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self._torch.param_groups[0]["lr"] = value

    def step(self, w: Tensor | None = None) -> None:
        """Clips `params.g` and applies it to `params.w`, or to other weights `w` [N] in their place."""
        if self.options.clip_norm > 0:
            clip(self.params.g, torch.linalg.vector_norm(self.params.g), self.options.clip_norm)
        self._flat.data = self.params.w if w is None else w
        self._torch.step()

    def reset(self) -> None:
        """Clears momentum and moments, as at the start."""
        self._torch.state.clear()

    def state_dict(self) -> dict[str, Any]:
        return self._torch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._torch.load_state_dict(state)


def clip(g: Tensor, norm: Tensor, limit: float) -> None:
    """Scales a gradient down in place, so that its norm is at most `limit`.

    Args:
        g: the gradient, or a part of it.
        norm: norm of the whole gradient, a scalar.
    """
    g.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
