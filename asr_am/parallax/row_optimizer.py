"""A torch optimizer's rule, applied to some rows of a parameter only.

What torch.optim.SparseAdam and torch.optim.Adagrad do with sparse gradients, for rules that work element by element,
momentum included: rows that no gradient has touched keep their weights and their state (no decay either). The step
count is the parameter's.
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
    """The class and options of the optimizer of a single-device program.

    InputError where it is none of RULES, has several groups of parameters, lacks one that is not frozen, has some that
    are not the model's, or has done steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        kind, known = type(optimizer), ", ".join(rule.__name__ for rule in RULES)
        if kind not in RULES:
            raise InputError(f"optimizer {kind.__name__}: parallax knows the rules of {known}")
        if len(optimizer.param_groups) != 1:
            raise InputError(f"optimizer {kind.__name__}: has several groups of parameters; parallax needs one")
        group = optimizer.param_groups[0]
        given = {id(p) for p in group["params"]}
        for name, parameter in trainable(model):
            if id(parameter) not in given:
                raise InputError(f"{name}: the optimizer does not have it; freeze it with requires_grad_(False)")
        if given - {id(p) for p in model.parameters()}:
            raise InputError(f"optimizer {kind.__name__}: has parameters that are not the model's")
        if any(state.get("step", True) for state in optimizer.state.values() if state):
            raise InputError(f"optimizer {kind.__name__}: has done steps, and what it keeps of them would be lost")
        accepted = signature(kind).parameters.keys() - {"params"}  # groups of AdamW have options that it does not take
        options = {key: value for key, value in group.items() if key in accepted}
        if options.get("dampening") or options.get("foreach") or options.get("fused"):
            raise InputError(f"optimizer {kind.__name__}: dampening, foreach and fused are not for single rows")
        self._kind: Any = kind
        self._options = options

    def rate(self, optimizer: torch.optim.Optimizer) -> float:
        """Its learning rate now; InputError where a schedule has changed another option."""
        group = optimizer.param_groups[0]
        for key, value in self._options.items():
            if key != "lr" and group[key] != value:
                raise InputError(f"the optimizer's {key} went from {value} to {group[key]}; only lr may change")
        return float(group["lr"])

    def described(self) -> str:
        """Without the learning rate, which may change."""
        others = {key: value for key, value in self._options.items() if key != "lr"}
        return f"{self._kind.__name__} {others}"

    def make(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """An optimizer of one parameter; its learning rate is set before each step."""
        made: torch.optim.Optimizer = self._kind([parameter], **self._options)
        return made


class RowOptimizer:
    """Updates rows of w [V, D] in place. state: a tensor [V, D] for each that the rule has, but the step count."""

    def __init__(self, rule: OptimizerSpec, w: Tensor) -> None:
        self._w, self._steps = w, 0
        sample = nn.Parameter(torch.zeros(1))
        sample.grad = torch.zeros(1)
        self._torch = rule.make(sample)
        self._torch.step()  # of zero: fills the state with what it begins with
        self.state = {
            key: torch.full_like(w, float(value)) for key, value in self._torch.state[sample].items()
            if key != "step" and value is not None
        }  # fmt: skip

    def step(self, rows: IndexedRows, rate: float) -> None:
        """Apply the gradient `rows`. rate: learning rate."""
        self._steps += 1
        if not len(rows):
            return
        index = slice(None) if len(rows) == len(self._w) else rows.numbers
        part = nn.Parameter(gather(self._w, index))
        part.grad = rows.values
        own: dict[str, Tensor] = {key: gather(values, index) for key, values in self.state.items()}
        self._torch.param_groups[0].update(params=[part], lr=rate)
        self._torch.state.clear()
        self._torch.state[part] = {**own, "step": torch.tensor(float(self._steps - 1))}
        self._torch.step()
        if isinstance(index, Tensor):
            scatter(part.detach(), self._w, index)
            for key, values in self.state.items():
                scatter(own[key], values, index)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, **self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        for key, values in self.state.items():
            values.copy_(state[key])
