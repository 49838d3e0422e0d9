"""Measures how well `hybrid` and `adpsgd` overlap communication (K seconds) with computing (C seconds).

    python scripts/bench/overlap.py [--gbits 2] [--parameters 8e6] [--shares 0.5 1 2] [--steps 4] [--rounds 5]

Compares a step with max(C, K) on two real learners. Computing is emulated by a sleep of C, as on a device that leaves
the cores free. Communication and the update of the weights are real. K is measured in the same rounds: for hybrid an
all-reduce of the same bytes alone, for adpsgd an exchange of the same bytes alone. The network is the loopback of a
network namespace limited to `--gbits` (needs `unshare` and `tc`). With `--gbits 0` it is the plain loopback, where K is
copying in memory. "own work" is the CPU time of the training thread in a step: update of the weights, copies, mean.
Prints ms, medians (and range) over the rounds. The last line is the largest ratio step / max(C, K). Exits with 1 if it
is above 1.10.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategy import Strategy

STRATEGIES: dict[str, type[Hybrid | Adpsgd]] = {"hybrid": Hybrid, "adpsgd": Adpsgd}
TARGET = 1.10
BURST = "256kb"  # sent at full speed, more than one packet of the loopback


@dataclass
class Row:
    """One value of C in seconds. By round: seconds of a step, CPU seconds of the training thread, and exchanges per
    step.
    """

    computing: float
    step: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    exchanges: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbits", type=float, default=2.0, help="of the link, both directions together")
    parser.add_argument("--parameters", type=float, default=8e6)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="C / K")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # already in the namespace
    parser.add_argument("--learner", nargs=2, metavar=("STRATEGY", "RESULTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        learner(options)
    elif options.gbits > 0 and not options.inside:
        enter_namespace(options.gbits)
    else:
        worst = max(compare(name) for name in STRATEGIES)
        print(f"ratio {worst:.3f} (target: at most {TARGET})")
        sys.exit(worst > TARGET)


def enter_namespace(gbits: float) -> None:
    """Restarts this program in a namespace with a slow loopback."""
    shape = f"tc qdisc add dev lo root tbf rate {gbits}gbit burst {BURST} latency 100ms"
    script = f'ip link set lo up && {shape} && exec "$@"'
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", script, "sh", sys.executable, *sys.argv, "--inside"])


def compare(name: str) -> float:
    """Measures one strategy, prints its table, and returns the largest ratio."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, *sys.argv, "--learner", name, str(results)]
        launch(command, 2, synchronous=STRATEGIES[name].synchronous)
        found = json.loads(results.read_text())
    alone = statistics.median(found["alone"])
    print(f"{name}: K {spread(found['alone'])} ms")
    ratios = []
    for row in found["rows"]:
        bound = max(row["computing"], alone)
        own = statistics.median(row["own"])
        ratios.append(statistics.median(row["step"]) / bound)
        print(
            f"  C {1e3 * row['computing']:4.0f} ms, C/K {row['computing'] / alone:.2f}: step {spread(row['step'])} ms, "
            f"{ratios[-1]:.3f} x max(C, K), of that own work {own / bound:.3f} ({1e3 * own:.0f} ms)"
            + (f"; {row['exchanges']:.2f} exchanges a step" if name == "adpsgd" else "")
        )
    print(f"{name}: at most {max(ratios):.3f} x max(C, K) (target: {TARGET})", flush=True)
    return max(ratios)


def spread(seconds: list[float]) -> str:
    """Formats median, minimum and maximum in ms."""
    return f"{1e3 * statistics.median(seconds):.0f} ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f})"


def learner(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    name, results = options.learner
    team = connect()
    strategy = build(STRATEGIES[name], team, int(options.parameters))
    communicate = exchange(team, strategy) if name == "adpsgd" else all_reduce(team, strategy)
    run(strategy, 0.0, 2)
    seen = statistics.median(timed(team, communicate) for _ in range(5))
    agreed = float(team.gather(torch.tensor([seen]))[0])
    rows = [Row(share * agreed) for share in options.shares]
    alone = []
    for _ in range(options.rounds):
        alone.append(timed(team, communicate))
        for row in rows:
            before = strategy.metrics["exchanges"]
            seconds, own = run(strategy, row.timed, options.steps)
            row.step.append(seconds)
            row.own.append(own)
            row.exchanges += (strategy.metrics["exchanges"] - before) / (options.rounds * (options.steps + 1))
    if team.rank == 0:
        Path(results).write_text(json.dumps({"alone": alone, "rows": [vars(row) for row in rows]}), encoding="utf-8")
    team.close()


def build(kind: type[Hybrid | Adpsgd], team: ProcessTeam, elements: int) -> Strategy:
    params = FlatParams(nn.ParameterList([nn.Parameter(torch.ones(elements))]))
    optimizer = Optimizer(params, OptimizerOptions())
    optimizer.lr = 0.01
    strategy = kind(params, optimizer, team)
    team.gather(torch.zeros(0))  # messages to a learner without registered tags are rejected
    return strategy


def run(strategy: Strategy, computing: float, steps: int) -> tuple[float, float]:
    """Returns seconds per step over several steps, and CPU seconds of this thread."""

    def gradient(on_bucket: BucketHook | None) -> StepResult:
        strategy.team.sleep(computing)
        return StepResult(Lease(0, 0.0, 0.0, 1.0), 1.0, 1, 0.01, torch.zeros(()), torch.zeros(()))

    strategy.team.gather(torch.zeros(0))
    strategy.step(gradient)  # communication was idle until here
    begin, worked = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        strategy.step(gradient)
    seconds, own = (time.perf_counter() - begin) / steps, (time.thread_time() - worked) / steps
    strategy.drain()
    return seconds, own


def timed(team: ProcessTeam, communicate: Callable[[], None]) -> float:
    team.gather(torch.zeros(0))
    begin = time.perf_counter()
    communicate()
    return time.perf_counter() - begin


def all_reduce(team: ProcessTeam, strategy: Strategy) -> Callable[[], None]:
    x = strategy.params.w.clone()
    return lambda: team.start_all_reduce_mean(x).wait()


def exchange(team: ProcessTeam, strategy: Strategy) -> Callable[[], None]:
    """Sends one learner's weights to the other, which then sends its own."""
    x = strategy.params.w.clone()
    team.register_tag("there", len(x))
    team.register_tag("back", len(x))
    team.gather(torch.zeros(0))

    def communicate() -> None:
        if team.rank == 0:
            team.send(1, "there", 0, x)
            team.recv("back")
        else:
            team.recv("there")
            team.send(0, "back", 0, x)

    return communicate


if __name__ == "__main__":
    main()
