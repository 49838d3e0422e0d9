"""Server of sparse parameters: its rows, their optimizers, and two tasks that handle pulls and pushes.

In step t a server answers pulls with the rows of version t. Once it has the gradients of all sources, it adds them in
the order of ranks, clips the sum together with the rest of the gradient, updates every touched row once, and is at
version t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.optimizer import clip
from asr_am.distributed.team import LearnerLost
from asr_am.parallax.config import Config
from asr_am.parallax.indexed_rows import (
    IndexedRows,
    accumulate,
    gather,
    pack,
    pack_header,
    unpack_header,
    unpack_numbers,
)
from asr_am.parallax.row_messages import Messenger, Table, read_double, read_rows, write_rows
from asr_am.parallax.row_optimizer import OptimizerSpec, RowOptimizer


class RowServer:
    """Server number `ranks.index(rank)`.

    Attributes:
        w: Its rows [V/S, D] of each table.
        average: Moving averages of `w`. Empty without `Config.moving_average`.
        t: Version of the rows, the number of updates so far.
        closing: True if no push follows, so that learners may leave.
    """

    def __init__(
        self, messenger: Messenger, tables: Sequence[Table], ranks: Sequence[int], sources: Sequence[int],
        spec: OptimizerSpec, config: Config, weights: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Copies this server's rows out of the initial weights.

        Args:
            ranks: Ranks of the servers.
            sources: Ranks that push.
            weights: Initial values [V, D] of each table.
        """
        self._messenger, self._team, self._tables, self._config = messenger, messenger.team, tables, config
        self._ranks, self._sources = ranks, sources
        index, count = ranks.index(messenger.team.rank), len(ranks)
        self.w = [w[index::count].clone() for w in weights]
        self.num_rows = [len(w) for w in self.w]
        self._optimizers = [RowOptimizer(spec, w) for w in self.w]
        self.average = [w.clone() for w in self.w] if config.moving_average else []
        self.t = 0
        self.closing = False
        self._lock = self._team.lock()  # guards t and _pending
        self._pending: list[tuple[int, int, Sequence[Tensor]]] = []  # pulls of a later version
        self._updated = self._team.event()

    def start(self) -> None:
        """Starts the tasks that receive pulls and pushes."""
        self._team.spawn(self._push_loop, "server: push")
        self._team.spawn(self._pull_loop, "server: pull")

    def pull(self, worker: int, t: int, message: Sequence[Tensor]) -> None:
        """Answers a worker's pull of version t, now or once that version exists."""
        with self._lock:
            if t > self.t:
                self._pending.append((worker, t, message))
            else:
                self._reply(worker, message)

    def wait(self, t: int) -> None:
        """Waits until the rows have version t."""
        while self.t < t:
            self._updated.clear()
            if self.t < t:  # an update may have finished before clear()
                self._updated.wait()

    def _pull_loop(self) -> None:
        while True:
            message = self._team.recv("pull")
            if message is not None:
                self.pull(message.source, message.clock, message.tensors)

    def _push_loop(self) -> None:
        while True:
            try:
                messages = [self._messenger.receive("push", source) for source in self._sources]
            except LearnerLost:
                if self.closing:
                    return
                raise
            pushes = [read_rows(message, self._tables, self.num_rows, self._config.wire) for message in messages]
            lr = pushes[0][1]
            sums = [
                accumulate([rows[k] for rows, _ in pushes], count, self._config.merge_each, self._team, "averaging")
                for k, count in enumerate(self.num_rows)
            ]
            if self._config.clip_norm > 0:
                sums = self._clipped(sums, lr)
            self._update(sums, lr)

    def _update(self, sums: Sequence[IndexedRows], lr: float) -> None:
        for optimizer, rows in zip(self._optimizers, sums, strict=True):
            optimizer.step(rows, lr)
            self._team.simulate_cost("update", rows.values.numel())
        for average, w in zip(self.average, self.w, strict=False):
            average.lerp_(w, 1 - self._config.moving_average)
        with self._lock:
            self.t += 1
            pending, self._pending = self._pending, []
            for worker, _, message in pending:
                self._reply(worker, message)
        self._updated.set()

    def _reply(self, worker: int, message: Sequence[Tensor]) -> None:
        table, count = map(int, unpack_header(message[0]))
        numbers = unpack_numbers(message[1])
        rows = self.w[table] if count == self.num_rows[table] else gather(self.w[table], numbers)
        self._messenger.send(worker, "rows", self.t, pack(rows, self._config.wire))

    def _clipped(self, sums: list[IndexedRows], lr: float) -> list[IndexedRows]:
        """Scales the merged gradient so that the norm of the whole gradient is at most `clip_norm`.

        With `Config.after_aggregation`, every server squares and scales its own rows, and only the norm is shared,
        through the first server. Otherwise the chief worker reads all rows, clips them and returns them.
        """
        first, messenger, t = self._ranks[0], self._messenger, self.t
        if not self._config.after_aggregation:
            messenger.send(first, "sums", t, *write_rows(sums, lr, self.num_rows, "float32"))
            return read_rows(messenger.receive("clipped", first), self._tables, self.num_rows, "float32")[0]
        square = sum((rows.squared_norm for rows in sums), torch.zeros((), dtype=torch.float64))
        messenger.send(first, "square", t, pack_header(float(square)))
        norm = read_double(messenger.receive("limit", first))
        for rows in sums:
            clip(rows.values, norm.float(), self._config.clip_norm)
        return sums

    # Checkpoints. Callers make sure that the server is drained.

    def state_dict(self) -> dict[str, Any]:
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        return {"t": self.t, "w": self.w, "average": self.average, "optimizers": optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]
        for w, saved in zip([*self.w, *self.average], [*state["w"], *state["average"]], strict=True):
            w.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
