"""One rank of a real team with parameter servers: python -m tests.support.ps_worker_main STRATEGY EGS OUT KILLED.

KILLED is the rank that kills itself, a worker in its fifth gradient, a server in its fifth update, -1 for none. Ranks 0
to 3 are workers, 4 and 5 servers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from asr_am.distributed.param_server.server import ParameterServer
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.psp import Psp
from asr_am.errors import InputError
from asr_am.train.gradient import ModelState
from asr_am.train.run_setup import StrategyFactory
from asr_am.train.schedule import Anneal
from asr_am.train.trainer import train
from tests.support.toy_runs import OPTIONS
from tests.support.train_worker_main import die_in

WORKERS, SERVERS = 4, 2
SERVED: dict[str, StrategyFactory] = {
    "ps_sync": partial(PsSync, servers=SERVERS, apart=True, timeout=5.0),
    "ps_async": partial(PsAsync, staleness_aware=True, servers=SERVERS, apart=True, timeout=5.0),
    "psp": partial(Psp, servers=SERVERS, apart=True, timeout=5.0, c=3, b=0.5),
}  # fmt: skip

if __name__ == "__main__":
    strategy, egs_dir, out, killed = sys.argv[1:]
    team = connect()
    if team.rank == int(killed) and team.incarnation == 0:
        die_in(*((ModelState, "backward") if team.rank < WORKERS else (ParameterServer, "update")), 5)
    # Stale gradients with momentum need a low rate: at 0.1 training diverged on a busy machine, with a staleness of 8.
    options = replace(OPTIONS, schedule=Anneal(base=0.03)) if strategy == "ps_async" else OPTIONS
    try:
        train(Path(egs_dir), Path(out), options, strategy=SERVED[strategy], team=team, servers=SERVERS)
    except InputError as error:
        print(f"learner {team.rank}: {error}", file=sys.stderr)
        end_process(1)
    end_process()
