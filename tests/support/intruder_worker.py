"""One learner of a team that is attacked: python -m tests.support.intruder_worker STRATEGY EGS OUT [PROXY].

Learner 1 reaches the launcher through the recording proxy at PROXY (tcp://host:port), if there is one. Each learner
writes its process number to OUT/<rank>.pid and the address of its transport to OUT/<rank>.address. Learner 0 stays in
its third gradient until OUT has a file `over`.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.train.gradient import ModelState
from asr_am.train.trainer import train
from tests.support.toy_runs import OPTIONS, STRATEGIES


def wait_in_gradient(number: int, over: Path) -> None:
    """Makes this process wait in call `number`, from 1, of `ModelState.backward` until the file `over` exists."""
    real = ModelState.backward
    calls = count(1)

    def backward(learner: ModelState, *arguments: Any) -> Any:
        held = next(calls) == number
        while held and not over.exists():
            time.sleep(0.02)
        return real(learner, *arguments)

    ModelState.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    strategy, egs_dir, out, *proxy = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]
    if proxy and os.environ["RANK"] == "1":
        os.environ["ASR_AM_SUPERVISOR"] = proxy[0]
    team = connect()
    (out / f"{team.rank}.pid").write_text(str(os.getpid()))
    (out / f"{team.rank}.tmp").write_text(team._transport.address)
    (out / f"{team.rank}.tmp").rename(out / f"{team.rank}.address")
    if team.rank == 0:
        wait_in_gradient(3, out / "over")
    train(egs_dir, out, OPTIONS, strategy=STRATEGIES[strategy], team=team)
    end_process()
