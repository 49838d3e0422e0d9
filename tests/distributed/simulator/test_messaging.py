from __future__ import annotations

from functools import partial

import pytest
import torch

from asr_am.distributed.simulator import SimTeam, network
from asr_am.distributed.team import Message
from tests.support.round_cluster import cluster_of, run, segment

W = torch.ones(25)  # 100 bytes: 1 s through a NIC, 0.1 s inside a host


def clocks(team: SimTeam, count: int, tag: str = "w", source: int | None = None) -> list[tuple[float, int, int]]:
    """Returns times, sources and clocks of the next messages."""
    got = []
    for _ in range(count):
        message = team.recv(tag, source, timeout=50.0)
        source_and_clock = (-1, -1) if message is None else (message.source, message.clock)
        got.append((round(team.now(), 9), *source_and_clock))
    return got


def test_a_message_is_a_copy_and_takes_the_links_time() -> None:
    def main(team: SimTeam) -> object:
        team.register_tag("w", 25, 0)
        if team.rank == 0:
            x = torch.arange(25.0)
            for to in (1, 2):
                team.send(to, "w", 7, x, x[:0])
            x.zero_()
            return team.now()
        if team.rank == 3:
            return None
        message = team.recv("w")
        assert message is not None and torch.equal(message.tensors[0], torch.arange(25.0))
        assert (message.source, message.tag, message.clock, len(message.tensors[1])) == (0, "w", 7, 0)
        return round(team.now(), 9)

    cluster = cluster_of()
    assert cluster.run(main) == {0: 0.0, 1: 0.225, 2: 1.5, 3: None}
    assert cluster.comm_stats[0].bytes_sent == {1: 100, 2: 100} and cluster.comm_stats[0].messages_sent == 2


def test_messages_of_a_learner_left_behind_by_its_team_are_rejected() -> None:
    """A stopped learner goes on after the others have become another team, before its host hears of it."""

    def main(team: SimTeam) -> object:
        team.register_tag("w", 25)
        if team.rank == 2:
            team.sleep(1.0)
            cluster.learners[2].run = "an earlier team"
        if team.rank in (1, 2):
            team.send(0, "w", 0, W)
        return clocks(team, 2) if team.rank == 0 else None

    cluster = cluster_of()
    assert cluster.run(main)[0] == [(0.225, 1, 0), (50.225, -1, -1)]
    assert cluster.comm_stats[0].rejected == 1


def test_messages_queue_at_their_hosts_nics() -> None:
    """0 and 1 share a host and its outgoing NIC, and so do 2 and 3. 4 and 5 receive on a third host, 6 on a fourth."""

    def main(team: SimTeam) -> list[tuple[float, int, int]]:
        team.register_tag("w", 25)
        if team.rank < 4:
            team.sleep(team.rank * 0.001)
            team.send({0: 4, 1: 6, 2: 5, 3: 6}[team.rank], "w", 0, W)
            team.sleep(10.0)
            return []
        return clocks(team, {4: 1, 5: 1, 6: 2, 7: 0}[team.rank])

    results = run(main, 8, hosts=4)
    assert results[4] == [(1.5, 0, 0)]  # alone
    assert results[6] == [(1.503, 3, 0), (2.503, 1, 0)]  # 3's at once, while 2's waits. 1's leaves after 0's
    assert results[5] == [(2.503, 2, 0)]  # comes in after 0's, and leaves after 3's


@pytest.mark.parametrize(("pieces", "ends"), [(1, [1.5, 2.5]), (4, [2.5, 2.75])])
def test_connections_share_a_card(pieces: int, ends: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages of 1 s leave host 0 at once, for two other hosts. Each last piece passes one NIC after the other."""
    monkeypatch.setattr(network, "LEAST_PIECE", 1.0)

    def main(team: SimTeam) -> list[tuple[float, int, int]]:
        team.register_tag("w", 25)
        if team.rank == 0:
            team.send(1, "w", 0, W)
            team.send(2, "w", 0, W)
        return clocks(team, 1 if team.rank else 0)

    results = run(main, 3, hosts=3, devices_per_host=1, message_pieces=pieces)
    assert [results[rank][0][0] for rank in (1, 2)] == ends


def test_messages_of_a_connection_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two messages of 1 s to the same learner the second leaves after the first."""
    monkeypatch.setattr(network, "LEAST_PIECE", 1.0)

    def main(team: SimTeam) -> list[list[tuple[float, int, int]]]:
        for tag in ("v", "w"):
            team.register_tag(tag, 25)
            if team.rank == 0:
                team.send(1, tag, 0, W)
        return [clocks(team, 1, tag) for tag in ("v", "w")] if team.rank else []

    assert run(main, 2, hosts=2, devices_per_host=1, message_pieces=4)[1] == [[(1.75, 0, 0)], [(2.75, 0, 0)]]


def test_messages_of_different_hosts_do_not_wait_for_each_other() -> None:
    def main(team: SimTeam) -> list[tuple[float, int, int]]:
        team.register_tag("w", 25)
        team.send((team.rank + 4) % 8, "w", 0, W)
        return clocks(team, 1)

    results = run(main, 8, hosts=8, devices_per_host=1)
    assert {got[0][0] for got in results.values()} == {1.5}


@pytest.mark.parametrize("order", ["in turn", "by rank"])
def test_all_to_all_uses_every_card_all_the_time(order: str) -> None:
    """16 hosts send to 15 others, 1 s each. No host can be done before 15 s."""

    def main(team: SimTeam) -> float:
        team.register_tag("w", 25)
        others = [(team.rank + k) % 16 for k in range(1, 16)] if order == "in turn" else range(16)
        for other in others:
            if other != team.rank:
                team.send(other, "w", 0, W)
        return max(now for now, _, _ in clocks(team, 15))

    results = run(main, 16, hosts=16, devices_per_host=1, nic_latency=0.0)
    assert max(results.values()) <= (15.0 if order == "in turn" else 1.5 * 15.0)


def test_a_message_that_waits_for_its_receiver_does_not_block_others() -> None:
    def main(team: SimTeam) -> list[tuple[float, int, int]]:
        team.register_tag("w", 25)
        if team.rank in (0, 1):
            team.send(2, "w", 0, W)
        if team.rank == 1:
            team.send(3, "w", 0, W)  # while 2 receives from 0
        return clocks(team, {0: 0, 1: 0, 2: 2, 3: 1}[team.rank])

    results = run(main, 4, hosts=4, devices_per_host=1)
    assert (results[2], results[3]) == ([(1.5, 0, 0), (2.5, 1, 0)], [(1.5, 1, 0)])


def test_a_collective_and_messages_share_the_cards() -> None:
    """An all-reduce needs 0.6 s of the cards from 0.5 s on, when messages that began before have left."""

    def main(team: SimTeam) -> tuple[list[tuple[float, int, int]], float]:
        team.register_tag("w", 25)
        half, got = W[:13], []
        team.register_tag("half", 13)
        if team.rank == 0:
            team.send(2, "half", 0, half)  # until 0.52
        work = team.start_all_reduce_mean(torch.zeros(10))
        if team.rank == 0:
            team.send(2, "w", 0, W)  # waits for the all-reduce
        work.wait()
        ended = team.now()
        if team.rank == 2:
            got = clocks(team, 1, "half") + clocks(team, 1)
        return got, round(ended, 9)

    results = run(main, nic_latency=0.0)
    assert results[2] == ([(6.52, 0, 0), (6.52, 0, 0)], 6.52) and results[0][1] == 6.52


def test_one_message_at_a_time_and_the_latest_replaces_the_one_that_waits() -> None:
    def main(team: SimTeam) -> object:
        team.register_tag("w", 25)
        team.register_tag("other", 25)
        if team.rank == 0:
            for clock in range(4):
                team.send(2, "w", clock, W)
            team.send(2, "other", 9, W)  # another tag has a credit of its own
            team.sleep(30.0)
        if team.rank == 2:
            team.sleep(10.0)
            first = clocks(team, 3)
            return first, clocks(team, 1, "other")
        return None

    cluster = cluster_of()
    results = cluster.run(main)
    # 0 has arrived at 1.5 s; receiving it releases 3, the last one; 1 and 2 were overwritten
    assert results[2] == ([(10.0, 0, 0), (11.5, 0, 3), (61.5, -1, -1)], [(61.5, 0, 9)])
    assert cluster.comm_stats[0].overwritten == 2 and cluster.comm_stats[0].messages_sent == 3


def test_messages_come_in_order_of_arrival_or_from_a_chosen_source() -> None:
    def main(team: SimTeam) -> object:
        team.register_tag("w", 25)
        if team.rank in (0, 2, 3):
            team.sleep({0: 5.0, 2: 0.0, 3: 5.0}[team.rank])
            team.send(1, "w", 0, W)
            team.sleep(20.0)
            return None
        team.sleep(10.0)
        return [got[1] for got in clocks(team, 1, source=3) + clocks(team, 2)]

    assert run(main)[1] == [3, 2, 0]


def test_who_waits_for_nothing_waits_until_the_timeout() -> None:
    def main(team: SimTeam) -> tuple[Message | None, float]:
        return team.recv("w", timeout=2.5), team.now()

    cluster = cluster_of()
    assert set(cluster.run(main).values()) == {(None, 2.5)}
    assert cluster.comm_stats[0].waiting_seconds == 2.5


@pytest.mark.parametrize("lengths", [(), (24,), (25, 1)], ids=str)
def test_messages_that_were_not_accepted_are_rejected_and_counted(lengths: tuple[int, ...]) -> None:
    def main(team: SimTeam) -> object:
        team.register_tag("w", *lengths)
        if team.rank == 0:
            team.send(1, "w", 0, W)
            team.send(1, "unheard of", 0, W)
            team.sleep(1.0)
            team.send(1, "w", 1, W)  # the credit came back
            return None
        return team.recv("w", timeout=10.0)

    cluster = cluster_of(2)
    assert cluster.run(main)[1] is None
    assert cluster.comm_stats[1].rejected == 3 and cluster.comm_stats[0].messages_sent == 3


def test_late_and_lost_messages_are_counted_and_give_their_credit_back() -> None:
    sent = 400

    def main(team: SimTeam) -> tuple[list[int], list[float]]:
        team.register_tag("w", 25)
        seen, delays = [], []
        if team.rank == 0:
            for clock in range(sent):
                team.send(2, "w", clock, W)
                team.sleep(20.0)
        while team.rank == 2 and (message := team.recv("w", timeout=100.0)) is not None:
            seen.append(message.clock)
            delays.append(team.now() - 20.0 * message.clock)
        return seen, delays

    cluster = cluster_of(3, faults={"lost_share": 0.2, "late_share": 0.1, "late_seconds": 7.0})
    seen, delays = cluster.run(main)[2]
    comm_stats = cluster.comm_stats[0]
    assert comm_stats.messages_sent == sent == len(seen) + comm_stats.lost and comm_stats.overwritten == 0
    assert comm_stats.lost == comm_stats.faults["lost"] and 50 < comm_stats.lost < 110
    late = sum(delay > 2.0 for delay in delays)
    assert {round(delay, 6) for delay in delays} == {1.5, 8.5}
    assert late <= comm_stats.faults["late"] and 20 < late < 60


def test_only_others_can_be_written_to() -> None:
    def main(team: SimTeam) -> None:
        for to in (team.rank, 4, -1):
            with pytest.raises(ValueError, match=f"learner {team.rank} of 4 cannot send to rank {to}"):
                team.send(to, "w", 0)

    run(main)


def test_a_dead_source_is_not_waited_for() -> None:
    def main(team: SimTeam) -> object:
        team.register_tag("w", 25)
        if team.rank == 0:
            team.send(1, "w", 5, W)
            team.send(2, "w", 5, W)
            team.sleep(10.0)
        if team.rank == 1:
            team.sleep(3.0)
            team.send(0, "w", 0, W)  # to the dead
            return clocks(team, 2, source=0)  # what it left, then nothing, at once
        if team.rank == 2:
            return clocks(team, 2, source=0)  # is told when it dies
        return None

    cluster = cluster_of(3, faults={"crashes": [{"learner": 0, "at": 2.0}]})
    assert cluster.run(main) == {1: [(3.0, 0, 5), (3.0, -1, -1)], 2: [(1.5, 0, 5), (2.0, -1, -1)]}
    assert cluster.comm_stats[1].messages_sent == 0


def test_messages_of_an_earlier_incarnation_is_rejected() -> None:
    """Learner 0 sends at 0 s and dies at 1 s. Its message to 2 is still in flight when it is back."""

    def main(team: SimTeam) -> object:
        team.register_tag("w", 25)
        if team.rank == 0:
            for to in (1, 2):
                team.send(to, "w", team.incarnation, W)
            team.sleep(20.0)
            return None
        team.sleep(5.0)
        return clocks(team, 2, source=0)

    cluster = cluster_of(3, faults={"crashes": [{"learner": 0, "at": 1.0, "restart_after": 0.25}]})
    results = cluster.run(main)
    assert results[1] == results[2] == [(5.0, 0, 1), (21.25, -1, -1)]
    assert [comm_stats.rejected for comm_stats in cluster.comm_stats] == [0, 1, 1]


def test_messages_to_an_earlier_incarnation_vanish() -> None:
    def main(team: SimTeam) -> object:
        team.register_tag("w", 25)
        if team.rank == 2:
            if team.incarnation:
                team.leases(segment(1), synchronous=False)  # the others hear of it
            team.sleep(2.0)
            return clocks(team, 2, source=0), clocks(team, 1, source=3)
        if team.rank == 0:
            for clock in range(2):  # one in flight, one that waits for its credit
                team.send(2, "w", clock, W)
            team.sleep(4.0)
            team.send(2, "w", 2, W)
            team.sleep(1.5)
        if team.rank == 3:
            team.send(2, "w", 0, W)  # there since 0.225 s, never collected
        return None

    cluster = cluster_of(4, faults={"crashes": [{"learner": 2, "at": 1.0, "restart_after": 0.25}]})
    assert cluster.run(main)[2] == ([(5.5, 0, 2), (5.5, -1, -1)], [(5.5, -1, -1)])
    assert cluster.comm_stats[2].rejected == 0


def test_a_restarted_learner_has_accepted_nothing_yet() -> None:
    def main(team: SimTeam) -> object:
        if team.rank == 0:
            team.sleep(2.0)
            team.send(1, "w", 0, W)
            team.sleep(2.0)
            return None
        if team.incarnation == 0:
            team.register_tag("w", 25)
        else:
            team.leases(segment(1), synchronous=False)  # the others hear of it
        team.sleep(2.0)
        team.register_tag("w", 25)
        return team.recv("w", timeout=1.0)

    cluster = cluster_of(2, faults={"crashes": [{"learner": 1, "at": 1.0, "restart_after": 0.25}]})
    assert cluster.run(main)[1] is None and cluster.comm_stats[1].rejected == 1


def test_what_is_lost_of_a_learner_does_not_depend_on_what_others_send() -> None:
    def main(writers: int, team: SimTeam) -> list[tuple[float, int, int]]:
        team.register_tag("w", 25)
        for clock in range(50 if team.rank < writers else 0):
            team.send(3, "w", clock, W)
            team.sleep(10.0)
        return clocks(team, 30, source=0) if team.rank == 3 else []

    def lose(writers: int) -> list[int]:
        cluster = cluster_of(faults={"lost_share": 0.3})
        return [clock for _, _, clock in cluster.run(partial(main, writers))[3]]

    alone, among_others = lose(1), lose(3)
    assert alone == among_others != list(range(30))


def test_clocks_that_decrease_are_rejected() -> None:
    def main(team: SimTeam) -> object:
        team.register_tag("w", 25)
        if team.rank == 0:
            for clock in (3, 3, 2, 4):
                team.send(1, "w", clock, W)
                team.sleep(10.0)
            return None
        return [message and message.clock for message in (team.recv("w", timeout=25.0) for _ in range(4))]

    cluster = cluster_of(2)
    assert cluster.run(main)[1] == [3, 3, 4, None] and cluster.comm_stats[1].rejected == 1
