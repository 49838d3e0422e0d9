"""Section `messages`: weights from one learner's GPU to another's, through the memory of their host."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.worker_process import end_process
from scripts.gpu_check.check import Check

ELEMENTS, ROUNDS = 41_250_000, 10  # 165 MB
TAG = "weights"


def section(check: Check) -> None:
    count = 1_000_000 if check.small else ELEMENTS
    command = [sys.executable, "-m", __name__, check.device, str(count), str(check.folder / "seconds")]
    launch(command, 2, synchronous=True)
    found = json.loads((check.folder / "seconds").read_text("utf-8"))
    for name, seconds in found["seconds"].items():
        check.row(name, None, f"{1e3 * seconds:.1f} ms, {4e-9 * count / seconds:.1f} GB/s", seconds=seconds)
    check.row("what arrives", found["right"], "as sent" if found["right"] else "not as sent")


def learner(device: str, count: int, out: Path) -> None:
    """Sends weights to and fro. Learner 0 writes how long sending and the whole way took."""
    team = connect()
    team.register_tag(TAG, count)
    weights, received = torch.zeros(count, device=device), torch.empty(count, device=device)
    sending, whole, right = [], [], True
    for number in range(2 * ROUNDS):
        sender = number % 2
        weights.fill_(number)
        team.gather(torch.zeros(0))
        begin = time.perf_counter()
        if team.rank == sender:
            team.send(1 - sender, TAG, number, weights)
            sending.append(time.perf_counter() - begin)
        else:
            message = team.recv(TAG, sender)
            assert message is not None
            received.copy_(message.tensors[0])
            right = right and bool((received == number).all())
            del message
            whole.append(time.perf_counter() - begin)
    if team.rank == 0:
        seconds = {"from the GPU": statistics.median(sending), "to the other GPU": statistics.median(whole)}
        out.write_text(json.dumps({"seconds": seconds, "right": right}), encoding="utf-8")
    team.close()


if __name__ == "__main__":
    learner(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    end_process()
