"""Faults of everything together on the virtual cluster: `python -m scripts.soak.control [SEEDS=1000] [--resizes]`.

With --resizes the command is started again with another number of learners. Prints a line per strategy. Exits with 1
if a scenario has a problem, or if a kind of fault never occurred.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch

from scripts.soak.results import record
from tests.support.control_soak import KINDS, UTTERANCES, scratch, soak
from tests.support.egs_examples import write_examples
from tests.support.soak import STRATEGIES

SECTION = "Faults of everything together, on the virtual cluster"
RESIZES = "The same, and another number of learners at each start"
SHOWN = ("failed", "started again", "batches", "deaths", "lost")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--resizes", action="store_true", help="start again with 2, 4 or 6 learners")
    parser.add_argument("--strategy", choices=STRATEGIES, help="test only this strategy")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("asr_am").setLevel(logging.CRITICAL)
    bad = False
    with scratch() as folder:
        egs_dir = write_examples(folder / "egs", frames_U=UTTERANCES)
        for name in [arguments.strategy] if arguments.strategy else STRATEGIES:
            begin = time.monotonic()
            report = soak(name, range(arguments.first, arguments.first + arguments.seeds), egs_dir, arguments.resizes)
            counts = ", ".join(f"{kind} {count}" for kind, count in sorted((report.counts + report.faults).items()))
            loss = f"{report.mean:+.1%}, at most {report.worst:+.1%}"
            print(f"{name}: {report.seeds} seeds, {time.monotonic() - begin:.0f} s, {counts}, loss {loss}", flush=True)
            unseen = {kind for kind in KINDS if not report.faults[kind]} if report.seeds >= 100 else set()
            if unseen:
                print(f"{name}: never seen: {', '.join(sorted(unseen))}")
            bad = bad or bool(report.counts["failed"] or unseen)
            if report.seeds > 1:
                values: dict[str, object] = {"seeds": report.seeds, **{kind: report.counts[kind] for kind in SHOWN}}
                values["largest loss"] = f"{100 * report.worst:+.3f} %"
                record(RESIZES if arguments.resizes else SECTION, name, values)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
