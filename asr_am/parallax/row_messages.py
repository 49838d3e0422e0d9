"""Letters to other learners, and to tasks of the same learner, by the same calls.

What workers and servers write to each other about rows. All letters carry the step t as their clock.

Worker to server:   pull     head [table, K], numbers [K]           which rows it needs; no numbers: all of them
                    push     head [rate, K of each table], numbers, its gradient, or its machine's
                             values of each table
Worker to worker:   local    the same, with rows as the model numbers them: to the chief of its machine
Server to worker:   rows     values                                 what was pulled
                    norm     a double                               of the whole gradient, from the first server
Server to server:   square   a double                               its part of that, to the first
                    limit    a double                               the norm, from the first
Server and chief:   sums     as push                                the merged gradient, where the chief clips it
                    clipped  as push

Numbers are those at the server. Where all of a server's rows are meant, they are left out.
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
    pack,
    pack_head,
    pack_numbers,
    rows_of,
    unpack,
    unpack_head,
    unpack_numbers,
)


class Messenger:
    """clock: of a letter, the step that it belongs to. Each tag has one task that receives it."""

    def __init__(self, team: Team, tags: Sequence[str]) -> None:
        self.team = team
        self._own: defaultdict[str, deque[tuple[Tensor, ...]]] = defaultdict(deque)
        self._came: dict[str, Event] = {tag: team.event() for tag in tags} if team.size > 1 else {}

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        if to != self.team.rank:
            self.team.send(to, tag, clock, *tensors)
            return
        self._own[tag].append(tuple(tensor.detach().to("cpu", torch.float32, copy=True) for tensor in tensors))
        if self._came:
            self._came[tag].set()

    def receive(self, tag: str, source: int) -> tuple[Tensor, ...]:
        """The next letter of a learner; LearnerLost where it died."""
        if source != self.team.rank:
            message = self.team.recv(tag, source)
            if message is None:
                raise LearnerLost(source, "died, and parallax needs the gradients and the rows of all")
            return message.tensors
        waiting, came = self._own[tag], self._came[tag]
        while not waiting:
            came.clear()
            if not waiting:
                came.wait()
        return waiting.popleft()


DOUBLE = 2  # float32 numbers
TAGS = ("pull", "push", "local", "rows", "norm", "square", "limit", "sums", "clipped")


@dataclass(frozen=True)
class Table:
    """A parameter that lives on servers: V rows of D elements."""

    name: str
    rows: int
    width: int


def make_messenger(team: Team, tables: Sequence[Table], servers: int) -> Messenger:
    """Accept all letters there are, from servers and workers."""
    here = [rows_of(0, servers, table.rows) for table in tables]
    everything = [table.rows for table in tables]
    head = DOUBLE * (1 + len(tables))
    if team.size > 1:
        team.register_tag("pull", 2 * DOUBLE, -sum(here))
        team.register_tag("rows", -max(rows * table.width for rows, table in zip(here, tables, strict=True)))
        for tag, limits in (("local", everything), ("push", here), ("sums", here), ("clipped", here)):
            values = [-rows * table.width for rows, table in zip(limits, tables, strict=True)]
            team.register_tag(tag, head, -sum(limits), *values)
        for tag in ("norm", "square", "limit"):
            team.register_tag(tag, DOUBLE)
    return Messenger(team, TAGS)


def write_rows(parts: Sequence[IndexedRows], rate: float, limits: Sequence[int], wire: WireDtype) -> tuple[Tensor, ...]:
    """A push: rows of each table. limits: V of each, where those are."""
    numbers = [part.numbers for part, limit in zip(parts, limits, strict=True) if len(part) < limit]
    numbers_N = torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.int64)
    values = [pack(part.values, wire) for part in parts]
    return pack_head(rate, *map(len, parts)), pack_numbers(numbers_N), *values


def read_rows(
    message: Sequence[Tensor], tables: Sequence[Table], limits: Sequence[int], wire: WireDtype
) -> tuple[list[IndexedRows], float]:
    """The rows, and the learning rate."""
    rate, *counts = unpack_head(message[0])
    lengths = [int(count) for count in counts]
    given = [0 if n == limit else n for n, limit in zip(lengths, limits, strict=True)]
    numbers = unpack_numbers(message[1]).split(given)
    rows = []
    for k, (n, sent) in enumerate(zip(lengths, message[2:], strict=True)):
        own = numbers[k] if given[k] == n else torch.arange(limits[k])
        rows.append(IndexedRows(own, unpack(sent, (n, tables[k].width), wire)))
    return rows, rate


def write_double(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float64).reshape(1).view(torch.float32)


def read_double(message: Sequence[Tensor]) -> Tensor:
    return message[0].clone().view(torch.float64)[0]
