"""What stands in a model where a sparse parameter was: it pulls rows when they are looked up, and nothing else.

PyTorch runs a program as it is defined, so there is no graph to transform as in the paper. In its place stand: the
dry step (`dry`), which sees which parameters are read by lookups only; this object, which the model finds in the
parameter's place, and through which lookups become pulls before the rows are needed, and pushes of their gradients
after the backward pass; and the options of `config.Config` for the operations that may move between worker and server.

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
"""Pulls the rows of these numbers [K], distinct and ascending, as they are in the present step [K, D]."""

INDEX_SELECT = (torch.index_select, torch.Tensor.index_select)


class SparseWeight:
    """A sparse parameter [V, *T] as the model sees it.

    F.embedding, torch.index_select and weight[numbers] look rows up; F.linear reads all of them. InputError for other
    access.
    """

    def __init__(self, name: str, like: Tensor, fetch: Fetch) -> None:
        self.name, self.shape, self.dtype, self.device = name, like.shape, like.dtype, like.device
        self._fetch = fetch
        self._held = self._nothing()  # rows that were pulled in this step
        self._used: list[tuple[Tensor, Tensor]] = []  # numbers and values, whose gradients count

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
            args = [x._all() if isinstance(x, cls) else x for x in args]
            return F.linear(*args, **{k: x._all() if isinstance(x, cls) else x for k, x in kwargs.items()})
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        cls._refuse(found.name, getattr(function, "__name__", str(function)))

    def __getitem__(self, numbers: Any) -> Tensor:
        if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int32, torch.int64):
            self._refuse(self.name, "indexing by anything but a tensor of row numbers")
        place, values = self._rows(numbers)
        return values[place]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        if dim not in (0, -len(self.shape)):
            self._refuse(self.name, f"index_select along dimension {dim}")
        place, values = self._rows(index)
        return values.index_select(0, place)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(self.name, name)

    def gradient(self) -> IndexedRows:
        """Of the rows that were looked up since the last call, duplicates added up; forgets them and all rows held."""
        used = [(numbers, values.grad) for numbers, values in self._used]
        self.forget()
        width = self.shape[1:].numel()
        parts = [IndexedRows(numbers, grad.reshape(len(numbers), width)) for numbers, grad in used if grad is not None]
        return merge(parts, len(self)) if parts else self._nothing()

    def forget(self) -> None:
        self._held, self._used = self._nothing(), []

    def _embedding(
        self, numbers: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq:
            self._refuse(self.name, "an embedding with max_norm or scale_grad_by_freq")
        place, values = self._rows(numbers)
        if padding_idx is not None and len(at := place[numbers == padding_idx % len(self)]):
            return F.embedding(place, values, int(at[0]))
        found = values.index_select(0, place.view(-1))  # as embedding, with a gradient that takes less time
        return found.view(*place.shape, *values.shape[1:])

    def _all(self) -> Tensor:
        return self._rows(torch.arange(len(self), device=self.device))[1]

    def _rows(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Where each number [*] is in a tensor of rows [K, *T], and that."""
        needed, place = torch.unique(numbers.detach().long(), return_inverse=True)
        if len(needed) and not 0 <= int(needed[0]) <= int(needed[-1]) < len(self):
            worst = int(needed[0] if needed[0] < 0 else needed[-1])
            raise InputError(f"{self.name}: row {worst} was looked up; there are {len(self)}, from 0")
        values = self._pull(needed).view(-1, *self.shape[1:])
        if torch.is_grad_enabled():
            values.requires_grad_()
            self._used.append((needed, values))
        return place, values

    def _pull(self, needed: Tensor) -> Tensor:
        """Rows [K, D] of these numbers [K]; fetches what is not held yet."""
        with torch.no_grad():
            held = self._held
            if not len(held):
                held = self._held = IndexedRows(needed, self._fetch(needed))
                return held.values
            missing = needed[~torch.isin(needed, held.numbers, assume_unique=True)]
            if len(missing):
                numbers, order = torch.cat([held.numbers, missing]).sort()
                held = self._held = IndexedRows(numbers, gather(torch.cat([held.values, self._fetch(missing)]), order))
            return gather(held.values, torch.searchsorted(held.numbers, needed))

    def _nothing(self) -> IndexedRows:
        numbers = torch.zeros(0, dtype=torch.int64, device=self.device)
        return IndexedRows(numbers, torch.zeros(0, self.shape[1:].numel(), dtype=self.dtype, device=self.device))

    @staticmethod
    def _refuse(name: str, what: str) -> NoReturn:
        raise InputError(
            f"{name}: {what}: parallax keeps this parameter on servers, as its gradient was sparse in the dry step, "
            "and rows can only be looked up (embedding, index_select, weight[numbers]), or all be read by F.linear; "
            "name it in Config.dense to keep it whole"
        )
