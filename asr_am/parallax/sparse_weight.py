"""Stand-in for a sparse parameter in the model: pulls rows when they are looked up and allows no other access.

The paper transforms a TensorFlow graph. PyTorch runs a program as it is defined, so there is no graph to transform.
Three parts replace it. The probe (`sparsity_probe`) finds the parameters that only lookups read. `SparseWeight` takes
the place of such a parameter in the model. It turns lookups into pulls before the rows are needed, and collects their
gradients for a push after the backward pass. `config.Config` selects which operations run on workers or on servers.

Shapes: V rows of the parameter, *T its other dimensions (D elements together), K rows that a lookup needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from asr_am.errors import InputError
from asr_am.parallax.indexed_rows import IndexedRows, gather, merge

Fetch = Callable[[Tensor], Tensor]
"""Maps row numbers [K], distinct and ascending, to the rows [K, D] of the present step."""

INDEX_SELECT = (torch.index_select, torch.Tensor.index_select)


class SparseWeight:
    """Sparse parameter [V, *T] as the model sees it.

    F.embedding, torch.index_select and weight[numbers] look rows up. F.linear reads all rows. Any other access raises
    InputError.
    """

    def __init__(self, name: str, like: Tensor, fetch: Fetch) -> None:
        """Imitates the parameter `like`, called `name` in the model, with rows from `fetch`."""
        self.name, self.shape, self.dtype, self.device = name, like.shape, like.dtype, like.device
        self._fetch = fetch
        self._cached = self._empty()  # rows pulled in this step
        self._lookups: list[tuple[Tensor, Tensor]] = []  # row numbers and values that gradients are needed for

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is F.embedding and isinstance(args[1], cls):
            return args[1]._embedding(args[0], *args[2:], **kwargs)
        if function in INDEX_SELECT and isinstance(table := args[0] if args else kwargs.pop("input"), cls):
            return table.index_select(*args[1:], **kwargs)
        if function is F.linear:
            args = [x._all_rows() if isinstance(x, cls) else x for x in args]
            return F.linear(*args, **{k: x._all_rows() if isinstance(x, cls) else x for k, x in kwargs.items()})
        weight = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        cls._refuse(weight.name, getattr(function, "__name__", str(function)))

    def __getitem__(self, numbers: Any) -> Tensor:
        if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int32, torch.int64):
            self._refuse(self.name, "indexing by anything but a tensor of row numbers")
        positions, values = self._rows(numbers)
        return values[positions]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        if dim not in (0, -len(self.shape)):
            self._refuse(self.name, f"index_select along dimension {dim}")
        positions, values = self._rows(index)
        return values.index_select(0, positions)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(self.name, name)

    def gradient(self) -> IndexedRows:
        """Returns the summed gradient of the rows looked up since the last call. Clears lookups and cached rows."""
        lookups = [(numbers, values.grad) for numbers, values in self._lookups]
        self.clear()
        width = self.shape[1:].numel()
        parts = [IndexedRows(n, grad.reshape(len(n), width)) for n, grad in lookups if grad is not None]
        return merge(parts, len(self)) if parts else self._empty()

    def clear(self) -> None:
        """Drops cached rows and recorded lookups."""
        self._cached, self._lookups = self._empty(), []

    def _embedding(
        self, numbers: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq:
            self._refuse(self.name, "an embedding with max_norm or scale_grad_by_freq")
        positions, values = self._rows(numbers)
        if padding_idx is not None and len(at := positions[numbers == padding_idx % len(self)]):
            return F.embedding(positions, values, int(at[0]))
        rows = values.index_select(0, positions.view(-1))  # equals F.embedding, with a faster backward pass
        return rows.view(*positions.shape, *values.shape[1:])

    def _all_rows(self) -> Tensor:
        return self._rows(torch.arange(len(self), device=self.device))[1]

    def _rows(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the position of each number [*] in a tensor of rows, and these rows [K, *T]."""
        needed, positions = torch.unique(numbers.detach().long(), return_inverse=True)
        if len(needed) and not 0 <= int(needed[0]) <= int(needed[-1]) < len(self):
            worst = int(needed[0] if needed[0] < 0 else needed[-1])
            raise InputError(f"{self.name}: row {worst} was looked up, but rows are 0 to {len(self) - 1}")
        values = self._pull(needed).view(-1, *self.shape[1:])
        if torch.is_grad_enabled():
            values.requires_grad_()
            self._lookups.append((needed, values))
        return positions, values

    def _pull(self, needed: Tensor) -> Tensor:
        """Returns the rows [K, D] with these numbers [K]. Fetches those that are not cached."""
        with torch.no_grad():
            cached = self._cached
            if not len(cached):
                cached = self._cached = IndexedRows(needed, self._fetch(needed))
                return cached.values
            missing = needed[~torch.isin(needed, cached.numbers, assume_unique=True)]
            if len(missing):
                numbers, order = torch.cat([cached.numbers, missing]).sort()
                values = torch.cat([cached.values, self._fetch(missing)])
                cached = self._cached = IndexedRows(numbers, gather(values, order))
            return gather(cached.values, torch.searchsorted(cached.numbers, needed))

    def _empty(self) -> IndexedRows:
        numbers = torch.zeros(0, dtype=torch.int64, device=self.device)
        return IndexedRows(numbers, torch.zeros(0, self.shape[1:].numel(), dtype=self.dtype, device=self.device))

    @staticmethod
    def _refuse(name: str, access: str) -> NoReturn:
        raise InputError(
            f"{name}: {access}: parallax keeps this parameter on servers, because its gradient was sparse in the "
            "first step; its rows can be looked up (embedding, index_select, weight[numbers]) or all be read by "
            "F.linear; for other access, name it in Config.dense"
        )
