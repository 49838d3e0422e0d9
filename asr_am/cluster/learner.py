"""One learner of a measurement: `python -m asr_am.cluster.learner JOB.json`. The launcher starts it.

A job is a JSON object with `kind`, the name of a function here, its arguments, and `out`, where the first learner
writes the result as JSON.

Units: seconds, bytes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from asr_am.distributed.cluster_config import Faults, Workload
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.idle_training import IdleLearner
from asr_am.distributed.leases import Segment
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.distributed.team import Team
from asr_am.stages.train_config import strategy_factory

REPEATS = 9
WARM_ROUNDS = 3
COMPUTE_SIZE = 384  # rows of the matrices that stand for a gradient's computation
COMPUTE_SECONDS = 0.3  # of such computation beside a collective, and without one


def barrier(team: Team) -> None:
    team.gather(torch.zeros(0, dtype=torch.float64))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def collectives(team: Team, elements: int) -> dict[str, Any]:
    """Returns what a synchronous team takes: all-reduces by bytes, updates and averages of the weights, computing."""
    x = torch.zeros(elements)

    def all_reduce(count: int) -> float:
        barrier(team)
        return timed(lambda: team.start_all_reduce_mean(x[:count]).wait())

    all_reduce(elements)
    sizes = sorted({elements, max(elements // 4, 1), max(elements // 64, 1)})
    reduces = [[4 * count, [_slowest(team, all_reduce(count)) for _ in range(REPEATS)]] for count in sizes]
    params = FlatParams(torch.nn.Linear(elements, 1, bias=False))
    optimizer, other = Optimizer(params, OptimizerOptions()), torch.zeros(elements)
    optimizer.lr = 0.0
    optimizer.step()
    alone = [_compute(lambda: True) for _ in range(REPEATS)]
    beside = []
    for _ in range(REPEATS if team.size > 1 else 0):
        barrier(team)
        work = team.start_all_reduce_mean(x)
        beside.append(_compute(lambda work=work: not work.done()))  # type: ignore[misc]
        work.wait()
    return {
        "hosts": list(team.hosts), "all_reduce": reduces, "computing": alone,
        "beside": [speed for speed in beside if speed],
        "update": [timed(optimizer.step) for _ in range(REPEATS)],
        "averaging": [timed(lambda: other.add_(params.w).mul_(0.5)) for _ in range(REPEATS)],
    }  # fmt: skip


def _slowest(team: Team, seconds: float) -> float:
    rows = team.gather(torch.tensor([seconds], dtype=torch.float64))
    return max(float(row[0]) for row in rows.values())


def _compute(goes_on: Callable[[], bool]) -> float:
    """Returns matrix products a second while `goes_on`, for COMPUTE_SECONDS at most. 0 if there was no time for one."""
    a = torch.ones(COMPUTE_SIZE, COMPUTE_SIZE)
    begin, count = time.perf_counter(), 0
    while goes_on() and time.perf_counter() - begin < COMPUTE_SECONDS:
        a @ a
        count += 1
    return count / (time.perf_counter() - begin) if count > 1 else 0.0


def messages(team: Team, elements: int) -> dict[str, Any]:
    """Returns what an asynchronous team takes: short messages, and ones with the weights, in a host and between two."""
    team.register_tag("there", -elements)
    team.register_tag("back", 1)
    x, one = torch.zeros(elements), torch.zeros(1)
    hosts = team.hosts
    found: dict[str, Any] = {}
    pairs = {"host": [r for r in range(team.size) if hosts[r] == hosts[0]], "nic": [0]}
    pairs["nic"] += [r for r in range(team.size) if hosts[r] != hosts[0]]
    for link, ranks in pairs.items():
        barrier(team)
        if len(ranks) < 2 or team.rank not in ranks[:2]:
            continue
        first, second = ranks[:2]
        turns = iter(range(2 * (REPEATS + 2)))  # the clock of a tag never goes back
        for name, payload in (("latency", one), ("seconds", x)):
            seconds = []
            for turn in islice(turns, REPEATS + 2):
                if team.rank == first:
                    begin = time.perf_counter()
                    team.send(second, "there", turn, payload)
                    team.recv("back", second)
                    seconds.append(time.perf_counter() - begin)
                else:
                    team.recv("there", first)
                    team.send(first, "back", turn, one)
            found.setdefault(link, {})[name] = seconds[2:]
    barrier(team)
    return found


def epoch(team: Team, strategy: dict[str, Any], elements: int, rounds: int, density: float) -> dict[str, Any]:
    """Returns seconds per round of a strategy on weights of zeros, with computing emulated, and bytes per batch."""
    learner = IdleLearner(strategy_factory(strategy), team, elements, density)
    warm, end = WARM_ROUNDS * team.size, (WARM_ROUNDS + rounds) * team.size

    def segment(first: int, last: int) -> Segment:
        return Segment(0, first, last, end, (1,) * (last - first), updates_before=0, learners=team.size)

    learner.do(segment(0, warm))
    barrier(team)
    sent = sum(team.comm_stats.bytes_sent.values())
    seconds = _slowest(team, timed(lambda: learner.do(segment(warm, end))))
    rows = team.gather(torch.tensor([sum(team.comm_stats.bytes_sent.values()) - sent], dtype=torch.float64))
    return {"seconds": seconds / rounds, "bytes": sum(float(row[0]) for row in rows.values()) / rounds / team.size}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kinds: dict[str, Callable[..., dict[str, Any]]] = {
        "collectives": collectives, "messages": messages, "epoch": epoch,
    }  # fmt: skip
    work = kinds[job.pop("kind")]
    out, workload, faults = Path(job.pop("out")), job.pop("workload", None), job.pop("faults", None)
    torch.set_num_threads(1)
    team = connect(
        Faults.build(faults or {}), Workload.build(workload) if workload else None, device=job.pop("device", "cpu")
    )
    result = work(team, **job)
    if team.rank == 0:
        out.write_text(json.dumps(result), encoding="utf-8")
    team.close()
    end_process()


if __name__ == "__main__":
    main()
