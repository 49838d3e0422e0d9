"""Worker processes of test_synchronous.py: python -m tests.support.synchronous_worker SCENARIO FOLDER."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import LearnerLost, Lease, SegmentRecord, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.runtime.torch_group import TorchBackend, TorchGroup
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.powersgd import Powersgd
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import CommStats
from tests.support.toy_problem import Problem
from tests.support.toy_training import MakeStrategy, ToyRun

PROBLEM = Problem(batches=43, epochs=1)
STRATEGIES: dict[str, MakeStrategy] = {
    "gtc": partial(Gtc, threshold=20.0, bucket=30), "gtc dense": partial(Gtc, threshold=20.0, dense_above=0.0),
    "bmuf": partial(Bmuf, block_size=3), "htm": partial(Htm, group_size=2, threshold=20.0, block_size=3),
}  # fmt: skip

SUPER_LEARNERS = partial(Adpsgd, group_size=2, timeout=2.0)  # a message to a learner that is not ready yet is lost
ROUNDED: dict[str, MakeStrategy] = {
    "sync": Sync, "hybrid": Hybrid, "dpsgd": partial(Dpsgd, mixing="ring"), "bmuf": partial(Bmuf, block_size=3),
    "gtc": partial(Gtc, threshold=20.0), "powersgd": partial(Powersgd, rank=1),
}  # fmt: skip
"""Strategies of test_real_learners_round_as_virtual_ones."""


class OwnRun(ToyRun):
    """A run that does not know the gradients of other processes."""

    def audit(self, record: SegmentRecord, launch: str) -> None:
        pass


def train(team: ProcessTeam, folder: Path, strategies: dict[str, MakeStrategy]) -> None:
    """Trains with each strategy in turn. Saves the weights [N] and the bytes sent to each rank."""
    for name, make in strategies.items():
        before = team.comm_stats.bytes_sent.copy()
        life = OwnRun(PROBLEM, make).run_learner(team)
        sent = {to: count - before[to] for to, count in team.comm_stats.bytes_sent.items() if count > before[to]}
        loss = life.totals[-1].mean_loss / life.totals[0].mean_loss
        found = {"replica": life.replica, "sent": sent, "loss": loss, "metrics": dict(life.strategy.metrics)}
        torch.save(found, folder / f"{name}.{team.rank}.pt")


def collectives(team: ProcessTeam, folder: Path) -> None:
    """Makes every call of `Group`."""
    pairs, ends, single = team.split([[0, 1], [2, 3]]), team.split([[0, 3]]), team.split([[r] for r in range(4)])
    assert pairs is not None and single is not None and single.size == 1
    x = torch.full((5,), float(team.rank))
    pairs.broadcast(x, source=1)
    rows = team.start_all_gather(torch.arange(team.rank, dtype=torch.int32), range(4)).wait()
    numbers = pairs.start_all_gather(torch.tensor([team.rank])).wait()
    y = torch.full((3,), float(team.rank))
    if ends is not None:
        ends.start_all_reduce_mean(y).wait()
    z = torch.full((2,), float(team.rank))
    team.broadcast(z, source=2)
    if isinstance(team._backend, TorchBackend):
        _through_cpu(team)
    found = {"x": x, "y": y, "z": z, "numbers": torch.cat(numbers), "rows": torch.cat(rows)}
    torch.save(found, folder / f"collectives.{team.rank}.pt")


def _through_cpu(team: ProcessTeam) -> None:
    """Checks the calls of a group whose tensors are sent as copies, as those of GPUs that several learners share."""
    assert dist.group.WORLD is not None
    backend = team._backend
    assert isinstance(backend, TorchBackend)
    everyone = TorchGroup(dist.group.WORLD, range(4), team.rank, CommStats(), backend.complete, through_cpu=True)
    x, own = torch.full((5,), float(team.rank)), torch.full((5,), float(team.rank))
    work = everyone.start_all_reduce_mean(x)
    backend.gather(torch.zeros(0))  # all learners have started theirs
    assert torch.equal(x, own), "the tensor itself was sent"
    work.wait()
    assert x.tolist() == [1.5] * 5
    rows = everyone.start_all_gather(torch.arange(team.rank, dtype=torch.int32), range(4)).wait()
    assert torch.cat(rows).tolist() == [0, 0, 1, 0, 1, 2]
    everyone.broadcast(own, source=2)
    assert own.tolist() == [2.0] * 5


def lost(team: ProcessTeam, folder: Path) -> None:
    """Kills learner 3 between two collectives of its group. The other group must notice, too."""
    pairs = team.split([[0, 1], [2, 3]])
    assert pairs is not None
    for step in range(1000):
        if team.rank == 3 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            pairs.start_all_gather(torch.zeros(1000)).wait()
        except LearnerLost as error:
            torch.save({"lost": error.rank}, folder / f"lost.{team.rank}.pt")
            team.close()
            end_process(1)
        time.sleep(0.02)


def half(team: ProcessTeam, folder: Path) -> None:
    """Kills learner 3 in the middle of an all-reduce in two buckets. The others must not apply the half they have."""
    params = FlatParams(nn.Linear(1000, 10))
    optimizer = Optimizer(params, OptimizerOptions())
    optimizer.lr = 0.1
    step, middle = 0, len(params) // 2

    def gradient(on_bucket: BucketHook | None) -> StepResult:
        assert on_bucket is not None
        params.g.fill_(team.rank)
        on_bucket(middle, len(params))
        if team.rank == 3 and step == 3:
            time.sleep(0.2)  # the first bucket is complete
            os.kill(os.getpid(), signal.SIGKILL)
        on_bucket(0, middle)
        return StepResult(Lease(0, 0, 0, 1), 1, 1, 0.1, torch.zeros(()), torch.zeros(()))

    strategy = Sync(params, optimizer, team)
    before = params.w.clone()
    try:
        while step < 10:
            before = params.w.clone()
            strategy.step(gradient)
            step += 1
    except LearnerLost as error:
        reduced = bool((params.g[middle:] == 1.5).all())
        found = {"lost": error.rank, "step": step, "same": torch.equal(params.w, before), "half": reduced}
        torch.save(found, folder / f"half.{team.rank}.pt")
        team.close()
        end_process(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    own = connect(timeout=60, wire="bfloat16" if sys.argv[1] == "rounded" else "float32")
    scenarios = {
        "train": partial(train, strategies=STRATEGIES | {"super-learners": SUPER_LEARNERS}),
        "rounded": partial(train, strategies=ROUNDED), "collectives": collectives, "lost": lost, "half": half,
    }  # fmt: skip
    scenarios[sys.argv[1]](own, Path(sys.argv[2]))
    own.close()
    end_process()
