"""The update rule on the flat parameters: torch's optimizers over one vector, after clipping.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn


class FlatTensors(Protocol):
    """Weights w and gradient g, both [N]: a model's `FlatParams`, or a block of them."""

    w: Tensor
    g: Tensor


@dataclass(frozen=True)
class OptimizerOptions:
    """kind: sgd, nesterov or adam (decoupled weight decay). clip_norm: upper limit of the gradient's norm, 0 = none."""

    kind: Literal["sgd", "nesterov", "adam"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float = 0.0


class Optimizer:
    """W <- W - lr x update(g) on `params`. `lr` is set before each step by whoever knows the schedule."""

    def __init__(self, params: FlatTensors, options: OptimizerOptions) -> None:
        self.params, self.options = params, options
        self._flat = nn.Parameter(params.w)  # shares the storage
        self._flat.grad = params.g
        if options.kind == "adam":
            self._torch: torch.optim.Optimizer = torch.optim.AdamW(
                [self._flat], lr=0.0, betas=(float(options.momentum), 0.98), weight_decay=options.weight_decay
            )
        elif options.kind in ("sgd", "nesterov"):
            self._torch = torch.optim.SGD(
                [self._flat], lr=0.0, momentum=options.momentum, nesterov=options.kind == "nesterov",
                weight_decay=options.weight_decay,
            )  # fmt: skip
        else:
            raise ValueError(f"unknown optimizer {options.kind!r}: sgd, nesterov or adam")

    @property
    def lr(self) -> float:
        return self._torch.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self._torch.param_groups[0]["lr"] = value

    def step(self, w: Tensor | None = None) -> None:
        """Clip `params.g`, and apply it to `params.w`, or to other weights [N] in their place."""
        if self.options.clip_norm > 0:
            clip(self.params.g, torch.linalg.vector_norm(self.params.g), self.options.clip_norm)
        self._flat.data = self.params.w if w is None else w
        self._torch.step()

    def reset(self) -> None:
        """Forget momentum, as at the start."""
        self._torch.state.clear()

    def state_dict(self) -> dict[str, Any]:
        return self._torch.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._torch.load_state_dict(state)


def clip(g: Tensor, norm: Tensor, limit: float) -> None:
    """Scale `g` down so that a gradient of this `norm`, which it is or is a part of, has at most `limit`."""
    g.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
