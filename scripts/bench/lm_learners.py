"""Trains the recurrent LM of minicts by one device, by processes and on virtual machines, and rescores with each.

    python scripts/bench/lm_learners.py [--epochs N] [override=value ...]

Needs a finished main run with the bi-LSTM (recipes/minicts/run.sh model=blstm). Each row is stages 8 and 9 of the
recipe with the row's options, and is skipped where it is up to date. An interrupted training continues.

The model is conf/lm/small.yaml with an output table of its own: rows of the input embedding that a batch does not touch
have no gradient. Parallax then keeps the embedding on servers and averages the rest (hybrid). Dropout depends on the
batch of all learners, so hybrid rows do the same computation as one device, up to rounding. All-reduce does another:
with a dense gradient, Adam also moves the rows that a batch does not touch, by their momentum.

Words include sentence ends. Bytes are those that a learner sends in an update. Words/s of virtual machines are
modelled, with the speed of one process in SPEED.

Exits with 1 if a dev perplexity of a hybrid row differs by more than 1 % from that of one device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEED = 10_000  # words/s of one learner of the virtual cluster
TOLERANCE = 0.01
PROCESSES = ["lm.learners=4", "launcher@lm.launcher=process"]
MACHINES = [
    "lm.learners=8", "launcher@lm.launcher=virtual", "cluster.hosts=8", "cluster.devices_per_host=1",
    f"workload.frames_per_second.cpu={SPEED}",
]  # fmt: skip
CASES = {
    "one": ("1 device", []),
    "hybrid": ("4 processes, hybrid", PROCESSES),
    "sync": ("4 processes, all-reduce", [*PROCESSES, "strategy@lm.strategy=sync"]),
    "machines": ("8 virtual machines, hybrid", MACHINES),
}


def train_and_score(name: str, overrides: list[str]) -> None:
    """Runs stages 8 and 9."""
    common = ["corpus=minicts", "rescore=true", "systems=[nnet]", f"lm.name={name}", "lm.model.tied=false"]
    for stage in ("rescore", "score"):
        command = [sys.executable, "-m", f"asr_am.stages.{stage}", *common, *overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="epochs of each training")
    parser.add_argument("overrides", nargs="*", help="options of all rows")
    arguments = parser.parse_args()
    corpus = ROOT / "exp/minicts"
    print(f"{'training':28} {'dev ppl':>8} {'test ppl':>8} {'words/s':>8} {'bytes sent':>11} {'WER %':>6}  sparse by")
    first = 0.0
    worst = 0.0
    for key, (label, options) in CASES.items():
        name = f"lstm-{key}-e{arguments.epochs}"
        train_and_score(name, [f"lm.train.epochs={arguments.epochs}", *options, *arguments.overrides])
        run = json.loads((corpus / "lm" / name / "summary.json").read_text())
        (score,) = corpus.glob(f"score/blstm-local-b64-s1_kn3+{name}/wer.json")
        updates = -(-sum(run["batches_per_learner"].values()) // run["learners"])
        sent = run["bytes_sent"] / updates / run["learners"]
        counts = run["counts"]
        method = "servers" if "pulled" in counts else "all-gather" if "sent" in counts else "–"
        wer = json.loads(score.read_text())["all"]["wer"]
        print(
            f"{label:28} {run['dev_perplexity']:8.2f} {run['test_perplexity']:8.2f} {run['frames_per_second']:8,} "
            f"{sent:11,.0f} {wer:6.2f}  {method}", flush=True,
        )  # fmt: skip
        first = first or run["dev_perplexity"]
        if key != "sync":
            worst = max(worst, abs(run["dev_perplexity"] / first - 1))
    print(f"dev perplexities of hybrid rows differ by at most {worst:.2%} from that of one device")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
