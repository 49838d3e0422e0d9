"""Finds sparse parameters with one forward and backward pass without an update.

The paper reads the TensorFlow graph, where a sparse gradient has a type of its own. PyTorch has no such graph. Here a
parameter counts as sparse if, in the probes of all learners, only lookups read it and some of its rows got no gradient.
Names play no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from asr_am.distributed.strategy import LossFn
from asr_am.parallax.sparse_weight import INDEX_SELECT

METADATA_OPS = {"size", "dim", "numel", "__len__", "is_floating_point", "is_complex", "data_ptr"}
VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}  # attributes through which values are read


class AccessStats(NamedTuple):
    """Use of a parameter in a probe: share of rows with a gradient, α, and whether lookups read it and nothing else."""

    alpha: float
    lookups_only: bool


class AccessRecorder(TorchFunctionMode):
    """Records the ids of the parameters that are read by lookups, and of those that are read otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up: set[int] = set()
        self.read: set[int] = set()

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        table = lookup_table(function, args, kwargs)
        if table is not None:
            self.looked_up.add(id(table))
        elif reads_values(function):
            self.read.update(id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter))
        return function(*args, **kwargs)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns names and parameters that are not frozen."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def reads_values(function: Any) -> bool:
    """Returns False for functions that read only shapes, dtypes and other metadata."""
    name = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", "") in VIEWS if name == "__get__" else name not in METADATA_OPS


def lookup_table(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the table whose rows a call looks up. None if the call is not a lookup of rows."""
    if function is F.embedding:
        table, selects_rows = args[1], True
    elif function in INDEX_SELECT:
        table = args[0] if args else kwargs["input"]
        selects_rows = (args[1] if len(args) > 1 else kwargs["dim"]) in (0, -table.dim())
    elif function is torch.Tensor.__getitem__:
        table, selects_rows = args[0], isinstance(args[1], Tensor) and args[1].dtype in (torch.int32, torch.int64)
    else:
        return None
    return table if selects_rows else None


def probe(model: nn.Module, loss: LossFn, batch: Any) -> list[AccessStats]:
    """Returns the use of each trainable parameter, by forward and backward passes on one batch.

    Restores buffers, gradients and random state.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    recorder = AccessRecorder()
    with torch.random.fork_rng():
        with recorder:
            loss_sum, _ = loss(model, batch)
        loss_sum.backward()
    stats = []
    for _, parameter in trainable(model):
        lookups_only = id(parameter) in recorder.looked_up and id(parameter) not in recorder.read
        stats.append(AccessStats(nonzero_row_share(parameter), lookups_only))
        parameter.grad = None
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return stats


def nonzero_row_share(parameter: Tensor) -> float:
    """Returns the share of rows with a gradient other than zero."""
    g = parameter.grad
    if g is None or not parameter.dim():
        return float(g is not None)
    if g.is_sparse:
        return len(g.coalesce().indices()[0].unique()) / len(parameter)
    return float((g.reshape(len(g), -1) != 0).any(dim=1).double().mean())
