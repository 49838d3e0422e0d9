"""A server of sparse parameters: its rows, their optimizer, and the two tasks that answer pulls and take pushes.

In step t it answers pulls with the rows of version t; when the gradients of all have come, it adds them in the order
of ranks, limits them together with all others, updates every row that was touched once, and is at version t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.optimizer import clip
from asr_am.distributed.team import LearnerLost
from asr_am.parallax.config import Config
from asr_am.parallax.indexed_rows import IndexedRows, accumulate, gather, pack, rows_of, unpack_head, unpack_numbers
from asr_am.parallax.row_messages import Messenger, Table, read_double, read_rows, write_double, write_rows
from asr_am.parallax.row_optimizer import OptimizerSpec, RowOptimizer


class RowServer:
    """Server `ranks.index(rank)`. sources: the ranks that push. w: its rows [V/S, D] of each table, average: their
    moving averages. t: updates they have had.
    """

    def __init__(
        self, messenger: Messenger, tables: Sequence[Table], ranks: Sequence[int], sources: Sequence[int], rule: OptimizerSpec,
        config: Config, weights: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """weights: [V, D] of each table, of which this takes its rows."""
        self._messenger, self._team, self._tables, self._config = messenger, messenger.team, tables, config
        self._ranks, self._sources = ranks, sources
        index, count = ranks.index(messenger.team.rank), len(ranks)
        self.w = [w[index::count].clone() for w in weights]
        self.limits = [rows_of(index, count, table.rows) for table in tables]
        self._optimizers = [RowOptimizer(rule, w) for w in self.w]
        self.average = [w.clone() for w in self.w] if config.moving_average else []
        self.t = 0
        self.ended = False  # no push follows, and learners may leave
        self._lock = self._team.lock()  # of t, and who waits
        self._waiting: list[tuple[int, int, Sequence[Tensor]]] = []
        self._updated = self._team.event()

    def start(self) -> None:
        self._team.spawn(self._take_pushes, "server: push")
        self._team.spawn(self._take_pulls, "server: pull")

    def pull(self, worker: int, t: int, message: Sequence[Tensor]) -> None:
        """A worker needs rows of version t: now, or once they are there."""
        with self._lock:
            if t > self.t:
                self._waiting.append((worker, t, message))
            else:
                self._answer(worker, message)

    def wait(self, t: int) -> None:
        """Until the rows are of version t."""
        while self.t < t:
            self._updated.clear()
            if self.t < t:
                self._updated.wait()

    def _take_pulls(self) -> None:
        while True:
            message = self._team.recv("pull")
            if message is not None:
                self.pull(message.source, message.clock, message.tensors)

    def _take_pushes(self) -> None:
        while True:
            try:
                messages = [self._messenger.receive("push", source) for source in self._sources]
            except LearnerLost:
                if self.ended:
                    return
                raise
            pushes = [read_rows(message, self._tables, self.limits, self._config.wire) for message in messages]
            rate = pushes[0][1]
            sums = [self._merge([rows[k] for rows, _ in pushes], k) for k in range(len(self._tables))]
            if self._config.clip_norm > 0:
                sums = self._limited(sums, rate)
            self._update(sums, rate)

    def _merge(self, parts: Sequence[IndexedRows], table: int) -> IndexedRows:
        rows, price = accumulate(parts, self.limits[table], self._config.merge_each)
        self._team.simulate_cost("averaging", price)
        return rows

    def _update(self, sums: Sequence[IndexedRows], rate: float) -> None:
        for optimizer, rows in zip(self._optimizers, sums, strict=True):
            optimizer.step(rows, rate)
            self._team.simulate_cost("update", rows.values.numel())
        for average, w in zip(self.average, self.w, strict=False):
            average.lerp_(w, 1 - self._config.moving_average)
        with self._lock:
            self.t += 1
            waiting, self._waiting = self._waiting, []
            for worker, _, message in waiting:
                self._answer(worker, message)
        self._updated.set()

    def _answer(self, worker: int, message: Sequence[Tensor]) -> None:
        table, count = map(int, unpack_head(message[0]))
        numbers = unpack_numbers(message[1])
        rows = self.w[table] if count == self.limits[table] else gather(self.w[table], numbers)
        self._messenger.send(worker, "rows", self.t, pack(rows, self._config.wire))

    # operations after aggregation

    def _limited(self, sums: list[IndexedRows], rate: float) -> list[IndexedRows]:
        """The merged gradient, scaled so that the norm of the whole has its limit.

        Local operations (squares, scaling) stay with the rows, and the shared one (the norm) is the first server's; or
        all is done by the chief, which reads and returns the rows.
        """
        first, messenger, t = self._ranks[0], self._messenger, self.t
        if not self._config.after_aggregation:
            messenger.send(first, "sums", t, *write_rows(sums, rate, self.limits, "float32"))
            return read_rows(messenger.receive("clipped", first), self._tables, self.limits, "float32")[0]
        square = sum((rows.square for rows in sums), torch.zeros((), dtype=torch.float64))
        messenger.send(first, "square", t, write_double(square))
        norm = read_double(messenger.receive("limit", first))
        for rows in sums:
            clip(rows.values, norm.float(), self._config.clip_norm)
        return sums

    # state, at rest

    def state_dict(self) -> dict[str, Any]:
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        return {"t": self.t, "w": self.w, "average": self.average, "optimizers": optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]
        for w, saved in zip([*self.w, *self.average], [*state["w"], *state["average"]], strict=True):
            w.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
