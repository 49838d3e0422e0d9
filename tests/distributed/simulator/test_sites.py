"""Clusters of two sites: what the link between them costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asr_am.distributed.cluster_config import Cluster
from asr_am.distributed.simulator import SimTeam
from asr_am.errors import InputError
from tests.support.round_cluster import VALUES, run

TWO_SITES = {"hosts": 4, "devices_per_host": 1, "sites": 2, "site_bandwidth": 4.0, "site_latency": 2.0}


def test_messages_to_another_site_queue_at_the_link() -> None:
    """A message of 40 bytes takes 0.4 s through a NIC and 10 s through the link."""

    def main(team: SimTeam) -> tuple[float, int]:
        team.register_tag("w", 10)
        team.sleep(team.rank * 0.1)
        team.send({0: 2, 1: 3, 2: 1, 3: 0}[team.rank], "w", 0, torch.ones(10))
        message = team.recv("w", timeout=100.0)
        assert message is not None
        return round(team.now(), 9), message.source

    # into site 1: 0's at once, 1's after it. The other way nothing of theirs is in the way.
    assert run(main, **TWO_SITES) == {2: (12.5, 0), 3: (22.5, 1), 1: (12.7, 2), 0: (22.7, 3)}
    alone = run(main, **TWO_SITES | {"sites": 1})
    assert alone[2] == (0.9, 0)


def test_a_ring_crosses_the_link_twice_in_each_round() -> None:
    """1.5 x 40 bytes, 3 s of NICs' latency, and two rounds with two crossings of 2 s."""
    assert ends(lambda team: team.start_all_reduce_mean(torch.zeros(10))) == {60 / 4.0 + 3.0 + 8.0}


def test_a_chain_crosses_the_link_once() -> None:
    """40 bytes, 1.5 s of NICs' latency, and a crossing of 2 s."""

    def main(team: SimTeam) -> float:
        team.broadcast(torch.zeros(10))
        return team.now()

    assert set(run(main, **TWO_SITES).values()) == {40 / 4.0 + 1.5 + 2.0}


def test_what_all_send_to_all_shares_the_link() -> None:
    """Two learners of a site send 40 bytes to each of two others."""
    assert ends(lambda team: team.start_all_gather(torch.zeros(10))) == {160 / 4.0 + 2.0 + 0.5}


def ends(start: Callable[[SimTeam], Any]) -> set[float]:
    """Returns the times at which a collective ends."""

    def main(team: SimTeam) -> float:
        start(team).wait()
        return team.now()

    return set(run(main, **TWO_SITES).values())


def test_groups_of_a_site_do_not_use_the_link() -> None:
    def main(team: SimTeam) -> float:
        group = team.split([[0, 1], [2, 3]])
        assert group is not None
        group.start_all_reduce_mean(torch.zeros(10)).wait()
        return team.now()

    assert run(main, **TWO_SITES) == run(main, **TWO_SITES | {"sites": 1})


def test_hosts_must_be_shared_equally() -> None:
    with pytest.raises(InputError, match=r"sites=3: does not divide cluster\.hosts=4"):
        Cluster.build({**VALUES, "hosts": 4, "sites": 3})
