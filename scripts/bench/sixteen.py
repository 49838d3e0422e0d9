"""Makes one table of all sixteen strategies.

    python -m scripts.bench.sixteen [--jobs 2] [--out scripts/bench/SIXTEEN.md]

Rule and survival are those of the table in asr_am/distributed/README.md. Bytes, staleness and hours are of an epoch of
conf/workload/swb2000_lstm.yaml on 16 V100, with the strategy's own code and no model: bytes that a learner sends in a
step on ibm_b, and hours on ibm_b, on aws_p3 and on ibm_b with 1 Gbit/s between hosts. Losses and word error rates are
of trainings by the recipe, conf/experiment/sixteen.yaml: half an hour of minicts, 5,000 words of test, 16 learners with
a total batch of 64 chunks, and for each strategy three trials of the learning rate, of which the one with the lowest
held-out loss is decoded. A rate with * is the smallest or the largest of its three, so a better one may lie beyond.
There is one seed, which cannot order strategies as close as these. `local` is one learner with the same total batch.
`parallax` has no sparse parameters here, so it is `sync`. `psp` waits for 14 of 16 gradients in training, and for all
of them in the columns of bytes, staleness and hours. `ps_async` does 16 times as many updates, of the batch of one
learner each. Hours are of blocks of 50 steps, losses of blocks of 5, as the training has 1,072 steps.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import EpochTime, time_epoch
from asr_am.papers.cells import Table
from asr_am.report.tables import markdown
from asr_am.stages.app import corpus_dir, values
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.target import git_commit
from asr_am.stages.train_config import strategy_factory
from tests.support.configurations import config

LEARNERS = 16
SUBSETS = ("all", "swb", "ch")
EXPERIMENT = "sixteen"
EPOCH_STEPS = 720e6 / 21 / 80 / LEARNERS  # of batches of 80 chunks
CLUSTERS = {"ibm_b": [], "aws_p3": ["cluster=aws_p3"], "1 Gbit/s": ["cluster.nic_bandwidth=0.125e9"]}
BLOCK_STRATEGIES = ("bmuf", "htm", "diloco", "slowmo")  # which communicate every 50 steps


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


def train_all(jobs: int) -> dict[str, tuple[dict[str, float], str]]:
    """Trains with all strategies, unless that is done. Returns the measures of each, and its learning rate."""
    overrides = [f"+experiment={EXPERIMENT}", "logger=none"]
    subprocess.run([sys.executable, "-m", "asr_am.papers.table", *overrides, f"nj={jobs}"], check=True, cwd=ROOT)
    cfg = config(*overrides)
    table = Table.build(values(cfg.table))
    made = json.loads((ROOT / corpus_dir(cfg) / "tables" / EXPERIMENT / "table.json").read_text())["measures"]
    found = {}
    for name, (measures,) in made.items():
        trials, trial = {**table.work, **table.cells[name].work}["trials"], int(measures["trial"])
        rate = trials[trial - 1].partition("=")[2]
        found[name] = measures, f"{rate}*" if trial in (1, len(trials)) else rate
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "bench" / "SIXTEEN.md")
    arguments = parser.parse_args()
    trained = train_all(arguments.jobs)
    torch.set_num_threads(1)
    rows = []
    for name, (rule, death) in described().items():
        found = {where: epoch(name, overrides) for where, overrides in CLUSTERS.items()}
        steps = num_steps(name)
        hours = [f"{result.seconds / steps * EPOCH_STEPS / 3600:.2f}" for result in found.values()]
        on = found["ibm_b"]
        staleness = sum(k * n for k, n in on.staleness.items()) / max(sum(on.staleness.values()), 1)
        megabytes = on.bytes_sent / steps / LEARNERS / 1e6
        measures, rate = trained[name]
        errors = [f"{measures[f'wer_{subset}']:.2f}" for subset in SUBSETS]
        learnt = [f"{measures['heldout_loss']:.3f}", rate, *errors]
        rows.append([f"`{name}`", rule, f"{megabytes:.1f}", f"{staleness:.1f}", death, *learnt, *hours])
        print(name, *rows[-1][2:4], *rows[-1][5:], file=sys.stderr, flush=True)
    head = ["strategy", "rule", "MB a step", "staleness", "if a learner dies", "held-out loss", "rate",
            *(f"WER {subset}" for subset in SUBSETS), *CLUSTERS]  # fmt: skip
    table = markdown(head, rows)
    about = f"Made by `python -m scripts.bench.sixteen` at {git_commit()}, {date.today()}."
    notes = __doc__.partition("\n\n")[2].partition("\n\n")[2]
    arguments.out.write_text(
        f"# Sixteen strategies\n\n{notes}\n{about} The last columns are hours per epoch.\n\n{table}\n"
    )


if __name__ == "__main__":
    main()
