"""A learner that `fork_server` forks: python -m tests.support.forked_learner FOLDER [STAY].

Learners 0 and 1 end with their rank as status without STAY, 2 kills itself, and others stay.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

prepared = 0


def prepare(folder: str, *_: str) -> None:
    global prepared
    prepared += 1
    with Path(folder, "servers").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    said = {"prepared": prepared, "pid": os.getpid(), "session": os.getsid(0), "common": os.environ["COMMON"]}
    (folder / f".{rank}").write_text(json.dumps(said), encoding="utf-8")
    (folder / f".{rank}").rename(folder / f"{rank}.json")
    if rank == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank in ("0", "1") and len(sys.argv) == 2:
        sys.exit(int(rank))
    time.sleep(600)
