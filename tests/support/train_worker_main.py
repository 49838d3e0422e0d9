"""One learner of a real team: python -m tests.support.train_worker_main STRATEGY EGS OUT KILLED.

KILLED is the rank that kills itself with SIGKILL in its fifth gradient, -1 for none.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.train.gradient import ModelState
from asr_am.train.trainer import train
from tests.support.toy_runs import OPTIONS, STRATEGIES


def die_in(kind: type, method: str, number: int) -> None:
    """Makes this process kill itself with SIGKILL in call `number`, from 1, of a method."""
    real = getattr(kind, method)
    calls = iter(range(1, number + 1))

    def fatal(self: Any, *arguments: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    setattr(kind, method, fatal)


def die_in_gradient(number: int) -> None:
    die_in(ModelState, "backward", number)


if __name__ == "__main__":
    strategy, egs_dir, out, killed = sys.argv[1:]
    team = connect()
    if team.rank == int(killed) and team.incarnation == 0:
        die_in_gradient(5)
    train(Path(egs_dir), Path(out), OPTIONS, strategy=STRATEGIES[strategy], team=team)
    end_process()
