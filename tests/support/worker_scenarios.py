"""Workers of test_team.py, which write JSON to FOLDER: python -m tests.support.worker_scenarios SCENARIO FOLDER."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asr_am.distributed.leases import LearnerLost, Lease, Segment, StaleSegment, StepResult
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.errors import InputError

FOLDER = Path(sys.argv[2])


def leave(team: ProcessTeam, **values: Any) -> None:
    """Writes the values that a test reads to `<rank>.<incarnation>.json`."""
    comm_stats = {
        key: dict(value) if isinstance(value, dict) else value for key, value in vars(team.comm_stats).items()
    }
    path = FOLDER / f"{team.rank}.{team.incarnation}.json"
    path.with_suffix(".tmp").write_text(json.dumps({**values, "comm_stats": comm_stats}))
    path.with_suffix(".tmp").rename(path)


def step_result(lease: Lease) -> StepResult:
    return StepResult(lease, 2.0, 3, 0.1, torch.tensor(1.0), torch.tensor(1.0))


def segment(epoch: int, batches: int) -> Segment:
    return Segment(epoch, 0, batches, batches, (2,) * batches, epoch * batches, 1)


def synchronous() -> None:
    """Makes every call of a synchronous team."""
    team = connect(timeout=30)
    rank, size = team.rank, team.size
    team.register_tag("weights", 3, 300_000)
    x = torch.full((1000,), float(rank))
    works = [team.start_all_reduce_mean(x[:400]), team.start_all_reduce_mean(x[400:])]
    for work in works:
        work.wait()
    rows = team.gather(torch.arange(5 * rank, dtype=torch.float64) + 1 / 3)
    empty = team.gather(torch.zeros(0, dtype=torch.float64))
    average = team.average(torch.full((5,), rank * 3.0))
    alive = list(team.live_ranks())
    big = torch.full((300_000,), float(rank))
    for step in range(5):
        for distance in range(1, size):
            team.send((rank + distance) % size, "weights", step, torch.tensor([1.0, 2, step]), big)
        big.fill_(float(rank))
        messages = [team.recv("weights", (rank + distance) % size) for distance in range(1, size)]
        for message in messages:
            assert message is not None and message.clock == message.tensors[0][2] == step
            assert (message.tensors[1] == message.source).all()
    leases = team.leases(segment(0, size * 2 - 1), synchronous=True)
    while (lease := leases.lease()) is not None:
        leases.complete(step_result(lease))
    record = leases.record()
    record.audit([3] * (size * 2 - 1))
    nothing = team.recv("weights", timeout=0.05)
    leave(
        team, mean=sorted(set(x.tolist())), rows={r: row.tolist() for r, row in rows.items()},
        empty=[len(row) for row in empty.values()],
        average=average.tolist(), alive=alive, nothing=nothing is None, batches=leases.totals().batches,
    )  # fmt: skip
    team.close()


HELLO = 100_000  # numbers, enough for shared memory


def coordinated() -> None:
    """Does two segments. Learner 1 dies in the first, during a batch, and is restarted."""
    team = connect(timeout=30)
    team.register_tag("hello", HELLO)
    if team.incarnation == 0:
        began = team.gather(torch.tensor([float(team.rank)]))
        assert sorted(began) == [0, 1, 2]
    answered = team.event()

    def answer() -> None:
        while True:
            message = team.recv("hello")
            if message is not None:
                answered.set()
                team.send(message.source, "answer", message.clock, 2 * message.tensors[0])

    team.register_tag("answer", HELLO)
    team.spawn(answer, "answer")
    records, means, released, epoch, shared = [], [], [], 0, False
    while epoch < 2:
        try:
            leases = team.leases(segment(epoch, 30), synchronous=False)
        except StaleSegment:
            epoch += 1
            continue
        done = 0
        while (lease := leases.lease()) is not None:
            if team.rank == 1 and team.incarnation == 0 and done == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02 if epoch == 0 else 0.1)
            leases.complete(step_result(lease))
            done += 1
        if team.incarnation == 1 and epoch == 1:
            team.send(0, "hello", 7, torch.arange(HELLO, dtype=torch.float32))
            message = team.recv("answer", 0, timeout=10)
            assert (
                message is not None
                and message.clock == 7
                and message.tensors[0].tolist() == list(range(0, 2 * HELLO, 2))
            )
            shared = "/memfd:asr_am" in Path("/proc/self/maps").read_text(encoding="utf-8")  # `message` is in it
        while epoch == 1 and len(team.live_ranks()) < 3:
            team.sleep(0.05)
        rows = team.gather(torch.tensor([team.rank + 0.1] * 2))
        record = leases.record()
        record.audit([3] * 30)
        records.append([[c.owner, c.incarnation] for c in record.completions])
        means.append([sorted(rows), team.average(torch.full((4,), float(team.rank))).tolist()])
        released.append(record.released)
        assert leases.totals().frames == 60
        epoch += 1
    leave(team, records=records, means=means, released=released, shared=shared)
    team.close()


def lost_synchronous() -> None:
    """Kills learner 1 between two collectives."""
    team = connect(timeout=30)
    for step in range(1000):
        if team.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            team.start_all_reduce_mean(torch.zeros(1000)).wait()
        except LearnerLost as error:
            leave(team, lost=error.rank, said=str(error))
            team.close()
            raise
        time.sleep(0.02)


def intruded() -> None:
    """Connects to another process on this host while the collectives are set up, as if that were a learner."""
    new_group = dist.new_group

    def connect_elsewhere(*arguments: Any, **options: Any) -> Any:
        socket.create_connection(("127.0.0.1", int(os.environ["INTRUDER_PORT"]))).detach()
        return new_group(*arguments, **options)

    dist.new_group = connect_elsewhere
    connect(timeout=30).close()


SCENARIOS = {
    "synchronous": synchronous, "coordinated": coordinated, "lost_synchronous": lost_synchronous, "intruded": intruded,
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        SCENARIOS[sys.argv[1]]()
    except InputError as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        end_process(1)
    end_process()
