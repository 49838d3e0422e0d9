"""Serialisation of rows, and messages of variable length."""

from __future__ import annotations

import torch

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.simulator import SimCluster, SimTeam
from asr_am.distributed.team import shapes_match
from asr_am.parallax.indexed_rows import IndexedRows, merge, num_rows_on, pack, unpack
from asr_am.parallax.row_messages import Table, read_rows, write_rows
from tests.support.toy_lm import hardware

TABLES = (Table("a", 7, 3), Table("b", 4, 1))


def random_rows(table: Table, count: int) -> IndexedRows:
    return IndexedRows(torch.randperm(table.rows)[:count].sort().values, torch.randn(count, table.width))


def test_rows_survive_a_message() -> None:
    num_rows = [table.rows for table in TABLES]
    for counts in ((3, 2), (0, 0), (7, 4), (7, 1)):
        parts = [random_rows(table, count) for table, count in zip(TABLES, counts, strict=True)]
        message = write_rows(parts, 0.1, num_rows, "float32")
        found, lr = read_rows(message, TABLES, num_rows, "float32")
        assert lr == 0.1
        for ours, theirs in zip(found, parts, strict=True):
            assert torch.equal(ours.numbers, theirs.numbers) and torch.equal(ours.values, theirs.values)
        sent = sum(n for n, count in zip(counts, num_rows, strict=True) if n < count)
        assert len(message[1]) == sent, "numbers of complete tables are omitted"


def test_half_as_many_bytes_in_bfloat16() -> None:
    values = torch.randn(5, 3)
    sent = pack(values, "bfloat16")
    assert len(sent) == 8 and torch.equal(unpack(sent, (5, 3), "bfloat16"), values.bfloat16().float())


def test_rows_are_spread_evenly_over_servers() -> None:
    rows = random_rows(Table("a", 1001, 2), 1001)
    parts = [rows.part(server, 8, 1001) for server in range(8)]
    assert [len(part) for part in parts] == [num_rows_on(server, 8, 1001) for server in range(8)] == [126] + [125] * 7
    few = IndexedRows(rows.numbers[::3], rows.values[::3])
    for server in range(8):
        part = few.part(server, 8, 1001)
        assert torch.equal(few.values[few.numbers % 8 == server], part.values)
        assert torch.equal(parts[server].values[part.numbers], part.values)


def test_merging_adds_equal_rows() -> None:
    parts = [random_rows(TABLES[0], count) for count in (3, 0, 7, 5)]
    dense = torch.zeros(7, 3)
    for part in parts:
        dense.index_add_(0, part.numbers, part.values)
    merged = merge(parts, 7)
    torch.testing.assert_close(dense[merged.numbers], merged.values)
    assert len(merge([parts[1], parts[1]], 7)) == 0


def test_variable_lengths_have_a_limit() -> None:
    assert (
        shapes_match((0,), (-3,))
        and shapes_match((3, 2), (-3, 2))
        and not shapes_match((4,), (-3,))
        and not shapes_match((3,), None)
    )
    assert shapes_match((), ()) and not shapes_match((1,), (2,)) and not shapes_match((1, 1), (-3,))

    def main(team: SimTeam) -> list[int]:
        team.register_tag("rows", -3)
        if team.rank == 0:
            for count in (2, 4, 3):
                team.send(1, "rows", 0, torch.zeros(count))
                team.sleep(5.0)
            return []
        messages = [team.recv("rows", 0, timeout=20.0) for _ in range(2)]
        return [len(message.tensors[0]) for message in messages if message]

    cluster = SimCluster(hardware(), Workload("words", seconds_per_batch={"toy": 1.0}), 2, seed=1)
    assert cluster.run(main)[1] == [2, 3] and cluster.comm_stats[1].rejected == 1
