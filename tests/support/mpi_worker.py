"""A process of test_mpi.py: mpirun -n 4 python -m tests.support.mpi_worker SCENARIO FOLDER [STRATEGY]."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.runtime.mpi_environment import mpi_environment
from asr_am.distributed.runtime.mpi_team import connect_mpi
from asr_am.distributed.runtime.team import ProcessTeam
from tests.support.soak import STRATEGIES as ALL
from tests.support.synchronous_worker import ROUNDED, STRATEGIES, collectives, train

LARGE = 300_001


def messages(team: ProcessTeam, folder: Path) -> None:
    """Sends large and small messages between all, faster than they are received, and idles for a second."""
    team.register_tag("w", LARGE, 3)
    team.register_tag("last")
    team.gather(torch.zeros(0))
    others = [other for other in range(team.size) if other != team.rank]
    for clock in range(10):
        for other in others:
            team.send(other, "w", clock, torch.full((LARGE,), float(team.rank)), torch.full((3,), clock).int())
        for other in others:
            message = team.recv("w", other)
            assert message is not None and message.clock == clock and (message.tensors[0] == other).all()
            assert message.tensors[1].tolist() == [clock] * 3
    assert team.recv("w", timeout=0.05) is None
    before = time.process_time()
    team.sleep(1.0)
    torch.save({"busy": time.process_time() - before, "hosts": list(team.hosts)}, folder / f"messages.{team.rank}.pt")


def fails(team: ProcessTeam, folder: Path) -> None:
    """Ends one process while the others wait for it."""
    if team.rank == 1:
        raise RuntimeError("this learner has failed")
    team.gather(torch.zeros(0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(mpi_environment(os.environ))
    scenario, path = sys.argv[1], Path(sys.argv[2])
    wire: WireDtype = "bfloat16" if scenario == "rounded" else "float32"
    size = int(os.environ["WORLD_SIZE"])
    own = connect_mpi(Faults(), size=size, synchronous=scenario != "asynchronous", wire=wire)
    assert own is not None
    try:
        if scenario == "synchronous":
            collectives(own, path)
            messages(own, path)
            train(own, path, ROUNDED | STRATEGIES)
        elif scenario == "rounded":
            train(own, path, ROUNDED)
        elif scenario == "asynchronous":
            train(own, path, {sys.argv[3]: ALL[sys.argv[3]]})
        else:
            fails(own, path)
    finally:
        own.close()
