"""Messages between workers and servers about rows, and a messenger that also delivers within a learner.

The clock of every message is the step t.

Worker to server:   pull     header [table, K], numbers [K]         rows that it needs, all if there are no numbers
                    push     header [lr, K of each table], numbers, its gradient, or that of its machine
                             values of each table
Worker to worker:   local    like push, with the model's row        to the chief of its machine
                             numbers
Server to worker:   rows     values                                 rows that were pulled
                    norm     a double                               norm of the whole gradient, from the first server
Server to server:   square   a double                               squared norm of its part, to the first server
                    limit    a double                               the norm, from the first server
Server and chief:   sums     like push                              the merged gradient, if the chief clips it
                    clipped  like push                              the same after clipping

Unless stated otherwise, row numbers are those on the server. They are omitted if a message holds all of its rows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asr_am.distributed.team import Event, LearnerLost, Team
from asr_am.parallax.indexed_rows import (
    IndexedRows,
    WireDtype,
    num_rows_on,
    pack,
    pack_header,
    pack_numbers,
    unpack,
    unpack_header,
    unpack_numbers,
)


class Messenger:
    """Sends messages to other learners, and to tasks of the same learner through local queues.

    Exactly one task receives the messages of a tag.
    """

    def __init__(self, team: Team, tags: Sequence[str]) -> None:
        self.team = team
        self._loopback: defaultdict[str, deque[tuple[Tensor, ...]]] = defaultdict(deque)
        self._arrived: dict[str, Event] = {tag: team.event() for tag in tags} if team.size > 1 else {}

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        """Sends a message without waiting for its receiver, which may be this learner. It gets copies then."""
        if to != self.team.rank:
            self.team.send(to, tag, clock, *tensors)
            return
        self._loopback[tag].append(tuple(tensor.detach().to("cpu", copy=True) for tensor in tensors))
        if self._arrived:
            self._arrived[tag].set()

    def receive(self, tag: str, source: int) -> tuple[Tensor, ...]:
        """Waits for the next message from a learner. Raises LearnerLost if that learner died."""
        if source != self.team.rank:
            message = self.team.recv(tag, source)
            if message is None:
                raise LearnerLost(source, "died; parallax needs the gradients and the rows of every learner")
            return message.tensors
        queue, arrived = self._loopback[tag], self._arrived[tag]
        while not queue:
            arrived.clear()
            if not queue:  # a message may have arrived before clear()
                arrived.wait()
        return queue.popleft()


DOUBLE = 2  # int32 elements that hold a double
TAGS = ("pull", "push", "local", "rows", "norm", "square", "limit", "sums", "clipped")


@dataclass(frozen=True)
class Table:
    """A parameter that lives on servers.

    Attributes:
        name: Name in the model.
        rows: Number of rows, V.
        width: Elements of a row, D.
    """

    name: str
    rows: int
    width: int


def make_messenger(team: Team, tables: Sequence[Table], servers: int) -> Messenger:
    """Registers the tags of all messages with their maximal lengths and returns a messenger for them."""
    rows_here = [num_rows_on(0, servers, table.rows) for table in tables]
    all_rows = [table.rows for table in tables]
    header = DOUBLE * (1 + len(tables))
    if team.size > 1:
        team.register_tag("pull", 2 * DOUBLE, -sum(rows_here))
        team.register_tag("rows", -max(rows * table.width for rows, table in zip(rows_here, tables, strict=True)))
        for tag, num_rows in (("local", all_rows), ("push", rows_here), ("sums", rows_here), ("clipped", rows_here)):
            values = [-rows * table.width for rows, table in zip(num_rows, tables, strict=True)]
            team.register_tag(tag, header, -sum(num_rows), *values)
        for tag in ("norm", "square", "limit"):
            team.register_tag(tag, DOUBLE)
    return Messenger(team, TAGS)


def write_rows(parts: Sequence[IndexedRows], lr: float, num_rows: Sequence[int], wire: WireDtype) -> tuple[Tensor, ...]:
    """Serialises rows of all tables as a push. Row numbers are omitted of a table with all its `num_rows` there."""
    numbers = [part.numbers for part, count in zip(parts, num_rows, strict=True) if len(part) < count]
    numbers_N = torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.int64)
    values = [pack(part.values, wire) for part in parts]
    return pack_header(lr, *map(len, parts)), pack_numbers(numbers_N), *values


def read_rows(
    message: Sequence[Tensor], tables: Sequence[Table], num_rows: Sequence[int], wire: WireDtype
) -> tuple[list[IndexedRows], float]:
    """Inverts `write_rows`. Returns rows of each table, and the learning rate."""
    lr, *counts = unpack_header(message[0])
    lengths = [int(count) for count in counts]
    num_sent = [0 if n == count else n for n, count in zip(lengths, num_rows, strict=True)]
    numbers = unpack_numbers(message[1]).split(num_sent)
    rows = []
    for k, (n, sent) in enumerate(zip(lengths, message[2:], strict=True)):
        row_numbers = numbers[k] if num_sent[k] == n else torch.arange(num_rows[k])
        rows.append(IndexedRows(row_numbers, unpack(sent, (n, tables[k].width), wire)))
    return rows, lr


def read_double(message: Sequence[Tensor]) -> Tensor:
    """Returns the scalar of a message that is one double."""
    return message[0].clone().view(torch.float64)[0]
