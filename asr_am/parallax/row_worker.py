"""A worker's end of the servers: it pulls rows, pushes gradients, and merges those of its machine before that.

The chief is the learner of rank 0, beside the first server; each machine has a chief of its own, its first learner.
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
    pack_head,
    pack_numbers,
    row_positions,
    rows_of,
    scatter,
    unpack,
)
from asr_am.parallax.row_messages import Messenger, Table, read_double, read_rows, write_double, write_rows
from asr_am.parallax.row_server import RowServer


class RowWorker:
    """ranks: of the servers. server: that of this rank. t: the step.

    A letter that is not collected yet is replaced by the second after it, so no push leaves before the last one has
    made its update. Rows that are pulled in a step tell that; where there are none, an empty pull does.

    counts: bytes of values "pulled" and "pushed", those of the server beside it included, as table 3 counts them; and
    what that leaves out: row "numbers", and values sent to the "chief" of the machine.
    """

    def __init__(
        self, messenger: Messenger, tables: Sequence[Table], ranks: Sequence[int], server: RowServer | None, config: Config,
        counts: Counter[str],
    ) -> None:  # fmt: skip
        self._messenger, self._team, self._tables, self._config = messenger, messenger.team, tables, config
        self._ranks, self._server, self.counts, self.t = ranks, server, counts, 0
        self._asked: set[int] = set()  # servers, since the last push
        self._limits = [[rows_of(s, len(ranks), table.rows) for table in tables] for s in range(len(ranks))]
        hosts, rank = self._team.hosts, self._team.rank
        self._mates = [other for other in range(self._team.size) if hosts[other] == hosts[rank]]

    def fetch(self, table: int, numbers: Tensor) -> Tensor:
        """Rows [K, D] of a table, in the present step: numbers [K], distinct and ascending."""
        count, width, servers = self._tables[table].rows, self._tables[table].width, len(self._ranks)
        here = numbers.cpu()
        wanted = here if self._config.gather_on_servers else torch.arange(count)
        asked = {}
        for server in self._around():
            place = row_positions(wanted, server, servers, count)
            own = gather(wanted, place)
            if len(own):
                self._ask(server, table, own // servers)
                asked[server] = place, (len(own), width)
        self._asked |= asked.keys()
        found = torch.empty(len(wanted), width)
        for server, (place, shape) in asked.items():
            (values,) = self._messenger.receive("rows", self._ranks[server])
            scatter(unpack(values, shape, self._config.wire), found, place)
            self.counts["pulled"] += values.nbytes
        rows = found if self._config.gather_on_servers else gather(found, here)
        return rows.to(numbers.device)

    def push(self, parts: Sequence[IndexedRows], rate: float) -> None:
        """This learner's gradient: rows of each table. With local aggregation, the machine's goes to the servers."""
        self._await_updates()
        parts = [IndexedRows(part.numbers.cpu(), part.values.cpu()) for part in parts]
        if self._config.local_aggregation and len(self._mates) > 1:
            chief, everything = self._mates[0], [table.rows for table in self._tables]
            if self._team.rank != chief:
                message = write_rows(parts, rate, everything, "float32")
                self.counts["chief"] += sum(values.nbytes for values in message[2:])
                self._team.send(chief, "local", self.t, *message)
                return
            messages = [self._messenger.receive("local", mate) for mate in self._mates[1:]]
            others = [read_rows(message, self._tables, everything, "float32")[0] for message in messages]
            parts = [self._merge([part, *(rows[k] for rows in others)], k) for k, part in enumerate(parts)]
        for server in self._around():
            own = [p.part(server, len(self._ranks), t.rows) for p, t in zip(parts, self._tables, strict=True)]
            message = write_rows(own, rate, self._limits[server], self._config.wire)
            self.counts["numbers"] += message[1].nbytes
            self.counts["pushed"] += sum(values.nbytes for values in message[2:])
            self._messenger.send(self._ranks[server], "push", self.t, *message)

    def _await_updates(self) -> None:
        """Until all servers are at the present step."""
        others = [server for server in self._around() if server not in self._asked]
        for server in others:
            self._ask(server, 0, torch.zeros(0, dtype=torch.int64))
        for server in others:
            self._messenger.receive("rows", self._ranks[server])
        self._asked.clear()

    def norm(self, square: Tensor) -> Tensor:
        """Of the whole gradient. square: of its replicated part, which all learners have alike, and is counted once."""
        first = self._ranks[0]
        if self._team.rank == first and self._config.after_aggregation:
            squares = [read_double(self._messenger.receive("square", rank)) for rank in self._ranks]
            norm = (square.cpu() + sum(squares)).sqrt()
            self._tell(self._ranks, "limit", norm)
            self._tell(range(self._team.size), "norm", norm)
        elif self._team.rank == first:
            self._tell(range(self._team.size), "norm", self._clip_all(square.cpu()))
        return read_double(self._messenger.receive("norm", first))

    def _clip_all(self, square: Tensor) -> Tensor:
        """As the chief: read every server's merged gradient, limit all, and give it back."""
        messages = [self._messenger.receive("sums", rank) for rank in self._ranks]
        servers = range(len(self._ranks))
        merged = [read_rows(messages[s], self._tables, self._limits[s], "float32") for s in servers]
        norm = (square + sum(rows.square for sums, _ in merged for rows in sums)).sqrt()
        for s, (sums, rate) in enumerate(merged):
            for rows in sums:
                clip(rows.values, norm.float(), self._config.clip_norm)
            self._messenger.send(self._ranks[s], "clipped", self.t, *write_rows(sums, rate, self._limits[s], "float32"))
        return norm

    def _tell(self, ranks: Sequence[int], tag: str, value: Tensor) -> None:
        for rank in ranks:
            self._messenger.send(rank, tag, self.t, write_double(value))

    def _merge(self, parts: Sequence[IndexedRows], table: int) -> IndexedRows:
        rows, price = accumulate(parts, self._tables[table].rows, self._config.merge_each)
        self._team.simulate_cost("averaging", price)
        return rows

    def _ask(self, server: int, table: int, numbers: Tensor) -> None:
        limit = self._limits[server][table]
        sent = pack_numbers(numbers[:0] if len(numbers) == limit else numbers)
        message = pack_head(table, len(numbers)), sent
        self.counts["numbers"] += sent.nbytes
        if self._ranks[server] == self._team.rank:
            assert self._server is not None
            self._server.pull(self._team.rank, self.t, message)
        else:
            self._team.send(self._ranks[server], "pull", self.t, *message)

    def _around(self) -> list[int]:
        """All servers, from the next after this rank to its own: not all begin with the same."""
        rank, size = self._team.rank, self._team.size
        return sorted(range(len(self._ranks)), key=lambda s: (self._ranks[s] - rank - 1) % size)
