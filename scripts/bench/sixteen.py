"""Makes one table of all sixteen strategies.

    python -m scripts.bench.sixteen [--jobs 2]

Prints it for recipes/minicts/RESULTS.md, which says what it shows, and writes the losses for `asr_am.cluster predict`.
Bytes, staleness and hours are of an epoch of conf/workload/swb2000_lstm.yaml on 16 V100, with the strategy's own code
and no model. Losses and word error rates are of trainings by the recipe, conf/experiment/sixteen.yaml.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

import torch

from asr_am import disk
from asr_am.cluster.predict import LOSSES
from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import EpochTime, time_epoch
from asr_am.papers.cells import PaperTable
from asr_am.report.markup import table as markdown
from asr_am.stages.layout import corpus_dir
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.sections import values
from asr_am.stages.target import git_commit
from asr_am.stages.train_config import strategy_factory
from tests.support.configurations import config

LEARNERS = 16
SUBSETS = ("all", "swb", "ch")
EXPERIMENT = "sixteen"
EPOCH_STEPS = 720e6 / 21 / 80 / LEARNERS  # of batches of 80 chunks
CLUSTERS = {"ibm_b": [], "aws_p3": ["cluster=aws_p3"], "1 Gbit/s": ["cluster.nic_bandwidth=0.125e9"]}
BLOCK_STRATEGIES = ("bmuf", "htm", "diloco", "slowmo")  # which communicate every 50 steps


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
    table = PaperTable.build(values(cfg.table))
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
    arguments = parser.parse_args()
    trained = train_all(arguments.jobs)
    torch.set_num_threads(1)
    rows = []
    for name, (measures, rate) in trained.items():
        found = {where: epoch(name, overrides) for where, overrides in CLUSTERS.items()}
        steps = num_steps(name)
        hours = [f"{result.seconds / steps * EPOCH_STEPS / 3600:.2f}" for result in found.values()]
        on = found["ibm_b"]
        staleness = sum(k * n for k, n in on.staleness.items()) / max(sum(on.staleness.values()), 1)
        megabytes = on.bytes_sent / steps / LEARNERS / 1e6
        errors = [f"{measures[f'wer_{subset}']:.2f}" for subset in SUBSETS]
        learnt = [rate, f"{measures['heldout_loss']:.3f}", *errors]
        rows.append([name, *learnt, f"{megabytes:.1f}", f"{staleness:.1f}", *hours])
    head = ["strategy", "rate", "held-out loss", *(f"WER {subset}" for subset in SUBSETS), "MB a step", "staleness",
            *CLUSTERS]  # fmt: skip
    print(f"{markdown(head, rows)}\n\nMade at {git_commit()}, {date.today()}.")
    losses = {name: round(measures["heldout_loss"], 3) for name, (measures, _) in trained.items()}
    made = f"python -m scripts.bench.sixteen, {git_commit()}, {date.today()}"
    content = json.dumps({"made": made, "losses": losses}, indent=1) + "\n"
    disk.replace(LOSSES, lambda file: file.write(content.encode()))


if __name__ == "__main__":
    main()
