"""Measures an epoch with one of several real learners slowed or killed, and checks that every batch was done once.

    python scripts/bench/straggler.py --exp exp [--corpus an4] [--learners 4] [--slow 10] [--seconds 0.3]

Needs the corpus' examples (stages 0 to 5). Computing time is emulated: each batch takes `--seconds` by sleeping after
the gradient of a very small model, so the cores are free and the results hold on any machine. Learner 1 is slowed, and
in another run under adpsgd killed. Prints seconds per epoch, then ratios. Exits with 1 if adpsgd takes more than 1.45
times the unslowed epoch (the share of the others + 10 %), or sync less than 5 times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path


def train(arguments: argparse.Namespace, name: str, *overrides: str) -> float:
    """Trains one epoch on real processes, checks the lease log, and returns the seconds."""
    run = f"straggler-{name}"
    out = Path(arguments.exp) / arguments.corpus / "train" / run
    command = [
        sys.executable, "-m", "asr_am.stages.train", f"corpus={arguments.corpus}", f"exp={arguments.exp}", f"run={run}",
        "logger=none", "launcher=process", f"learners={arguments.learners}", "train.epochs=1",
        f"train.batch_size={arguments.batch * arguments.learners}", "model.layers=1", "model.cells=8",
        "model.projection=16", "workload.emulate=true", "workload.frames_per_second=null",
        f"workload.seconds_per_batch={{cpu:{arguments.seconds}}}", *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    batches = audit(out / "leases.jsonl")
    shares = summary["batches_per_learner"]
    print(f"{name:16} {summary['seconds']:7.1f} s  {batches} batches, each once; by learner: {shares}", flush=True)
    return summary["seconds"]


def audit(path: Path) -> int:
    """Returns the number of batches in a lease log. Raises SystemExit unless each was completed exactly once."""
    done = Counter(
        batch for line in path.read_text(encoding="utf-8").splitlines() for batch in json.loads(line)["batch"]
    )
    if set(done) != set(range(len(done))) or set(done.values()) != {1}:
        raise SystemExit(f"{path}: not every batch was done exactly once")
    return len(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exp", default="exp")
    parser.add_argument("--corpus", default="an4")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=0.3, help="emulated computing time per batch")
    parser.add_argument("--batch", type=int, default=32, help="chunks of a learner's batch")
    arguments = parser.parse_args()
    slow = f"cluster.faults.slow={{1:{arguments.slow}}}"
    ratios = {}
    for strategy in ("adpsgd", "sync"):
        even = train(arguments, strategy, f"strategy={strategy}")
        ratios[strategy] = train(arguments, f"{strategy}-slow", f"strategy={strategy}", slow) / even
    for strategy in ("hybrid", "dpsgd"):
        train(arguments, strategy, f"strategy={strategy}")
    crash = "cluster.faults.crashes=[{learner:1,at:12,restart_after:2}]"
    train(arguments, "adpsgd-killed", "strategy=adpsgd", crash)
    for strategy, ratio in ratios.items():
        print(f"{strategy}: with one of {arguments.learners} learners {arguments.slow:g}x slower {ratio:.2f}x the time")
    sys.exit(ratios["adpsgd"] > 1.45 or ratios["sync"] < 5)


if __name__ == "__main__":
    main()
