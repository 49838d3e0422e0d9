"""A step without an update, to see which parameters are sparse: whose rows are looked up, and how few have gradients.

It stands for the paper's look at the graph (TensorFlow knows a sparse gradient by its type). A parameter is sparse if,
in all learners' dry steps, some of its rows got no gradient, and nothing but lookups read it. Names play no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from asr_am.parallax.sparse_weight import INDEX_SELECT

LossFn = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""Of a model and a batch: the loss summed over the batch, and how many examples (words, frames) it is summed over."""

METADATA_OPS = {"size", "dim", "numel", "__len__", "is_floating_point", "is_complex", "data_ptr"}
VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}  # attributes through which values are read


@dataclass(frozen=True)
class AccessStats:
    """alpha: share of rows with a gradient. lookups: whether lookups read the parameter, and nothing else."""

    alpha: float
    lookups: bool


class AccessRecorder(TorchFunctionMode):
    """Notes which parameters are read by lookups, and which in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up: set[int] = set()
        self.read: set[int] = set()

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        table = looked_up(function, args, kwargs)
        if table is not None:
            self.looked_up.add(id(table))
        elif reads_values(function):
            self.read.update(id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter))
        return function(*args, **kwargs)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are not frozen."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def reads_values(function: Any) -> bool:
    """Not: shapes, types and the like."""
    name = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", "") in VIEWS if name == "__get__" else name not in METADATA_OPS


def looked_up(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The table whose rows a call looks up."""
    if function is F.embedding:
        table, rows = args[1], True
    elif function in INDEX_SELECT:
        table = args[0] if args else kwargs["input"]
        rows = (args[1] if len(args) > 1 else kwargs["dim"]) in (0, -table.dim())
    elif function is torch.Tensor.__getitem__:
        table, rows = args[0], isinstance(args[1], Tensor) and args[1].dtype in (torch.int32, torch.int64)
    else:
        return None
    return table if rows else None


def probe(model: nn.Module, loss: LossFn, batch: Any) -> list[AccessStats]:
    """What one batch shows of each parameter that is not frozen, in their order; leaves the model as it was."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    readers = AccessRecorder()
    with torch.random.fork_rng():
        with readers:
            loss_sum, _ = loss(model, batch)
        loss_sum.backward()
    seen = []
    for _, parameter in trainable(model):
        lookups = id(parameter) in readers.looked_up and id(parameter) not in readers.read
        seen.append(AccessStats(nonzero_row_share(parameter), lookups))
        parameter.grad = None
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return seen


def nonzero_row_share(parameter: Tensor) -> float:
    """The share of its rows that have a gradient other than zero."""
    g = parameter.grad
    if g is None or not parameter.dim():
        return float(g is not None)
    if g.is_sparse:
        return len(g.coalesce().indices()[0].unique()) / len(parameter)
    return float((g.reshape(len(g), -1) != 0).any(dim=1).double().mean())
