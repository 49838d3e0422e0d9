"""Sets the predictions of `asr_am.cluster` beside real rounds, on clusters that it has measured itself.

    python scripts/bench/predictions.py MEASURED.json [--hosts 1 2 4] [--gbits 0.1 1 10] [--strategies sync ...]

Four learners on one host, or on two or four hosts that are network namespaces of this machine (namespaces.py, needs
root). Computing is emulated by sleeping, messages and updates of a model of 4 MB are real, so cores should be idle.
Each cluster is measured first, then each strategy does some rounds, also with learner 1 three times slower. What was
measured is kept in MEASURED.json, and not measured again, so that a run may be killed.

Then prints seconds per round, measured and predicted from that, and whether `predict` would have recommended a setting
near the fastest one. A prediction knows what was measured of its cluster, and nothing of the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from namespaces import ADDRESS, PORT, run_on_hosts

from asr_am import disk
from asr_am.cluster.check import predicted_seconds
from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from asr_am.stages.option_checks import compose_job
from asr_am.stages.recipe_files import CONF
from asr_am.stages.resolvers import composing

LEARNERS, NAME, SLOW = 4, "bench_predictions", (1.0, 3.0)
STRATEGIES = ("sync", "hybrid", "dpsgd", "adpsgd", "ps_sync", "ps_async", "psp", "gtc", "bmuf", "powersgd")
OPTIONS = {"psp": ["strategy.c=3"], "bmuf": ["strategy.block_size=5"], "diloco": ["strategy.block_size=5"]}
JOB = [
    "corpus=minicts", "launcher=process", f"learners={LEARNERS}", "train.batch_size=256", "workload=self",
    "workload.bytes=4000000", "workload.frames_per_second=null", "workload.seconds_per_batch={cpu: 0.25}",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gbits", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="of links between hosts")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    places = [(hosts, gbits) for hosts in options.hosts for gbits in (options.gbits if hosts > 1 else [0.0])]
    path = CONF / "cluster" / f"{NAME}.yaml"
    try:
        with ended_by_sigterm():
            for hosts, gbits in places:
                measure(hosts, gbits, options.strategies, options.measured, path)
            found = json.loads(options.measured.read_text(encoding="utf-8"))
            errors = [error for place in places for error in compare(*place, options.strategies, found, path)]
    finally:
        for made in (path, CONF / "workload" / path.name):
            made.unlink(missing_ok=True)
    print(f"error of {len(errors)} predictions: median {median(errors):.1%}, worst {max(errors):.1%}")


def measure(hosts: int, gbits: float, strategies: Sequence[str], file: Path, path: Path) -> None:
    """Adds to `file` what it lacks of a cluster, whose configuration is written to `path`."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    place = found.setdefault(f"{hosts} {gbits:g}", {"rounds": {}})

    def keep() -> None:
        disk.replace(file, lambda out: out.write(json.dumps(found, indent=1).encode()))

    if "cluster" not in place:
        run("measure", hosts, gbits, [f"name={NAME}", *JOB])
        place["cluster"] = path.read_text(encoding="utf-8")
        keep()
    path.write_text(place["cluster"], encoding="utf-8")
    for slow in SLOW:
        for strategy in strategies:
            if (cell := f"{slow:g} {strategy}") not in place["rounds"]:
                line = run("check", hosts, gbits, overrides(strategy, slow)).splitlines()[-1]
                place["rounds"][cell] = float(line.split()[-3])
                print(f"{hosts} hosts, {gbits:g} Gbit/s, slow {slow:g}: {line}", file=sys.stderr, flush=True)
                keep()


def overrides(strategy: str, slow: float) -> list[str]:
    given = [*JOB, f"cluster={NAME}", f"strategy={strategy}", *OPTIONS.get(strategy, [])]
    return given + ([f"cluster.faults.slow={{1: {slow:g}}}"] if slow > 1 else [])


def compare(hosts: int, gbits: float, strategies: Sequence[str], found: dict[str, Any], path: Path) -> list[float]:
    """Prints the tables of one cluster. Returns the relative errors of its predictions."""
    place, errors = found[f"{hosts} {gbits:g}"], []
    path.write_text(place["cluster"], encoding="utf-8")
    for slow in SLOW:
        where = f"{hosts} hosts, {gbits:g} Gbit/s" if hosts > 1 else "one host"
        print(f"\n{where}{f', learner 1 {slow:g} times slower' if slow > 1 else ''}\n", flush=True)
        print(f"{'strategy':12} {'measured s':>10} {'predicted':>10}  ratio")
        predicted = {}
        for strategy in strategies:
            with composing():
                cfg = compose_job(overrides(strategy, slow))
            seconds, predicted[strategy] = place["rounds"][f"{slow:g} {strategy}"], predicted_seconds(cfg, LEARNERS)
            ratio = predicted[strategy] / seconds
            errors.append(abs(ratio - 1))
            print(f"{strategy:12} {seconds:10.4f} {predicted[strategy]:10.4f}  {ratio:5.2f}", flush=True)
        measured = {strategy: place["rounds"][f"{slow:g} {strategy}"] for strategy in strategies}
        chosen = min(predicted, key=lambda strategy: predicted[strategy])
        print(f"predicted fastest: {chosen}, {measured[chosen] / min(measured.values()):.2f} x the fastest measured")
        for swapped in swaps(measured, predicted):
            print(f"other order than predicted: {swapped}")
    return errors


def swaps(measured: dict[str, float], predicted: dict[str, float]) -> list[str]:
    """Returns the pairs of strategies in another order than predicted that are more than 5 % apart."""
    return [
        f"{fast} and {slow}, {measured[slow] / measured[fast]:.2f} x"
        for fast in measured for slow in measured
        if measured[slow] > 1.05 * measured[fast] and predicted[slow] < predicted[fast]
    ]  # fmt: skip


def run(command: str, hosts: int, gbits: float, given: Sequence[str]) -> str:
    """Runs a command of `asr_am.cluster` on all hosts. Returns what it prints."""
    words = [sys.executable, "-m", "asr_am.cluster", command, *given]
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
