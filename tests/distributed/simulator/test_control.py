"""Leases and barriers of virtual teams: who waits, for how long, and who gets what."""

from __future__ import annotations

import pytest
import torch

from asr_am.distributed.leases import RoundRobinLeases
from asr_am.distributed.simulator import SimTeam
from tests.support.round_cluster import cluster_of, run, segment, step_result


def test_gather_waits_for_all_and_takes_no_time() -> None:
    def main(team: SimTeam) -> tuple[object, ...]:
        team.sleep(float(team.rank))
        rows = team.gather(torch.arange(team.rank, dtype=torch.float64))
        return {rank: row.tolist() for rank, row in rows.items()}, rows[3].dtype, team.now()

    rows = {0: [], 1: [0.0], 2: [0.0, 1.0], 3: [0.0, 1.0, 2.0]}
    cluster = cluster_of()
    assert cluster.run(main) == dict.fromkeys(range(4), (rows, torch.float64, 3.0))
    assert [comm_stats.waiting_seconds for comm_stats in cluster.comm_stats] == [3.0, 2.0, 1.0, 0.0]


def test_average_is_added_in_rank_order_and_leaves_its_argument_alone() -> None:
    rows = torch.randn(3, 600, generator=torch.Generator().manual_seed(2)) * torch.logspace(3, -3, 3)[:, None]

    def main(team: SimTeam) -> bool:
        team.sleep(3.0 - team.rank)
        x = rows[team.rank].clone()
        mean = team.average(x)
        unchanged = torch.equal(x, rows[team.rank])
        mean.zero_()  # nobody else's
        return unchanged and torch.equal(team.average(x), ((rows[0] + rows[1]) + rows[2]) / 3)

    assert set(run(main, 3).values()) == {True}


@pytest.mark.parametrize("arrived", [False, True])
def test_a_death_lets_the_others_go_on(arrived: bool) -> None:
    def main(team: SimTeam) -> tuple[list[int], float]:
        if team.rank == 1 and not arrived:
            team.sleep(10.0)
        if team.rank == 2:
            team.sleep(2.0)
        rows = team.gather(torch.zeros(1))
        return list(rows), team.now()

    results = run(main, faults={"crashes": [{"learner": 1, "at": 1.0}]})
    assert results == dict.fromkeys((0, 2, 3), ([0, 2, 3], 2.0))
    assert run(main, faults={"crashes": [{"learner": 1, "at": 3.0}]})[0] == (
        ([0, 1, 2, 3], 2.0) if arrived else ([0, 2, 3], 3.0)
    )


def work(team: SimTeam, batches: int = 8, seconds: float = 1.0) -> list[int]:
    """Does a segment's batches as they are leased, and returns those of this learner."""
    leases = team.leases(segment(batches), synchronous=False)
    assert not leases.ahead
    own = []
    while (lease := leases.lease()) is not None:
        team.sleep(seconds * (1 + team.rank))
        assert lease.batch is not None
        own.append(lease.batch)
        leases.complete(step_result(lease))
    record, totals = leases.record(), leases.totals()
    record.audit([2] * batches)
    assert {c.batch for c in record.completions if (c.owner, c.incarnation) == (team.rank, team.incarnation)} >= set(
        own
    )
    assert (totals.loss, totals.correct, totals.frames, totals.batches) == (batches, 3 * batches, 10 * batches, batches)
    return own


def test_the_fast_do_more_and_nobody_leaves_before_all_is_done() -> None:
    def main(team: SimTeam) -> tuple[list[int], float]:
        return work(team), team.now()

    # batches of 1, 2 and 3 s; of two learners that are free at once, the one with the longer batch began to wait first
    assert run(main, 3) == {0: ([0, 3, 5, 7], 6.0), 1: ([1, 4], 6.0), 2: ([2, 6], 6.0)}


def test_synchronous_leases_are_rounds() -> None:
    def main(team: SimTeam) -> list[int | None]:
        leases = team.leases(segment(6), synchronous=True)
        assert isinstance(leases, RoundRobinLeases)
        own = []
        while (lease := leases.lease()) is not None:
            own.append(lease.batch)
            leases.complete(step_result(lease))
        leases.record().audit([2] * 6)
        assert leases.totals().batches == 6
        return own

    assert run(main) == {0: [0, 4], 1: [1, 5], 2: [2, None], 3: [3, None]}


def test_leases_of_the_dead_come_back_also_at_the_very_end() -> None:
    """Learner 2 dies over the last batch while the others wait for the end."""

    def main(team: SimTeam) -> tuple[list[int | None], float]:
        if team.rank == 2:
            team.sleep(0.5)
        leases = team.leases(segment(4), synchronous=False)
        own = []
        while (lease := leases.lease()) is not None:
            team.sleep(50.0 if team.rank == 2 else 1.0)
            own.append(lease.batch)
            leases.complete(step_result(lease))
        record = leases.record()
        record.audit([2] * 4)
        assert record.released == ((2, 2),)
        return own, team.now()

    cluster = cluster_of(3, faults={"crashes": [{"learner": 2, "at": 20.0}]})
    assert cluster.run(main) == {0: ([0, 3], 21.0), 1: ([1, 2], 21.0)}  # 1 has waited for longer
    assert cluster.comm_stats[2].faults == {"crash": 1} and cluster.comm_stats[1].waiting_seconds == 19.0
