"""Single-device program that tests start on several machines: python parallax_program.py FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.parallax import Config
from tests.support.toy_lm import EVERY, make_batches, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "fail":
        sys.exit(3)
    team = connect(timeout=60)
    trained = train(team, "sgd", Config(clip_norm=0.3), make_batches(4 * EVERY))
    seen = {
        "hosts": list(team.hosts),
        "devices": os.environ["CUDA_VISIBLE_DEVICES"],
        "losses": trained.losses,
        "weights": {name: w.tolist() for name, w in trained.weights[0].items()},
    }
    (Path(sys.argv[1]) / f"{team.rank}.json").write_text(json.dumps(seen))
    team.close()
    end_process()
