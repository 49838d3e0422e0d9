"""Client of the row servers: pulls rows, pushes gradients, and merges the gradients of its machine first.

The chief is the learner of rank 0, which also runs the first server. Each machine has a chief of its own, its first
learner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.optimizer import clip
from asr_am.parallax.config import Config
from asr_am.parallax.indexed_rows import (
    IndexedRows,
    accumulate,
    gather,
    num_rows_on,
    pack_header,
    pack_numbers,
    row_positions,
    scatter,
    unpack,
)
from asr_am.parallax.row_messages import Messenger, Table, read_double, read_rows, write_rows
from asr_am.parallax.row_server import RowServer


class RowWorker:
    """Worker of one learner.

    At most one message per tag waits behind the one that its receiver has not yet taken, and a newer one overwrites it.
    Hence no push leaves before the servers have applied the previous one. Rows pulled in a step prove that. A server
    that was not pulled from gets an empty pull.

    Attributes:
        counts: Bytes of values "pulled" and "pushed", those of a server on the same learner included, as Table 3 counts
            them. Also what Table 3 omits: row "numbers", and values sent to the "chief" of the machine.
    """

    def __init__(
        self, messenger: Messenger, tables: Sequence[Table], ranks: Sequence[int], server: RowServer | None,
        config: Config, counts: Counter[str],
    ) -> None:  # fmt: skip
        """Connects a learner to the servers."""
        self._messenger, self._team, self._tables, self._config = messenger, messenger.team, tables, config
        self._ranks, self._server, self.counts, self.t = ranks, server, counts, 0
        self._pulled_from: set[int] = set()  # servers, since the last push
        self._num_rows = [[num_rows_on(s, len(ranks), table.rows) for table in tables] for s in range(len(ranks))]
        hosts, rank = self._team.hosts, self._team.rank
        self._local_ranks = [other for other in range(self._team.size) if hosts[other] == hosts[rank]]

    def fetch(self, table: int, numbers: Tensor) -> Tensor:
        """Pulls rows [K, D] of a table in the version of the present step. Numbers [K] are distinct and ascending."""
        count, width, servers = self._tables[table].rows, self._tables[table].width, len(self._ranks)
        needed = numbers.cpu()
        requested = needed if self._config.gather_on_servers else torch.arange(count)
        pulls = {}
        for server in self._server_order():
            positions = row_positions(requested, server, servers, count)
            part = gather(requested, positions)
            if len(part):
                self._send_pull(server, table, part // servers)
                pulls[server] = positions, (len(part), width)
        self._pulled_from |= pulls.keys()
        received = torch.empty(len(requested), width)
        for server, (positions, shape) in pulls.items():
            (values,) = self._messenger.receive("rows", self._ranks[server])
            scatter(unpack(values, shape, self._config.wire), received, positions)
            self.counts["pulled"] += values.nbytes
        rows = received if self._config.gather_on_servers else gather(received, needed)
        return rows.to(numbers.device)

    def push(self, parts: Sequence[IndexedRows], lr: float) -> None:
        """Pushes this learner's gradient, or with local aggregation that of its machine."""
        self._await_updates()
        parts = [IndexedRows(part.numbers.cpu(), part.values.cpu()) for part in parts]
        if self._config.local_aggregation and len(self._local_ranks) > 1:
            chief, all_rows = self._local_ranks[0], [table.rows for table in self._tables]
            if self._team.rank != chief:
                message = write_rows(parts, lr, all_rows, "float32")
                self.counts["chief"] += sum(values.nbytes for values in message[2:])
                self._team.send(chief, "local", self.t, *message)
                return
            messages = [self._messenger.receive("local", rank) for rank in self._local_ranks[1:]]
            others = [read_rows(message, self._tables, all_rows, "float32")[0] for message in messages]
            each, team = self._config.merge_each, self._team
            parts = [
                accumulate([part, *(rows[k] for rows in others)], all_rows[k], each, team, "averaging")
                for k, part in enumerate(parts)
            ]
        for server in self._server_order():
            shards = [p.part(server, len(self._ranks), t.rows) for p, t in zip(parts, self._tables, strict=True)]
            message = write_rows(shards, lr, self._num_rows[server], self._config.wire)
            self.counts["numbers"] += message[1].nbytes
            self.counts["pushed"] += sum(values.nbytes for values in message[2:])
            self._messenger.send(self._ranks[server], "push", self.t, *message)

    def _await_updates(self) -> None:
        """Waits until all servers have the version of the present step."""
        others = [server for server in self._server_order() if server not in self._pulled_from]
        for server in others:
            self._send_pull(server, 0, torch.zeros(0, dtype=torch.int64))
        for server in others:
            self._messenger.receive("rows", self._ranks[server])
        self._pulled_from.clear()

    def norm(self, square: Tensor) -> Tensor:
        """Returns the norm of the whole gradient, given the square of the replicated part, which all learners have."""
        first = self._ranks[0]
        if self._team.rank == first and self._config.after_aggregation:
            squares = [read_double(self._messenger.receive("square", rank)) for rank in self._ranks]
            norm = (square.cpu() + sum(squares)).sqrt()
            self._send_to(self._ranks, "limit", norm)
            self._send_to(range(self._team.size), "norm", norm)
        elif self._team.rank == first:
            self._send_to(range(self._team.size), "norm", self._clip_all(square.cpu()))
        return read_double(self._messenger.receive("norm", first))

    def _clip_all(self, square: Tensor) -> Tensor:
        """Clips every server's merged gradient on the chief. Returns the norm."""
        messages = [self._messenger.receive("sums", rank) for rank in self._ranks]
        servers = range(len(self._ranks))
        merged = [read_rows(messages[s], self._tables, self._num_rows[s], "float32") for s in servers]
        norm = (square + sum(rows.squared_norm for sums, _ in merged for rows in sums)).sqrt()
        for s, (sums, lr) in enumerate(merged):
            for rows in sums:
                clip(rows.values, norm.float(), self._config.clip_norm)
            message = write_rows(sums, lr, self._num_rows[s], "float32")
            self._messenger.send(self._ranks[s], "clipped", self.t, *message)
        return norm

    def _send_to(self, ranks: Sequence[int], tag: str, value: Tensor) -> None:
        for rank in ranks:
            self._messenger.send(rank, tag, self.t, pack_header(float(value)))

    def _send_pull(self, server: int, table: int, numbers: Tensor) -> None:
        num_rows = self._num_rows[server][table]
        sent = pack_numbers(numbers[:0] if len(numbers) == num_rows else numbers)
        message = pack_header(table, len(numbers)), sent
        self.counts["numbers"] += sent.nbytes
        if self._ranks[server] == self._team.rank:
            assert self._server is not None
            self._server.pull(self._team.rank, self.t, message)
        else:
            self._team.send(self._ranks[server], "pull", self.t, *message)

    def _server_order(self) -> list[int]:
        """Returns all servers in ring order after this rank, so that learners begin with different ones."""
        rank, size = self._team.rank, self._team.size
        return sorted(range(len(self._ranks)), key=lambda s: (self._ranks[s] - rank - 1) % size)
