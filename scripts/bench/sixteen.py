"""Makes one table of all sixteen strategies.

    python -m scripts.bench.sixteen [--out scripts/bench/SIXTEEN.md]

Rule and survival are those of the table in asr_am/distributed/README.md. Bytes, staleness and hours are of an epoch of
conf/workload/swb2000_lstm.yaml on 16 V100, with the strategy's own code and no model: bytes that a learner sends in a
step on ibm_b, and hours on ibm_b, on aws_p3 and on ibm_b with 1 Gbit/s between hosts. The held-out loss is that of a
small regression problem (tests/support/toy_problem.py) after 320 steps of 16 learners, at the best of five learning
rates, which is in brackets: 0.05, 0.02, 0.008, 0.003 or 0.001, with momentum 0.9. Other options are those of
conf/strategy/, except for blocks of 5 steps and shares of 0.1, as the problem is short and has 52 weights. The loss of
the noise is 1. `ps_async` has no stable rate near that of `sync`, because some 15 other updates come between a gradient
and its update. It does 16 times as many updates, of one batch each, and needs a smaller rate. So do `bmuf` and
`diloco`, whose momentum at blocks multiplies that of the steps. `bmuf` averages over some 16 of the 64 blocks. There is
no word error rate: recipes/*/STRATEGIES.md have those of ten strategies.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import EpochTime, time_epoch
from asr_am.distributed.strategies.local import Local
from asr_am.report.tables import markdown
from asr_am.stages.app import values
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.target import git_commit
from asr_am.stages.train_config import strategy_factory
from tests.support.configurations import config
from tests.support.toy_problem import Problem, heldout
from tests.support.toy_training import hardware, train, train_single

LEARNERS = 16
EPOCH_STEPS = 720e6 / 21 / 80 / LEARNERS  # of batches of 80 chunks
DIVERGED = 10.0  # a loss that is as good as infinite
RATES = (0.05, 0.02, 0.008, 0.003, 0.001)
PROBLEM = Problem(learners=LEARNERS, batches=640, epochs=8, rounds_per_segment=40)
CLUSTERS = {"ibm_b": [], "aws_p3": ["cluster=aws_p3"], "1 Gbit/s": ["cluster.nic_bandwidth=0.125e9"]}
BLOCK_STRATEGIES = ("bmuf", "htm", "diloco", "slowmo")  # which communicate every 50 steps
BLOCKS = ["strategy.block_size=5"]  # in the toy problem, which is short
TOY_OPTIONS: dict[str, list[str]] = {
    "psp": ["strategy.servers=2", "strategy.c=14"], "ps_sync": ["strategy.servers=2"],
    "ps_async": ["strategy.servers=2"], "gtc": ["strategy.density=0.1"], "bmuf": BLOCKS, "diloco": BLOCKS,
    "slowmo": BLOCKS, "htm": [*BLOCKS, "strategy.density=0.1"], "topk": ["strategy.density=0.1"],
    "powersgd": ["strategy.rank=1"],
}  # fmt: skip


def described() -> dict[str, tuple[str, str]]:
    """Returns (rule, what happens if a learner dies) by strategy, from the README."""
    lines = (ROOT / "asr_am" / "distributed" / "README.md").read_text().splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith("| `strategy=` |"))
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[begin + 2 : begin + 18]]
    return {re.sub("`", "", row[0]): (row[1], row[3]) for row in rows}


def num_steps(name: str) -> int:
    """Returns the number of steps that are simulated."""
    return 50 if name in BLOCK_STRATEGIES else 10


def epoch(name: str, overrides: Sequence[str]) -> EpochTime:
    """Simulates steps of 16 learners."""
    chosen = config(f"strategy={name}", "cluster=ibm_b", "workload=swb2000_lstm", *overrides)
    on, workload = Cluster.build(values(chosen.cluster)), Workload.build(values(chosen.workload))
    learners = 1 if name == "local" else LEARNERS
    return time_epoch(
        strategy_factory(values(chosen.strategy)), replace(on, jitter=0.0), workload, learners=learners,
        batches=num_steps(name) * LEARNERS, elements=32 * 64, density=0.01,
    )  # fmt: skip


def toy_loss(name: str) -> tuple[float, float]:
    """Returns the lowest held-out loss of the trials, inf if all diverge, and its learning rate."""
    return min((trial(name, lr), lr) for lr in RATES)


def trial(name: str, lr: float) -> float:
    """Returns the held-out loss, inf if the training diverges."""
    problem = replace(PROBLEM, lr=lr)
    if name == "local":
        w = train_single(replace(problem, learners=1, joined=LEARNERS), Local).consensus[-1]
    else:
        factory = strategy_factory(values(config(f"strategy={name}", *TOY_OPTIONS.get(name, [])).strategy))
        w = train(problem, factory, cluster=hardware(devices_per_host=8))[0].consensus[-1]
    loss = heldout(w)
    return loss if loss < DIVERGED else math.inf  # also if it is NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "bench" / "SIXTEEN.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (rule, death) in described().items():
        found = {where: epoch(name, overrides) for where, overrides in CLUSTERS.items()}
        steps = num_steps(name)
        hours = [f"{result.seconds / steps * EPOCH_STEPS / 3600:.2f}" for result in found.values()]
        on = found["ibm_b"]
        staleness = sum(k * n for k, n in on.staleness.items()) / max(sum(on.staleness.values()), 1)
        megabytes = on.bytes_sent / steps / LEARNERS / 1e6
        toy, rate = toy_loss(name)
        loss = f"{toy:.3f} ({rate:g})" if toy < math.inf else "diverges"
        rows.append([f"`{name}`", rule, f"{megabytes:.1f}", f"{staleness:.1f}", death, loss, *hours])
        print(name, *rows[-1][2:4], *rows[-1][5:], file=sys.stderr, flush=True)
    head = ["strategy", "rule", "MB a step", "staleness", "if a learner dies", "held-out loss, toy (rate)", *CLUSTERS]
    table = markdown(head, rows)
    about = f"Made by `python -m scripts.bench.sixteen` at {git_commit()}, {date.today()}."
    notes = __doc__.partition("\n\n")[2].partition("\n\n")[2]
    arguments.out.write_text(
        f"# Sixteen strategies\n\n{notes}\n{about} The last columns are hours per epoch.\n\n{table}\n"
    )


if __name__ == "__main__":
    main()
