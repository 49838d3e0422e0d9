"""One learner of a real team: python -m tests.support.train_worker_main STRATEGY EGS OUT FAILS [HOW].

FAILS is the rank that fails in its fifth gradient, -1 for none. HOW is kill (SIGKILL), stop (SIGSTOP) or hang.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from asr_am.distributed.runtime import control_client, step_watch
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.train.gradient import ModelState
from asr_am.train.trainer import train
from tests.support.toy_runs import OPTIONS, STRATEGIES

IMPATIENT = 2.0  # seconds
FAILURES: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(600),
    "preempt": lambda: os.kill(os.getpid(), signal.SIGUSR1),
}


def die_in(kind: type, method: str, number: int, how: str = "kill") -> None:
    """Makes this process fail in call `number`, from 1, of a method."""
    real = getattr(kind, method)
    calls = count(1)

    def fatal(self: Any, *arguments: Any) -> Any:
        if next(calls) == number:
            FAILURES[how]()
        return real(self, *arguments)

    setattr(kind, method, fatal)


def be_impatient() -> None:
    """Shortens the times after which a learner that is stopped or hangs is noticed."""
    control_client.HEARTBEAT_TIMEOUT = IMPATIENT
    step_watch.HANG_TIMEOUT, step_watch.FIRST_BATCHES = 0.5, 3


if __name__ == "__main__":
    strategy, egs_dir, out, fails, how = [*sys.argv[1:], "kill"][:5]
    if how != "kill":
        be_impatient()
    team = connect()
    if team.rank == int(fails) and team.incarnation == 0:
        die_in(ModelState, "backward", 6, how)  # in the second step of a segment
    train(Path(egs_dir), Path(out), OPTIONS, strategy=STRATEGIES[strategy], team=team)
    end_process()
