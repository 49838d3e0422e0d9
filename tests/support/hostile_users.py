"""Two users of one host train, and each attacks the other's run. See scripts/soak/other_users.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.distributed.runtime.loopback_peers import socket_inodes, tcp_sockets
from asr_am.distributed.runtime.security import make_key_file
from tests.support.egs_examples import write_examples
from tests.support.forked_workers import ForkedPopen

ROOT = Path(__file__).parents[2]
USERS = (23001, 23002)
LEARNERS = 2
HARMLESS = ("refused", "no answer", "no secret")
ALLOWED = ("read a file of the run (its mode allows it)",)
LISTENING = "0A"
START_LIMIT = 60.0  # seconds


@dataclass
class Side:
    """The run of a user, and what the other user saw of it.

    Attributes:
        rows: (what the other tried, what it saw).
        ports: (hexadecimal address, port) on which the processes listened.
        abstract: Unix sockets of the processes without a file, which no mode protects.
        growth: the largest growth of a process' memory while it was attacked, in KiB.
    """

    out: Path
    rows: list[tuple[str, str]] = field(default_factory=list)
    ports: list[tuple[str, int]] = field(default_factory=list)
    abstract: list[str] = field(default_factory=list)
    growth: int = 0
    status: int | None = None


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Makes a folder that all users can read, as a shared home directory."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def duel(folder: Path, strategy: str) -> list[Side]:
    """Has two users train with a strategy at the same time, and each attack the other's run.

    Args:
        folder: can be read by all users.
    """
    egs_dir = write_examples(folder / "egs", frames_U=(60,) * 12)
    sides, launchers = [], []
    for user in USERS:
        home = folder / str(user)
        side = Side(home / "run")
        for path in (home, side.out, home / "pids"):
            path.mkdir()
        make_key_file(home / "team.key")
        for path in (home, *home.iterdir()):
            os.chown(path, user, user)
        command = [sys.executable, "-m", "tests.support.intruder_worker", strategy, str(egs_dir), str(side.out)]
        options = {
            "command": command, "user": user, "pids": str(home / "pids"), "learners": LEARNERS, "lock": str(side.out),
            "synchronous": strategy == "dpsgd",
        }  # fmt: skip
        launch = [sys.executable, "-m", "tests.support.soak_launcher", json.dumps(options)]
        launchers.append(ForkedPopen(launch, os.environ, start_new_session=True))
        sides.append(side)
    try:
        for side in sides:
            _wait_for_start(side.out)
        attackers = [threading.Thread(target=_attack, args=(side, USERS[1 - n], launchers[n].pid))
                     for n, side in enumerate(sides)]  # fmt: skip
        for attacker in attackers:
            attacker.start()
        for attacker in attackers:
            attacker.join()
    finally:
        for side in sides:
            (side.out / "over").touch()
    for side, launcher in zip(sides, launchers, strict=True):
        side.status = launcher.wait(START_LIMIT)
    return sides


def _wait_for_start(out: Path) -> None:
    end = time.monotonic() + START_LIMIT
    while not (out / "metrics.jsonl").exists():
        assert time.monotonic() < end, f"{out}: the run has not started"
        time.sleep(0.05)


def _attack(side: Side, attacker: int, launcher: int) -> None:
    """Runs the attacks of another user on a run, and notes what it saw."""
    pids = [*(int(path.read_text()) for path in sorted(side.out.glob("*.pid"))), launcher]
    side.ports = [end for pid in pids for end in listening(pid)]
    side.abstract = abstract_sockets(pids)
    memory = {pid: peak_memory(pid) for pid in pids}
    private_dir = Path((side.out / "0.address").read_text().removeprefix("ipc://")).parent
    arguments = [str(side.out), str(private_dir), json.dumps([port for _, port in side.ports]), json.dumps(pids)]
    command = [sys.executable, "-m", "tests.support.other_user", str(attacker), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    side.rows = json.loads(done.stdout)
    side.growth = max(peak_memory(pid) - memory[pid] for pid in pids)


def listening(pid: int) -> list[tuple[str, int]]:
    """Returns hexadecimal address and port of each TCP socket on which a process listens."""
    inodes = socket_inodes(pid)
    mine = [found.local.split(":") for found in tcp_sockets() if found.inode in inodes and found.state == LISTENING]
    return sorted((address, int(port, 16)) for address, port in mine)


def abstract_sockets(pids: list[int]) -> list[str]:
    """Returns the names of Unix sockets of processes that have no file."""
    inodes = {inode for pid in pids for inode in socket_inodes(pid)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    return [row[7] for row in rows if len(row) > 7 and row[7].startswith("@") and row[6] in map(str, inodes)]


def peak_memory(pid: int) -> int:
    """Returns the largest memory that a process has had, in KiB."""
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1])


def table(found: dict[str, list[Side]]) -> str:
    """Returns a Markdown table of what was tried, and what each user saw of the other's run, with its times."""
    tried = list(dict.fromkeys(what for sides in found.values() for side in sides for what, _ in side.rows))
    columns = [(strategy, n) for strategy in found for n in range(len(USERS))]
    lines = [
        "| tried | " + " | ".join(f"{strategy}: user {'AB'[n]} of {'BA'[n]}'s run" for strategy, n in columns) + " |",
        "|:--|" + ":--|" * len(columns),
    ]
    for what in tried:
        cells = []
        for strategy, n in columns:
            saw = [text for tried_, text in found[strategy][1 - n].rows if tried_ == what]
            counts = {text: saw.count(text) for text in saw}
            cells.append(
                "; ".join(f"{text} x {n}" if n > 1 else text for text, n in counts.items()) or "nothing to try"
            )
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)
