"""Faults that delay the messages of one tag."""

from __future__ import annotations

import pytest
import torch

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.simulator import SimTeam
from asr_am.errors import InputError
from tests.support.round_cluster import run


def test_only_messages_of_the_tag_are_late() -> None:
    def main(team: SimTeam) -> tuple[float, float] | None:
        for tag in ("weights", "push"):
            team.register_tag(tag, 1)
            if team.rank == 0:
                team.send(1, tag, 0, torch.zeros(1))
        if team.rank != 1:
            return None
        times = []
        for tag in ("push", "weights"):
            assert team.recv(tag) is not None
            times.append(team.now())
        return times[0], times[1]

    faults = {"late_share": 1.0, "late_seconds": 100.0, "late_tag": "weights"}
    times = run(main, learners=2, faults=faults)[1]
    assert times is not None and times[0] < 1 and times[1] > 100


def test_a_tag_is_text() -> None:
    with pytest.raises(InputError, match=r"cluster\.faults\.late_tag=3: must be text"):
        Faults.build({"late_tag": 3})
