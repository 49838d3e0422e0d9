"""Mistakes in the library that `control_soak` must find: `python -m scripts.soak.control_mutants [SEEDS]`.

Each mutant is one promise that is not kept. Its seeds run until one has a problem. Prints the seed and the problem.
Exits with 1 if a mutant survives all of its seeds.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from asr_am.distributed.leases import LeaseQueue
from asr_am.distributed.param_server.server import ParameterServer
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.train.leadership import Terms
from asr_am.train.run_log import JsonLines
from tests.support.control_soak import UTTERANCES, Scenario, fault_free_losses, run, scratch
from tests.support.egs_examples import write_examples
from tests.support.sim_disk import SimDisk


@dataclass(frozen=True)
class Mutant:
    """A changed method.

    Attributes:
        strategy: where it shows.
        change: takes its place.
    """

    what: str
    strategy: str
    owner: type
    method: str
    change: Callable[..., Any]


MUTANTS = (
    Mutant("an acknowledgement without identity", "ps_async", PsAsync, "_flush",
           lambda strategy: strategy.worker.wait_for_next_step()),
    Mutant("a gradient is applied again", "ps_async", ParameterServer, "take_new", lambda server, pushes: list(pushes)),
    Mutant("names are not synced", "sync", SimDisk, "sync_dir", lambda disk, path: None),
    Mutant("logs are not synced", "adpsgd", JsonLines, "sync", lambda lines: lines._size),
    Mutant("any leader may write", "bmuf", Terms, "check", lambda terms: None),
    Mutant("a dead learner keeps its lease", "adpsgd", LeaseQueue, "release", lambda queue, owner: []),
)  # fmt: skip


def find(mutant: Mutant, seeds: int) -> Scenario | None:
    """Returns the first scenario with a problem, None if the mutant survives."""
    with scratch() as folder:
        egs_dir = write_examples(folder / "egs", frames_U=UTTERANCES)
        fault_free_losses(mutant.strategy, egs_dir)
        with mock.patch.object(mutant.owner, mutant.method, mutant.change):
            for seed in range(seeds):
                scenario = run(mutant.strategy, seed, egs_dir)
                if scenario.problems:
                    return scenario
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Mistakes that the soak must find.")
    parser.add_argument("seeds", type=int, nargs="?", default=300, help="most seeds of a mutant (default: 300)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("asr_am").setLevel(logging.CRITICAL)
    survivors = 0
    for mutant in MUTANTS:
        scenario = find(mutant, arguments.seeds)
        survivors += scenario is None
        found = f"seed {scenario.seed}: {scenario.problems[0].splitlines()[-1]}" if scenario else "survives"
        print(f"{mutant.what} ({mutant.strategy}): {found}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
