"""Sets the predictions of `asr_am.cluster` beside real rounds, on clusters that it has measured itself.

    python scripts/bench/predictions.py [--hosts 1 2 4] [--gbits 0.1 1 10] [--strategies sync ...] [--slow 3]

Four learners on one host, or on two or four hosts that are network namespaces of this machine (namespaces.py, needs
root). Computing is emulated by sleeping, messages and updates of a model of --megabytes are real, so that cores should
be idle. Each cluster is measured first, then each strategy does some rounds, also with learner 1 `--slow` times slower.
Prints seconds per round, and whether `predict` would have recommended a setting near the fastest one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median
from tempfile import TemporaryFile

from namespaces import ADDRESS, PORT, run_on_hosts

from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from asr_am.stages.recipe_files import CONF

LEARNERS, NAME, SECONDS = 4, "bench_predictions", 0.25
STRATEGIES = (
    "sync", "hybrid", "dpsgd", "adpsgd", "ps_sync", "ps_async", "psp", "gtc", "bmuf", "diloco", "powersgd", "topk",
)  # fmt: skip
OPTIONS = {"psp": ["strategy.c=3"], "bmuf": ["strategy.block_size=5"], "diloco": ["strategy.block_size=5"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gbits", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="of links between hosts")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--slow", type=float, default=3.0)
    parser.add_argument("--megabytes", type=float, default=4.0)
    options = parser.parse_args()
    errors: list[float] = []
    try:
        with ended_by_sigterm():
            for hosts in options.hosts:
                for gbits in options.gbits if hosts > 1 else [0.0]:
                    errors += compare(hosts, gbits, options)
    finally:
        for kind in ("cluster", "workload"):
            (CONF / kind / f"{NAME}.yaml").unlink(missing_ok=True)
    print(f"error of {len(errors)} predictions: median {median(errors):.1%}, worst {max(errors):.1%}")


def compare(hosts: int, gbits: float, options: argparse.Namespace) -> list[float]:
    """Prints the table of one cluster. Returns the relative errors of its predictions."""
    size = [f"workload.bytes={options.megabytes * 1e6:.0f}", "workload.frames_per_second=null"]
    size += [f"workload.seconds_per_batch={{cpu: {SECONDS}}}"]
    run("measure", hosts, gbits, [f"name={NAME}", "workload=self", *size])
    errors = []
    for slow in (1.0, options.slow):
        where = f"{hosts} hosts, {gbits:g} Gbit/s" if hosts > 1 else "one host"
        print(f"\n{where}{f', learner 1 {slow:g} times slower' if slow > 1 else ''}\n", flush=True)
        print(f"{'strategy':12} {'measured s':>10} {'predicted':>10}  ratio")
        found = {}
        for name in options.strategies:
            given = [f"cluster={NAME}", f"strategy={name}", "workload=self", *size, *OPTIONS.get(name, [])]
            given += [f"cluster.faults.slow={{1: {slow:g}}}"] if slow > 1 else []
            line = run("check", hosts, gbits, given).splitlines()[-1].split()
            measured, predicted = float(line[-3]), float(line[-2])
            found[name] = measured, predicted
            print(f"{name:12} {measured:10.4f} {predicted:10.4f}  {predicted / measured:5.2f}", flush=True)
        errors += [abs(predicted / measured - 1) for measured, predicted in found.values()]
        chosen = min(found, key=lambda name: found[name][1])
        best = min(measured for measured, _ in found.values())
        print(f"predicted fastest: {chosen}, {found[chosen][0] / best:.2f} x the fastest measured", flush=True)
    return errors


def run(command: str, hosts: int, gbits: float, overrides: list[str]) -> str:
    """Runs a command of `asr_am.cluster` on all hosts. Returns what it prints."""
    words = [
        sys.executable,
        "-m",
        "asr_am.cluster",
        command,
        "corpus=minicts",
        "launcher=process",
        f"learners={LEARNERS}",
    ]
    words += ["train.batch_size=256", *overrides]
    if hosts > 1:
        words += [f"launcher.nodes={hosts}", "launcher.node_rank={node}", f"launcher.address={ADDRESS}:{PORT}"]
        words += ["launcher.encrypt=false"]
    with TemporaryFile("w+", encoding="utf-8") as output:
        if hosts > 1:
            status = run_on_hosts(words, hosts, gbits, output.fileno())
        else:
            status = subprocess.run(words, stdout=output, check=False).returncode
        if status:
            sys.exit(f"{command} on {hosts} hosts has failed: see above")
        output.seek(0)
        return output.read()


if __name__ == "__main__":
    main()
