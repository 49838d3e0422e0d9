"""Records what a terminal of 100 columns shows, as text.

    python scripts/record_terminal.py > recipes/minicts/TERMINAL.md

Records the main job, the try-out, and a training run of four processes one of which is killed, 8 minutes in all.
Messages are as the terminal shows them in the end. The progress bar, which is erased, is shown as it was every few
seconds, with the time since the start.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
ERASE = "\r\x1b[J"
BLOCK = re.compile(r"\r\x1b\[J([^\x1b]*)\r\x1b\[\d+A")  # a bar with lines below it
EVERY = 10.0  # seconds between two shown states of the bar
EXP = "exp/terminal"
MAIN = ["recipes/minicts/run.sh", f"exp={EXP}"]
TRY = ["recipes/minicts/run.sh", f"exp={EXP}/try", "+experiment=try"]
KILLED = [*TRY, "--stage", "6", "--stop-stage", "6", "strategy=adpsgd", "learners=4", "launcher=process"]


def record(command: list[str], kill: str = "") -> Iterator[str]:
    """Yields the lines of a command on a terminal, with states of its progress bar.

    Args:
        command: the command.
        kill: pattern of a line after which one learner is killed.
    """
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, stdout=child, stderr=child, stdin=child, cwd=ROOT, env=environment)
    os.close(child)
    begin, shown, written = time.monotonic(), 0.0, ""
    while block := read(parent):
        written += block
        blocks = BLOCK.findall(written)
        written = BLOCK.sub("", written)
        finished, _, bar = written.rpartition(ERASE)
        drawing = re.match("[^\n]*[━·]", bar)  # perhaps with lines below it, which have not come yet
        *lines, rest = (finished if drawing else written).split("\n")
        written = rest + ERASE + bar if drawing else rest
        yield from (line.rstrip("\r").split(ERASE)[-1] for line in lines)
        seconds = time.monotonic() - begin
        bar = blocks[-1] if blocks else written.split(ERASE)[-1]
        if seconds - shown >= EVERY and re.search("[━·]", bar):
            shown = seconds
            yield from f"[{seconds:4.0f} s] {bar.strip()}".splitlines()
        if kill and re.search(kill, bar):
            kill = ""
            yield from kill_a_learner(seconds)
    os.close(parent)
    yield f"(exit status {process.wait()})"


def read(terminal: int) -> str:
    """Returns what was written to a terminal, "" at its end."""
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:
        return ""


def kill_a_learner(seconds: float) -> Iterator[str]:
    """Kills a learner that does not lead."""
    found = subprocess.run(["pgrep", "-f", f"train_worker {EXP}"], capture_output=True, text=True).stdout.split()
    for pid in found:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RANK=2" in variables:
            os.kill(int(pid), signal.SIGKILL)
            yield f"[{seconds:4.0f} s] (kill -9 of learner 2, process {pid})"
            return


def main() -> None:
    """Prints the recordings as Markdown."""
    shutil.rmtree(ROOT / EXP, ignore_errors=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, cwd=ROOT)
    print("# What the terminal shows\n")
    print(
        f"Made by `python scripts/record_terminal.py` at commit {commit.stdout.strip()} on {datetime.date.today()}. "
        f"The terminal has {COLUMNS} columns. Lines that begin with a time in brackets are the progress bar then. "
        "It moves every second, and is erased when its work is done."
    )
    for title, command, kill in (
        ("The main job", MAIN, ""),
        ("The try-out", TRY, ""),
        ("Four learners, one of them killed", KILLED, r"epoch 2/.*loss"),
    ):
        print(f"\n## {title}\n\n```\n$ {shlex.join(command)}", flush=True)
        for line in record(command, kill):
            print(line, flush=True)
        print("```", flush=True)


if __name__ == "__main__":
    sys.exit(main())
