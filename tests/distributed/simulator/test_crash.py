from __future__ import annotations

import pytest
import torch

from asr_am.distributed.cluster_config import Cluster
from asr_am.distributed.leases import StaleSegment
from asr_am.distributed.simulator import SimCluster, SimTeam
from asr_am.distributed.team import LearnerLost
from tests.support.round_cluster import VALUES, WORKLOAD, cluster_of, run, segment, step_result


def crash(at: float, restart_after: float | None = None, learner: int = 1) -> dict[str, object]:
    return {"crashes": [{"learner": learner, "at": at, "restart_after": restart_after}]}


def do(team: SimTeam, begin: int, batches: int = 8) -> tuple[tuple[int, int], ...]:
    """Does one segment of batches of 1 s, and returns all (owner, incarnation) that completed a batch."""
    leases = team.leases(segment(batches, begin), synchronous=False)
    while (lease := leases.lease()) is not None:
        team.sleep(1.0)
        leases.complete(step_result(lease))
    record = leases.record()
    record.audit([2] * batches)
    return tuple(sorted({(c.owner, c.incarnation) for c in record.completions}))


def test_a_killed_learner_stops_where_it_is() -> None:
    trace: list[str] = []

    def main(team: SimTeam) -> int:
        def tick() -> None:
            while True:
                team.sleep(1.0)
                trace.append(f"tick {team.rank}.{team.incarnation}")

        team.spawn(tick, "tick")
        lock = team.lock()
        try:
            with lock:
                team.sleep(2.5)
        finally:
            trace.append(f"left {team.rank}.{team.incarnation} at {team.now():g}")
            if team.now() < 2.5:
                try:
                    team.send(1 - team.rank, "w", 0, torch.zeros(1))  # nothing is sent any more
                    team.sleep(1.0)
                    trace.append("a dead learner waited")
                finally:
                    trace.append(f"unwound at {team.now():g}")
        return team.incarnation

    cluster = cluster_of(2, faults=crash(1.5))
    assert cluster.run(main) == {0: 0}
    assert trace == ["tick 0.0", "tick 1.0", "left 1.0 at 1.5", "unwound at 1.5", "tick 0.0", "left 0.0 at 2.5"]
    assert cluster.comm_stats[1].faults == {"crash": 1} and cluster.comm_stats[1].messages_sent == 0


def test_a_restarted_learner_takes_part_again() -> None:
    def main(team: SimTeam) -> tuple[object, ...]:
        owners, alive = do(team, 0), team.live_ranks()
        return owners, alive, list(team.gather(torch.zeros(1))), team.now()

    # 8 batches of 1 s: 0 and 2 at 0, 1, 2 s; 1, back at 0.75 s, its own first batch and one more
    results = run(main, 3, faults=crash(0.5, restart_after=0.25))
    assert results == dict.fromkeys(range(3), (((0, 0), (1, 1), (2, 0)), (0, 1, 2), [0, 1, 2], 3.0))


def test_a_restarted_learner_does_not_join_a_segment_that_all_others_have_finished() -> None:
    """All reach the barriers at the start and in the first segment. Learner 1 dies in the second one, which the others
    finish at 4 s, and is back after their second barrier in it.
    """

    def main(team: SimTeam) -> list[object]:
        met: list[object] = [list(team.gather(torch.zeros(1)))]
        if team.incarnation:
            assert team.live_ranks() == (0, 1, 2) and team.rejoins
            team.sleep(2.5)
            with pytest.raises(StaleSegment):
                team.leases(segment(6, 3), synchronous=False)
            team.sleep(2.0)
        else:
            do(team, 0, batches=3)
            met.append(list(team.gather(torch.zeros(1))))
            do(team, 3, batches=6)
            for _ in range(2):
                mean = float(team.average(torch.full((1,), float(team.rank * 2 + 1))))
                met.append((list(team.gather(torch.zeros(1))), mean, team.now()))
                team.sleep(2.0)
        do(team, 9, batches=3)
        return [*met, list(team.gather(torch.zeros(1)))]

    all_three, two = [0, 1, 2], [0, 2]
    results = run(main, 3, faults=crash(1.5, restart_after=2.5))
    assert results[0] == results[2] == [all_three, all_three, (two, 3.0, 4.0), (two, 3.0, 6.0), all_three]
    assert results[1] == [all_three, all_three], "it gets the results of the barrier at the start"


def test_a_restarted_learner_that_is_behind_is_told_so() -> None:
    def main(team: SimTeam) -> str:
        begin, told = 0, ""
        while begin < 16:
            try:
                do(team, begin)
                begin += 8
            except StaleSegment as error:
                told, begin = str(error), begin + 8
        return told

    results = run(main, 3, faults=crash(3.5, restart_after=3.0))
    assert results[0] == results[2] == ""
    assert "learner 1 asks for epoch 1 from batch 0" in results[1]


def test_before_the_first_segment_all_learners_are_waited_for() -> None:
    def main(team: SimTeam) -> tuple[list[int], float]:
        team.sleep(1.0 + team.rank)
        return list(team.gather(torch.zeros(1))), team.now()

    results = run(main, 3, faults=crash(1.5, restart_after=0.25))
    # learner 1 died before it was there, and was not waited for; when it asks, it gets what the others agreed on
    assert results == {0: ([0, 2], 3.0), 1: ([0, 2], 3.75), 2: ([0, 2], 3.0)}


def test_two_crashes_of_one_learner() -> None:
    faults = {
        "crashes": [
            {"learner": 1, "at": 1.5, "restart_after": 1.0},
            {"learner": 1, "at": 1.75},  # already dead
            {"learner": 1, "at": 4.0, "restart_after": 1.0},
        ]
    }

    def main(team: SimTeam) -> tuple[int, float]:
        team.sleep(3.0)
        return team.incarnation, team.now()

    cluster = cluster_of(2, faults=faults)
    assert cluster.run(main)[0] == (0, 3.0)
    assert cluster.comm_stats[1].faults["crash"] == 2


def test_a_crash_after_the_end_is_none() -> None:
    def main(team: SimTeam) -> int:
        team.sleep(1.0 if team.rank == 1 else 5.0)
        return team.incarnation

    cluster = cluster_of(2, faults=crash(2.0, restart_after=1.0))
    assert cluster.run(main) == {0: 0, 1: 0} and not cluster.comm_stats[1].faults


def test_nobody_restarts_when_the_others_are_done() -> None:
    def main(team: SimTeam) -> int:
        team.sleep(3.0)
        return team.incarnation

    cluster = cluster_of(2, faults=crash(1.0, restart_after=100.0))
    assert cluster.run(main) == {0: 0} and cluster.now == 3.0


def test_all_dead_for_a_while() -> None:
    faults = {"crashes": [{"learner": rank, "at": 1.0, "restart_after": 1.0 + rank} for rank in range(2)]}

    def main(team: SimTeam) -> tuple[int, float]:
        team.sleep(3.0)
        return team.incarnation, team.now()

    assert run(main, 2, faults=faults) == {0: (1, 5.0), 1: (1, 6.0)}


def test_all_dead_for_good() -> None:
    faults = {"crashes": [{"learner": rank, "at": 1.0 + rank} for rank in range(2)]}
    with pytest.raises(LearnerLost, match="as all others had before"):
        run(lambda team: team.sleep(5.0), 2, faults=faults)


@pytest.mark.parametrize("ask", ["lease", "gather"])
def test_a_dead_learner_leases_and_gathers_nothing(ask: str) -> None:
    def main(team: SimTeam) -> None:
        leases = team.leases(segment(6), synchronous=False)
        try:
            while (lease := leases.lease()) is not None:
                team.sleep(1.0)
                leases.complete(step_result(lease))
        finally:
            leases.lease() if ask == "lease" else team.gather(torch.zeros(1))
        leases.record().audit([2] * 6)

    run(main, 2, faults=crash(0.5))


def test_the_random_stream_of_a_restarted_learner_is_another() -> None:
    drawn: dict[int, float] = {}

    def main(team: SimTeam) -> None:
        if team.rank == 1:
            drawn[team.incarnation] = float(torch.rand(()))
        team.sleep(3.0)

    run(main, 2, faults=crash(1.0, restart_after=0.5))
    assert len(drawn) == 2 and drawn[0] != drawn[1]


def test_a_restarted_learner_does_not_wait_for_an_average_that_it_took_part_in_before() -> None:
    """As on real processes: barriers at the coordinator, averages by messages."""
    hardware = Cluster.build({**VALUES, "faults": crash(20.0, restart_after=1.0)})

    restarted: list[int] = []

    def main(team: SimTeam) -> list[float]:
        team.leases(segment(4), synchronous=False)
        means = [float(team.average(torch.full((2,), float(team.rank + 10 * team.incarnation)))[0])]
        restarted.append(team.incarnation)
        team.sleep(40.0)
        assert sum(restarted) == 1, "the restarted learner waits for ever"
        return means

    cluster = SimCluster(hardware, WORKLOAD, 4, seed=1, control_latency=0.01)
    assert cluster.run(main) == {0: [1.5], 1: [11.0], 2: [1.5], 3: [1.5]}, "it gets its own"


def test_a_crash_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run(lambda team: team.sleep(5.0), 2, faults=crash(1.5, restart_after=1.0))
    assert "learner 1 on host 0 was killed by signal 9 (SIGKILL); restarting it" in caplog.text
    assert "restarting learner 1" in caplog.text
