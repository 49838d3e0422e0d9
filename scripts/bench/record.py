"""Runs a benchmark and records its output with commit, date and machine in RESULTS.md next to this file.

    python scripts/bench/record.py scripts/bench/virtual.py --repeats 9

A section is the latest run of its command. The exit status is the benchmark's.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

from asr_am.stages.target import git_commit

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = "# Speed\n\nWritten by `scripts/bench/record.py`. Each section is the latest run of its command.\n"


def machine() -> str:
    """Returns the processor and number of cores."""
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'an unknown processor'}"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    arguments = sys.argv[1:]
    commit, printed = git_commit(), []
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    title = f"## python {' '.join(arguments)}\n"
    about = f"commit {commit}, {datetime.date.today()}, {machine()}, exit status {process.returncode}"
    section = f"{title}\n{about}\n\n```\n{''.join(printed)}```\n"
    old = RESULTS.read_text() if RESULTS.exists() else HEAD
    kept = [part for part in re.split(r"^(?=## )", old, flags=re.MULTILINE) if not part.startswith(title)]
    RESULTS.write_text("\n".join(part.rstrip("\n") + "\n" for part in [*kept, section]))
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
