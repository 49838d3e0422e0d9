"""Applies a torch optimizer to selected rows of a parameter.

This is what torch.optim.SparseAdam and torch.optim.Adagrad do with sparse gradients, for every rule that works element
by element, including momentum. Rows without a gradient keep their weights and their state, so weight decay does not
apply to them either. The step count is that of the parameter.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from asr_am.errors import InputError
from asr_am.parallax.indexed_rows import IndexedRows, gather, scatter
from asr_am.parallax.sparsity_probe import trainable

RULES: tuple[Any, ...] = (
    torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop,
)  # fmt: skip


class OptimizerSpec:
    """Class and options of a single-device program's optimizer, from which optimizers of single parameters are made."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Checks that the optimizer can be applied row by row.

        Raises:
            InputError: The class is not supported, there are several parameter groups, a trainable parameter is
                missing, a parameter is not the model's, or the optimizer has done steps.
        """
        kind, known = type(optimizer), ", ".join(rule.__name__ for rule in RULES)
        if kind not in RULES:
            raise InputError(f"optimizer {kind.__name__}: not supported by parallax; use one of {known}")
        if len(optimizer.param_groups) != 1:
            raise InputError(f"optimizer {kind.__name__}: has several parameter groups; parallax supports one")
        group = optimizer.param_groups[0]
        given = {id(p) for p in group["params"]}
        for name, parameter in trainable(model):
            if id(parameter) not in given:
                raise InputError(f"{name}: the optimizer does not have it; freeze it with requires_grad_(False)")
        if given - {id(p) for p in model.parameters()}:
            raise InputError(f"optimizer {kind.__name__}: has parameters that are not the model's")
        if any(state.get("step", True) for state in optimizer.state.values() if state):
            raise InputError(f"optimizer {kind.__name__}: has done steps, and its state would be lost; make a new one")
        accepted = signature(kind).parameters.keys() - {"params"}  # groups of AdamW have options that it does not take
        options = {key: value for key, value in group.items() if key in accepted}
        if options.get("dampening") or options.get("foreach") or options.get("fused"):
            raise InputError(f"optimizer {kind.__name__}: dampening, foreach and fused do not work on single rows")
        self._kind: Any = kind
        self._options = options

    def lr(self, optimizer: torch.optim.Optimizer) -> float:
        """Returns the present learning rate. Raises InputError if another option has changed."""
        group = optimizer.param_groups[0]
        for key, value in self._options.items():
            if key != "lr" and group[key] != value:
                raise InputError(f"the optimizer's {key} changed from {value} to {group[key]}; only lr may change")
        return float(group["lr"])

    def summary(self) -> str:
        """Returns class and options, without the learning rate, which may change."""
        others = {key: value for key, value in self._options.items() if key != "lr"}
        return f"{self._kind.__name__} {others}"

    def make(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """Makes an optimizer of one parameter. Callers set its learning rate before each step."""
        made: torch.optim.Optimizer = self._kind([parameter], **self._options)
        return made


class RowOptimizer:
    """Updates rows of a parameter w [V, D] in place. `state` has one tensor [V, D] for each key but the step count."""

    def __init__(self, spec: OptimizerSpec, w: Tensor) -> None:
        self._w, self._steps = w, 0
        sample = nn.Parameter(torch.zeros(1))
        sample.grad = torch.zeros(1)
        self._torch = spec.make(sample)
        self._torch.step()  # with a zero gradient, to see the initial state
        self.state = {
            key: torch.full_like(w, float(value)) for key, value in self._torch.state[sample].items()
            if key != "step" and value is not None
        }  # fmt: skip

    def step(self, rows: IndexedRows, lr: float) -> None:
        """Applies the gradient `rows` with learning rate `lr`."""
        self._steps += 1
        if not len(rows):
            return
        index = slice(None) if len(rows) == len(self._w) else rows.numbers
        part = nn.Parameter(gather(self._w, index))
        part.grad = rows.values
        part_state: dict[str, Tensor] = {key: gather(values, index) for key, values in self.state.items()}
        self._torch.param_groups[0].update(params=[part], lr=lr)
        self._torch.state.clear()
        self._torch.state[part] = {**part_state, "step": torch.tensor(float(self._steps - 1))}
        self._torch.step()
        if isinstance(index, Tensor):  # a slice is a view, already updated
            scatter(part.detach(), self._w, index)
            for key, values in self.state.items():
                scatter(part_state[key], values, index)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, **self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        for key, values in self.state.items():
            values.copy_(state[key])
