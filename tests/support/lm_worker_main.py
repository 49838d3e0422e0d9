"""One learner of a language model's real team: python -m tests.support.lm_worker_main OUT FAILS.

FAILS is the rank that kills itself in its 12th gradient, -1 for none.
"""

from __future__ import annotations

import sys
from pathlib import Path

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.parallax.strategy import Parallax
from asr_am.train.lm import LmState
from asr_am.train.trainer import train_run
from tests.support.toy_lm_run import ADAGRAD, make_run
from tests.support.train_worker_main import die_in

if __name__ == "__main__":
    team = connect()
    if team.rank == int(sys.argv[2]) and team.incarnation == 0:
        die_in(LmState, "backward", 12)
    train_run(make_run(Path(sys.argv[1]), ADAGRAD, Parallax, learners=team.size), team)
    end_process()
