"""A sparse parameter that every learner has, where that is cheaper than servers: by all-gather, or by all-reduce.

Either way the same rows are touched, and updated by the same rule, as on servers.
Shapes: V rows of D elements, N learners.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.optimizer import clip
from asr_am.distributed.team import Team
from asr_am.parallax.indexed_rows import IndexedRows, accumulate, gather
from asr_am.parallax.placement import Method
from asr_am.parallax.row_messages import Table
from asr_am.parallax.row_optimizer import OptimizerSpec, RowOptimizer


class ReplicatedTable:
    """w [V, D]. merged: the gradient of all learners, after `exchange`. average: a moving average of w.

    counts: bytes of values that were "sent" and "received", as table 3 counts them for the path.
    """

    def __init__(
        self, team: Team, table: Table, path: Method, w: Tensor, rule: OptimizerSpec, counts: Counter[str], decay: float
    ) -> None:
        self._team, self._table, self._path, self._counts, self._decay = team, table, path, counts, decay
        self.w, self.optimizer = w, RowOptimizer(rule, w)
        self.average = w.clone() if decay else None
        self.merged = IndexedRows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, table.width))

    def fetch(self, numbers: Tensor) -> Tensor:
        return gather(self.w, numbers)

    def exchange(self, own: IndexedRows) -> None:
        """Of all learners' rows, the sum."""
        if self._team.size == 1:
            self.merged = own
        else:
            self.merged = self._gather(own) if self._path == "all-gather" else self._reduce(own)

    def clip(self, norm: Tensor, limit: float) -> None:
        """See `optimizer.clip`; what was gathered may be what others have, too."""
        values = self.merged.values.clone()
        clip(values, norm, limit)
        self.merged = IndexedRows(self.merged.numbers, values)

    def update(self, rate: float) -> None:
        self.optimizer.step(self.merged, rate)
        if self.average is not None:
            self.average.lerp_(self.w, 1 - self._decay)

    def _gather(self, own: IndexedRows) -> IndexedRows:
        team, width = self._team, self._table.width
        length = torch.tensor([len(own)], dtype=torch.int32, device=own.values.device)
        lengths = torch.cat(team.start_all_gather(length).wait()).tolist()
        numbers_work = team.start_all_gather(own.numbers.int(), lengths)
        values_work = team.start_all_gather(own.values.reshape(-1), [n * width for n in lengths])
        numbers, values = numbers_work.wait(), values_work.wait()
        self._counts["sent"] += (team.size - 1) * own.values.nbytes
        self._counts["received"] += sum(part.nbytes for part in values) - own.values.nbytes
        parts = [IndexedRows(n.long(), v.view(-1, width)) for n, v in zip(numbers, values, strict=True)]
        rows, price = accumulate(parts, self._table.rows, each=False)
        team.simulate_cost("update", price)  # on the device, unlike a server's
        return rows

    def _reduce(self, own: IndexedRows) -> IndexedRows:
        """A column more tells which rows have a gradient, though it be zero."""
        whole = own.values.new_zeros(self._table.rows, self._table.width + 1)
        whole[own.numbers, :-1] = own.values
        whole[own.numbers, -1] = 1.0
        flat = whole.view(-1)
        self._team.start_all_reduce_mean(flat).wait()
        self._counts["sent"] += round(2 * (self._team.size - 1) / self._team.size * flat.nbytes)
        touched = whole[:, -1].nonzero()[:, 0]
        return IndexedRows(touched, whole[touched, :-1] * self._team.size)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "optimizer": self.optimizer.state_dict(), "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w.copy_(state["w"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.copy_(state["average"])
