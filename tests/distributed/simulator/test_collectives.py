from __future__ import annotations

import pytest
import torch

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.simulator import SimTeam
from asr_am.distributed.team import LearnerLost
from tests.support.round_cluster import cluster_of, run, step_result

RING = 2 * 3 / 4  # of the message through each of 4 learners' links
LATENCY = 2 * 3 * 0.5  # of the ring's steps
X10 = RING * 40 / 10.0 + LATENCY  # seconds for 10 elements of 4 bytes at a tenth of 100 bytes/s: 9.0


def test_the_mean_is_added_in_rank_order_and_costs_the_rings_time() -> None:
    rows = torch.randn(4, 10, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 4)[:, None]
    expected = (((rows[0] + rows[1]) + rows[2]) + rows[3]) / 4

    def main(team: SimTeam) -> tuple[bool, float]:
        x = rows[team.rank].clone()
        team.sleep(4.0 - team.rank)  # called in the order 3, 2, 1, 0; it begins with the last
        team.start_all_reduce_mean(x).wait()
        return torch.equal(x, expected), team.now()

    cluster = cluster_of()
    assert cluster.run(main) == dict.fromkeys(range(4), (True, 4.0 + X10))
    assert [comm_stats.waiting_seconds for comm_stats in cluster.comm_stats] == [X10, 1 + X10, 2 + X10, 3 + X10]
    for rank, comm_stats in enumerate(cluster.comm_stats):
        assert comm_stats.bytes_sent == {(rank + 1) % 4: 60} and comm_stats.modelled_bytes == 60


def test_bytes_are_those_of_the_workload() -> None:
    def main(team: SimTeam) -> float:
        team.start_all_reduce_mean(torch.zeros(10)).wait()
        return team.now()

    workload = Workload("big", bytes=4000.0, seconds_per_batch={"abacus": 3.0})
    cluster = cluster_of(workload=workload, model_elements=20)  # each real byte stands for 50
    assert set(cluster.run(main).values()) == {RING * 2000 / 10.0 + LATENCY}
    assert cluster.comm_stats[0].bytes_sent == {1: 60} and cluster.comm_stats[0].modelled_bytes == 3000
    with pytest.raises(ValueError, match="model_elements must be given"):
        cluster_of(workload=workload)


def test_collectives_follow_each_other() -> None:
    """Three buckets that all start at 0, 1 and 2 s are transferred one after the other."""

    def main(team: SimTeam) -> list[float]:
        works = []
        for _ in range(3):
            works.append(team.start_all_reduce_mean(torch.zeros(10)))
            team.sleep(1.0)
        ends = []
        for work in works:
            work.wait()
            ends.append(team.now())
        return ends

    assert run(main)[0] == [X10, 2 * X10, 3 * X10]


@pytest.mark.parametrize("hosts", [1, 2])
def test_steps_of_collectives_may_have_a_latency_of_their_own(hosts: int) -> None:
    def main(team: SimTeam) -> list[float]:
        team.start_all_reduce_mean(torch.zeros(10)).wait()
        reduced = team.now()
        team.start_all_gather(torch.zeros(10)).wait()
        gathered = team.now()
        team.broadcast(torch.zeros(10))
        return [reduced, gathered - reduced, team.now() - gathered]

    changes = {"hosts": hosts, "devices_per_host": 4 // hosts}
    latency = 0.125 if hosts == 1 else 0.5  # of messages
    plain, dearer = run(main, **changes)[3], run(main, **changes, collective_latency=latency + 2.0)[3]
    steps = [6, 1, 3]  # of an all-reduce, an all-gather and a broadcast among four
    assert dearer == pytest.approx([seconds + 2.0 * count for seconds, count in zip(plain, steps, strict=True)])


def test_one_learner_reduces_with_nobody() -> None:
    def main(team: SimTeam) -> tuple[float, float]:
        x = torch.full((10,), 3.0)
        team.start_all_reduce_mean(x).wait()
        return team.now(), float(x.sum())

    cluster = cluster_of(1)
    assert cluster.run(main) == {0: (0.0, 30.0)} and not cluster.comm_stats[0].bytes_sent


def test_learners_must_agree_about_the_length() -> None:
    with pytest.raises(RuntimeError, match="all-reduce 0: learner 1 has 5 elements, others 4"):
        run(lambda team: team.start_all_reduce_mean(torch.zeros(4 + team.rank % 2)).wait())


@pytest.mark.parametrize("at", [1.0, 4.0], ids=["before it starts", "while it is transferred"])
def test_a_lost_learner_ends_collectives_for_all(at: float) -> None:
    """Learner 2 would start at 3 s, the first transfer would end at 3 s + X10 and the second follow."""

    def main(team: SimTeam) -> tuple[int, str, float, float]:
        if team.rank == 2:
            team.sleep(3.0)
        works = [team.start_all_reduce_mean(torch.zeros(10)) for _ in range(2)]
        with pytest.raises(LearnerLost) as caught:
            works[0].wait()
        lost_at = team.now()
        with pytest.raises(LearnerLost):
            team.start_all_reduce_mean(torch.zeros(10))
        for _ in range(5):  # at full speed: nothing is transferred any more
            team.timed(lambda on_bucket: step_result())(None)
        return caught.value.rank, str(caught.value), lost_at, team.now()

    results = run(main, faults={"crashes": [{"learner": 2, "at": at}]})
    message = "learner 2 crashed; start the same command again to continue from the last checkpoint"
    assert results == dict.fromkeys((0, 1, 3), (2, message, at, at + 15.0))


def test_the_first_to_be_lost_is_named() -> None:
    crashes = [{"learner": 1, "at": 1.0}, {"learner": 2, "at": 2.0}]

    def main(team: SimTeam) -> None:
        team.sleep(3.0)
        team.start_all_reduce_mean(torch.zeros(1))

    with pytest.raises(LearnerLost, match="learner 1 crashed"):
        run(main, faults={"crashes": crashes})


def test_what_was_complete_before_the_loss_stays_complete() -> None:
    def main(team: SimTeam) -> float:
        x = torch.full((10,), float(team.rank))
        work = team.start_all_reduce_mean(x)
        team.sleep(10.0)
        work.wait()
        return float(x[0])

    assert run(main, faults={"crashes": [{"learner": 2, "at": 9.5}]}) == dict.fromkeys((0, 1, 3), 1.5)


def test_a_learner_that_left_is_as_good_as_lost() -> None:
    def main(team: SimTeam) -> None:
        if team.rank:
            team.start_all_reduce_mean(torch.zeros(1)).wait()

    with pytest.raises(LearnerLost, match="learner 0 has left the team"):
        run(main)
