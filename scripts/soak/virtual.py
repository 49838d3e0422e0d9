"""Random faults on the virtual cluster, for every strategy: `python -m scripts.soak.virtual [SEEDS=1000]`.

Prints a line per strategy. Exits with 1 if a scenario fails, after the command that repeats it, or if a kind of fault
never occurred. A thousand seeds of a strategy take two to seven minutes of one core.
"""

from __future__ import annotations

import argparse
import logging
import sys

import torch

from scripts.soak.results import record
from tests.support.soak import KINDS, STRATEGIES, soak

SECTION = "Faults of the strategies, on the virtual cluster"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="test only this strategy")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    torch.set_num_threads(1)
    logging.getLogger("asr_am").setLevel(logging.ERROR)  # hides the messages of restarted learners
    failures = scenarios = seconds = 0
    missed = False

    def progress(seed: int) -> None:
        done = seed - seeds.start + 1
        if done % 50 == 0 or done == len(seeds):
            print(f"\r{name}: {done} of {len(seeds)} seeds", end="", file=sys.stderr, flush=True)

    for name in [arguments.strategy] if arguments.strategy else STRATEGIES:
        report = soak(name, seeds, progress)
        kinds = ", ".join(f"{kind} {report.scenarios[kind]}" for kind in sorted(KINDS[name]))
        print(f"\r{name}: {len(seeds)} seeds, {report.seconds:.0f} s, {len(report.failed)} failed; seeds with {kinds}")
        for seed, error in report.failed.items():
            print(f"{error}reproduce: python -m scripts.soak.virtual 1 --strategy {name} --first {seed}")
        unseen = KINDS[name] - report.scenarios.keys() if len(seeds) >= 40 else set()
        if unseen:
            print(f"{name}: never seen: {', '.join(sorted(unseen))}")
        failures, scenarios, seconds = failures + len(report.failed), scenarios + len(seeds), seconds + report.seconds
        missed = missed or bool(unseen)
    if len(seeds) > 1:
        which = arguments.strategy or "all strategies"
        record(SECTION, which, {"scenarios": scenarios, "failed": failures, "seconds": f"{seconds:.0f}"})
    return int(missed or failures > 0)


if __name__ == "__main__":
    sys.exit(main())
