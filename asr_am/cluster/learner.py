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
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from asr_am.distributed.cluster_config import Faults, Workload
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.idle_training import IdleLearner, IdleWeights
from asr_am.distributed.leases import Segment
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.distributed.strategies.powersgd import Powersgd
from asr_am.distributed.team import SingleProcess, Team
from asr_am.stages.train_config import strategy_factory

REPEATS = 9
WARM_ROUNDS = 3
PAUSE = 0.02  # seconds
PAUSE_ELEMENTS = 1 << 23  # 32 MB are read and written before it
COMPUTE_SIZE = 384  # rows of the matrices that stand for a gradient's computation
COMPUTE_SECONDS = 0.3  # of such computation beside a collective, and without one


def barrier(team: Team) -> None:
    team.gather(torch.zeros(0, dtype=torch.float64))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def collectives(team: Team, elements: int) -> dict[str, Any]:
    """Returns seconds of all-reduces (of the weights, of one element) and of work on the weights, and computing speed.

    The processes of a host work at the same time, as in a synchronous step, and share its cores and memory.
    """
    x = torch.zeros(elements)

    params = FlatParams(IdleWeights(elements))
    optimizer, other = Optimizer(params, OptimizerOptions()), torch.zeros(elements)
    optimizer.lr = 0.0
    powersgd = Powersgd(params, optimizer, SingleProcess())
    alone = [_compute(lambda: True) for _ in range(REPEATS)]
    beside = []
    for _ in range(REPEATS if team.size > 1 else 0):
        barrier(team)
        work = team.start_all_reduce_mean(x)
        beside.append(_compute(lambda work=work: not work.done()))  # type: ignore[misc]
        work.wait()
    return {
        "hosts": list(team.hosts), "computing": alone, "beside": [speed for speed in beside if speed],
        "short_all_reduce": _at_once(team, lambda: team.start_all_reduce_mean(x[:1]).wait()),
        "all_reduce": _at_once(team, lambda: team.start_all_reduce_mean(x).wait()),
        "update": _at_once(team, optimizer.step),
        "averaging": _at_once(team, lambda: other.add_(params.w).mul_(0.5)),
        "factoring": _at_once(team, powersgd.compress),
    }  # fmt: skip


def _at_once(team: Team, work: Callable[[], object]) -> list[float]:
    """Returns the seconds of the slowest learner in each repeat. All begin together, after a pause.

    The pause lets threads fall asleep and the processor's caches forget, as a batch does.
    """
    found, much = [], torch.zeros(PAUSE_ELEMENTS)
    for _ in range(REPEATS + 2):
        much.add_(1)
        barrier(team)
        team.sleep(PAUSE)
        found.append(_slowest(team, timed(work)))
    return found[2:]


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
    """Returns what an asynchronous team takes: short messages, and ones with the weights, in a host and between hosts.

    Each learner sends to the next one of its host, or to its like on the next host, all at the same time.
    """
    team.register_tag("short", 1)
    team.register_tag("weights", -elements)
    hosts, x, one = team.hosts, torch.zeros(elements), torch.zeros(1)
    found: dict[str, Any] = {}
    clocks = count()  # those of a tag never go back

    def exchange(to: int, source: int, tag: str, payload: torch.Tensor) -> None:
        team.send(to, tag, next(clocks), payload)
        team.recv(tag, source)

    here = [rank for rank in range(team.size) if hosts[rank] == hosts[team.rank]]
    alike = [rank for rank in range(team.size) if rank - hosts.index(hosts[rank]) == here.index(team.rank)]
    for link, ranks in (("host", here), ("nic", alike)):
        if len(ranks) == 1:
            continue  # for all learners, as hosts have equally many
        own = ranks.index(team.rank)
        to, source = ranks[(own + 1) % len(ranks)], ranks[own - 1]
        found[link] = {
            "latency": _at_once(team, partial(exchange, to, source, "short", one)),
            "seconds": _at_once(team, partial(exchange, to, source, "weights", x)),
        }
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
