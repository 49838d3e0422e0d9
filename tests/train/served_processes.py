"""One learner of a real team with parameter servers: python -m tests.train.served_processes STRATEGY EGS OUT KILLED.

KILLED: the learner that kills itself, as `kill -9` does, in its fifth gradient; -1: nobody. Servers are beside learners
0 and 2.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from asr_am.distributed.process.connect import connect
from asr_am.distributed.process.ending import end_process
from asr_am.distributed.ps_async import PsAsync
from asr_am.distributed.ps_sync import PsSync
from asr_am.distributed.psp import Psp
from asr_am.errors import InputError
from asr_am.train.loop import train
from asr_am.train.material import StrategyFactory
from tests.train.processes import die_in_gradient
from tests.train.test_virtual import OPTIONS

SERVED: dict[str, StrategyFactory] = {
    "ps_sync": partial(PsSync, servers=2, timeout=20.0), "ps_async": partial(PsAsync, servers=2, timeout=20.0),
    "psp": partial(Psp, servers=2, timeout=20.0, c=3, b=0.5),
}  # fmt: skip

if __name__ == "__main__":
    strategy, egs_dir, out, killed = sys.argv[1:]
    team = connect()
    if team.rank == int(killed) and team.incarnation == 0:
        die_in_gradient(5)
    try:
        train(Path(egs_dir), Path(out), OPTIONS, strategy=SERVED[strategy], team=team)
    except InputError as error:
        print(f"learner {team.rank}: {error}", file=sys.stderr)
        end_process(1)
    end_process()
