"""One learner that `launch` or mpirun has started: python -m scripts.gpu_check.worker DEVICE STRATEGY EGS OUT DIES."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.mpi_environment import mpi_environment
from asr_am.distributed.runtime.mpi_team import connect_mpi
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.train.trainer import train
from scripts.gpu_check.check import Check
from scripts.gpu_check.examples import ASYNCHRONOUS, STRATEGIES, small_options
from scripts.gpu_check.killing import killed_in_step


def prepare(*_: str) -> None:
    """Importing this module is all that a learner needs before it is forked."""


def main() -> None:
    device, name, egs, out, killed = sys.argv[1:]
    strategy = STRATEGIES[name]
    if killed == "True":
        strategy = killed_in_step(strategy, Path(out))
    by_mpi = mpi_environment(os.environ)
    if by_mpi:
        os.environ |= by_mpi
        size = int(os.environ["WORLD_SIZE"])
        team = connect_mpi(Faults(), size=size, synchronous=name not in ASYNCHRONOUS, device=device)
        assert team is not None
    else:
        team = connect()
    options = small_options(Check("processes", device, False, Path(out)))
    train(Path(egs), Path(out), options, strategy=strategy, team=team, share_gpus=True)
    if not by_mpi:
        end_process()


if __name__ == "__main__":
    main()
