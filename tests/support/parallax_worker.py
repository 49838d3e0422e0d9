"""A learner for test_processes.py, as a process of its own.

python learner.py FOLDER CASE ..., of which only the last has servers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from tests.parallax.test_processes import CASES
from tests.support.toy_lm import BATCHES, make_batches, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    team = connect(timeout=60)
    for case in sys.argv[2:]:
        found = train(team, *CASES[case], make_batches(BATCHES))
        torch.save(vars(found), Path(sys.argv[1]) / f"{case}.{team.rank}.pt")
    team.close()
    end_process()
