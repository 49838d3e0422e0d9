"""One learner of a team: python -m scripts.gpu_check.worker DEVICE STRATEGY EGS OUT KILLED."""

from __future__ import annotations

import sys
from pathlib import Path

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.train.trainer import train
from scripts.gpu_check.check import Check
from scripts.gpu_check.examples import STRATEGIES, small_options
from scripts.gpu_check.killing import killed_in_step

if __name__ == "__main__":
    device, name, egs, out, killed = sys.argv[1:]
    strategy = STRATEGIES[name]
    if killed == "True":
        strategy = killed_in_step(strategy, Path(out))
    options = small_options(Check("processes", device, False, Path(out)))
    train(Path(egs), Path(out), options, strategy=strategy, team=connect(), share_gpus=True)
    end_process()
