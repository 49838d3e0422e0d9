"""A sparse parameter that is replicated on every learner, with gradients exchanged by all-gather or all-reduce.

Both update the same rows by the same rule as servers do.

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
from asr_am.parallax.row_optimizer import OptimizerSpec, RowOptimizer


class ReplicatedTable:
    """One learner's replica of a sparse parameter.

    Attributes:
        w: The weights [V, D].
        average: Moving average of `w`. None without a decay.
        merged: Sum of the gradients of all learners, after `exchange`.
    """

    def __init__(
        self, team: Team, method: Method, w: Tensor, spec: OptimizerSpec, counts: Counter[str], decay: float
    ) -> None:
        """Keeps `w`, which it updates in place. Counts bytes "sent" and "received" as Table 3 does for the method."""
        self._team, self._method, self._counts, self._decay = team, method, counts, decay
        self.w, self.optimizer = w, RowOptimizer(spec, w)
        self.average = w.clone() if decay else None
        self.merged = IndexedRows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, w.shape[1]))

    def fetch(self, numbers: Tensor) -> Tensor:
        """Returns the rows [K, D] with these numbers [K]."""
        return gather(self.w, numbers)

    def exchange(self, rows: IndexedRows) -> None:
        """Sums the gradient rows of all learners into `merged`."""
        if self._team.size == 1:
            self.merged = rows
        else:
            self.merged = self._gather(rows) if self._method == "all-gather" else self._reduce(rows)

    def clip(self, norm: Tensor, limit: float) -> None:
        """Applies `optimizer.clip` to a copy of `merged`, as gathered rows may share memory with other learners."""
        values = self.merged.values.clone()
        clip(values, norm, limit)
        self.merged = IndexedRows(self.merged.numbers, values)

    def update(self, lr: float) -> None:
        """Applies `merged` with learning rate `lr`."""
        self.optimizer.step(self.merged, lr)
        if self.average is not None:
            self.average.lerp_(self.w, 1 - self._decay)

    def _gather(self, rows: IndexedRows) -> IndexedRows:
        team, width = self._team, self.w.shape[1]
        length = torch.tensor([len(rows)], dtype=torch.int32, device=rows.values.device)
        lengths = torch.cat(team.start_all_gather(length).wait()).tolist()
        numbers_work = team.start_all_gather(rows.numbers.int(), lengths)
        values_work = team.start_all_gather(rows.values.reshape(-1), [n * width for n in lengths])
        numbers, values = numbers_work.wait(), values_work.wait()
        self._counts["sent"] += (team.size - 1) * rows.values.nbytes
        self._counts["received"] += sum(part.nbytes for part in values) - rows.values.nbytes
        parts = [IndexedRows(n.long(), v.view(-1, width)) for n, v in zip(numbers, values, strict=True)]
        return accumulate(parts, len(self.w), False, team, "update")  # on the device, servers merge on their host

    def _reduce(self, rows: IndexedRows) -> IndexedRows:
        """Averages the full table. An extra column marks touched rows, whose gradient may be zero."""
        full = rows.values.new_zeros(len(self.w), self.w.shape[1] + 1)
        full[rows.numbers, :-1] = rows.values
        full[rows.numbers, -1] = 1.0
        flat = full.view(-1)
        self._team.start_all_reduce_mean(flat).wait()
        self._counts["sent"] += round(2 * (self._team.size - 1) / self._team.size * flat.nbytes)
        touched = full[:, -1].nonzero()[:, 0]
        return IndexedRows(touched, full[touched, :-1] * self._team.size)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "optimizer": self.optimizer.state_dict(), "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w.copy_(state["w"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.copy_(state["average"])
