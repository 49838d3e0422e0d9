"""Tries every path that uses a GPU, and prints a table of PASS and FAIL. Started by scripts/gpu_check.sh.

Each section is a process of its own with its own time limit, so that a failure or a hang costs that section only. Its
output is in <out>/<section>/log, all rows are in <out>/gpu_check.json. The exit status is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  optimizers import it: once here, and not in each process

from scripts.gpu_check import decoding, graphs, kernels, loading, messages, speed, strategies, training, versions
from scripts.gpu_check.check import FORK, Check

SECTIONS: dict[str, tuple[Callable[[Check], None], int]] = {  # seconds, 530 in all
    "versions": (versions.section, 30),
    "kernels": (kernels.section, 45),
    "graphs": (graphs.section, 45),
    "training": (training.section, 45),
    "virtual": (strategies.virtual, 70),
    "processes": (strategies.processes, 110),
    "mpi": (strategies.mpi, 60),
    "messages": (messages.section, 20),
    "speed": (speed.section, 45),
    "loading": (loading.section, 35),
    "decoding": (decoding.section, 25),
}
WIDTH = 118


def run_section(check: Check, limit: float) -> None:
    """Runs a section in a process. Adds a failed row if it raises an error or is killed after `limit` seconds."""
    check.folder.mkdir(parents=True)

    def work() -> None:
        os.setsid()
        with (check.folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        try:
            SECTIONS[check.section][0](check)
        except BaseException as error:
            traceback.print_exc()
            check.row("ends", False, f"{type(error).__name__}: {error}".splitlines()[0])
            sys.exit(1)

    process = FORK.Process(target=work)
    process.start()
    process.join(limit)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        check.row("ends", False, f"not within {limit:g} s")
    elif process.exitcode not in (0, 1):
        check.row("ends", False, f"exit status {process.exitcode}")


def line(row: dict[str, Any]) -> str:
    mark = {True: "PASS", False: "FAIL", None: "    "}[row["passed"]]
    return f"{mark}  {row['section']:10} {row['name']:34} {row['found']}"[:WIDTH]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    options = parser.parse_args()
    begin, rows, seconds = time.monotonic(), [], {}
    for name in options.only:
        check = Check(name, options.device, options.small, options.out.absolute() / name)
        start = time.monotonic()
        run_section(check, SECTIONS[name][1])
        seconds[name] = round(time.monotonic() - start, 1)
        rows += (own := check.rows())
        for row in own:
            print(line(row), flush=True)
    failed = sum(row["passed"] is False for row in rows)
    result = {"device": options.device, "small": options.small, "failed": failed, "seconds": seconds, "rows": rows}
    (options.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    passed = sum(row["passed"] is True for row in rows)
    print(f"{passed} passed, {failed} failed in {time.monotonic() - begin:.0f} s: {options.out}/gpu_check.json")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
