"""All-gathers, broadcasts and groups: results, times and counted bytes, on two hosts of two learners."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.simulator import SimTeam
from asr_am.distributed.team import Group, LearnerLost, SingleProcess
from tests.support.round_cluster import cluster_of, run, step_result

HOSTS = [[0, 1], [2, 3]]
LENGTHS = [5, 1, 0, 2]


def leave(team: SimTeam) -> float:
    """Returns the time. All learners stay until the last is done, because a learner that leaves counts as lost."""
    now = team.now()
    team.sleep(50.0 - now)
    return now


def row(rank: int) -> Tensor:
    return torch.arange(LENGTHS[rank], dtype=torch.int32) + 10 * rank


def gather(team: Group, rank: int) -> list[list[int]]:
    return [x.tolist() for x in team.start_all_gather(row(rank), LENGTHS).wait()]


def test_a_ragged_gather_sends_each_one_s_bytes_to_each_other() -> None:
    """Each NIC sends 24 bytes for each of two learners of the other host, and 8 the other way."""

    def main(team: SimTeam) -> tuple[list[list[int]], float]:
        team.sleep(float(team.rank))
        return gather(team, team.rank), team.now()

    cluster = cluster_of()
    expected = ([row(rank).tolist() for rank in range(4)], 3.0 + 2 * 24 / 100.0 + 0.5)
    assert cluster.run(main) == dict.fromkeys(range(4), expected)
    for rank, comm_stats in enumerate(cluster.comm_stats):
        others = {other: 4 * LENGTHS[rank] for other in range(4) if other != rank}
        assert comm_stats.bytes_sent == others and comm_stats.modelled_bytes == 12 * LENGTHS[rank]


def test_the_fabric_between_all_hosts_and_the_links_inside_limit_it_too() -> None:
    assert run(lambda team: gather(team, team.rank) and team.now(), fabric_bandwidth=32.0)[0] == 2 * 32 / 32.0 + 0.5
    assert run(lambda team: gather(team, team.rank) and team.now(), host_bandwidth=2.0)[0] == (24 - 4) / 2.0 + 0.5


def test_a_few_numbers_are_timed_as_they_are_and_parts_of_the_model_as_the_workload() -> None:
    def main(team: SimTeam) -> list[float]:
        times = []
        for lengths in (None, [10] * 4):
            begin = team.now()
            team.start_all_gather(torch.zeros(10), lengths).wait()
            times.append(team.now() - begin)
        return times

    workload = Workload("big", bytes=4000.0, seconds_per_batch={"abacus": 3.0})
    cluster = cluster_of(workload=workload, model_elements=20)  # each real byte stands for 50
    assert cluster.run(main)[0] == pytest.approx([4 * 40 / 100.0 + 0.5, 50 * 4 * 40 / 100.0 + 0.5])
    assert cluster.comm_stats[0].modelled_bytes == 51 * 120


def test_what_is_sent_may_be_changed_after_the_wait() -> None:
    def main(team: SimTeam) -> list[list[int]]:
        x = torch.full((2,), team.rank)
        work = team.start_all_gather(x)
        found = work.wait()
        x.fill_(99)
        team.sleep(1.0)
        return [y.tolist() for y in found]

    assert run(main)[3] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_groups_inside_hosts_go_beside_each_other() -> None:
    def main(team: SimTeam) -> tuple[float, float, float]:
        group = team.split(HOSTS)
        assert group is not None and (group.rank, group.size) == (team.rank % 2, 2)
        x = torch.full((10,), float(team.rank))
        group.start_all_reduce_mean(x).wait()
        reduced, at = float(x[0]), team.now()
        y = torch.full((10,), float(team.rank))
        group.broadcast(y, source=1)
        return reduced, float(y[0]), at + 1000 * (team.now() - at)

    cluster = cluster_of()
    seconds = 40 / 100.0 + 2 * 0.125  # a tenth of NVLink, once (2 x 1/2 of the message)
    sending = 40 / 100.0 + 0.125
    results = cluster.run(main)
    for rank, (reduced, sent, times) in results.items():
        assert (reduced, sent) == ((0.5, 1.0) if rank < 2 else (2.5, 3.0))
        assert times == pytest.approx(seconds + 1000 * sending)
    assert [dict(comm_stats.bytes_sent) for comm_stats in cluster.comm_stats] == [{1: 40}, {0: 80}, {3: 40}, {2: 80}]


def test_leaders_reduce_between_the_hosts_and_others_are_not_in_it() -> None:
    def main(team: SimTeam) -> tuple[float, float]:
        leaders = team.split([[0, 2]])
        x = torch.full((10,), float(team.rank))
        if leaders is not None:
            leaders.start_all_reduce_mean(x).wait()
        return float(x[0]), leave(team)

    took = 40 / 10.0 + 2 * 0.5  # a tenth of the NIC, and the latency of two steps
    assert run(main) == {0: (1.0, took), 1: (1.0, 0.0), 2: (1.0, took), 3: (3.0, 0.0)}


def test_rings_through_one_card_share_it() -> None:
    """Two groups span both hosts at once: the NIC, as slow as a ring here, transfers one after the other."""

    def main(team: SimTeam) -> float:
        group = team.split([[0, 2], [1, 3]])
        assert group is not None
        group.start_all_reduce_mean(torch.zeros(10)).wait()
        return leave(team)

    ends = run(main, nic_bandwidth=10.0, all_reduce_efficiency=1.0)
    assert sorted(ends.values()) == [5.0, 5.0, 9.0, 9.0]
    ends = run(main, nic_bandwidth=1e6, all_reduce_efficiency=1e-5)  # neither needs the whole NIC
    assert list(ends.values()) == pytest.approx([5.0] * 4, abs=1e-3)


def test_only_members_compute_slower_meanwhile() -> None:
    def main(team: SimTeam) -> float:
        leaders = team.split([[0, 2]])
        if leaders is not None:
            leaders.start_all_reduce_mean(torch.zeros(10))
        team.sleep(0.0)
        team.timed(lambda on_bucket: step_result())(None)
        return leave(team)

    ends = run(main)
    assert ends[1] == ends[3] == 3.0
    assert ends[0] == ends[2] == 5.0 + (3.0 - 5.0 / 2)  # at half the speed while it is in flight


def test_a_broadcast_from_the_middle() -> None:
    def main(team: SimTeam) -> float:
        x = torch.full((10,), float(team.rank))
        team.broadcast(x, source=2)
        return float(x[0])

    cluster = cluster_of()
    assert cluster.run(main) == dict.fromkeys(range(4), 2.0)
    assert cluster.now == 40 / 10.0 + 3 * 0.5
    assert [sum(comm_stats.bytes_sent.values()) for comm_stats in cluster.comm_stats] == [40, 0, 40, 40]


def test_a_lost_learner_ends_the_collectives_of_all_groups() -> None:
    def main(team: SimTeam) -> tuple[int, float]:
        group = team.split(HOSTS)
        assert group is not None
        team.sleep(5.0 if team.rank == 1 else 0.0)
        with pytest.raises(LearnerLost) as caught:
            while True:
                group.start_all_gather(torch.zeros(3)).wait()
        return caught.value.rank, team.now()

    results = run(main, faults={"crashes": [{"learner": 1, "at": 2.0}]})
    assert results == dict.fromkeys((0, 2, 3), (1, pytest.approx(2.0, abs=0.2)))


def test_members_must_do_the_same_in_the_same_order() -> None:
    def mixed(team: SimTeam) -> None:
        if team.rank:
            team.broadcast(torch.zeros(4))
        else:
            team.start_all_reduce_mean(torch.zeros(4)).wait()

    with pytest.raises(RuntimeError, match="learner 1 starts it where others start all-reduce"):
        run(mixed)
    with pytest.raises(RuntimeError, match="all-gather 0: learner 1 has 4 elements, others 3"):
        run(lambda team: team.start_all_gather(torch.zeros(3 + team.rank)).wait())


def test_groups_that_make_no_sense_are_rejected() -> None:
    for groups in ([[0, 1], [1, 2]], [[0, 4]], [[1, 0]]):
        with pytest.raises(ValueError, match="groups"):
            run(lambda team, groups=groups: team.split(groups))


def test_alone() -> None:
    team = SingleProcess()
    x = torch.tensor([3.0])
    group = team.split([[0]])
    assert group is team and team.split([]) is None
    assert [y.tolist() for y in team.start_all_gather(x, [1]).wait()] == [[3.0]]
    team.broadcast(x)
    assert x.tolist() == [3.0]
