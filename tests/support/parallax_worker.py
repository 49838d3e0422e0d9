"""Trains in one learner process of tests/parallax/test_processes.py.

    python -m tests.support.parallax_worker FOLDER CASE ...

Only the last case may have servers, because a team can have only one runner with servers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.parallax import Config
from tests.support.toy_lm import BATCHES, make_batches, train

CASES = {
    "on": ("adam", Config(clip_norm=0.3, servers=2)),
    "off": (
        "adam",
        Config(
            clip_norm=0.3, hybrid=False, local_aggregation=False, after_aggregation=False, gather_on_servers=False,
            servers=2,
        ),
    ),
    "all-gather": ("adam", Config(clip_norm=0.3, path="all-gather")),
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    team = connect(timeout=60)
    for case in sys.argv[2:]:
        trained = train(team, *CASES[case], make_batches(BATCHES))
        torch.save(vars(trained), Path(sys.argv[1]) / f"{case}.{team.rank}.pt")
    team.close()
    end_process()
