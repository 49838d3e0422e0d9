"""Runs on one host while another user of it attacks: nothing of the run can be reached, and the run is unharmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.loopback_peers import socket_inodes, tcp_sockets
from tests.support.attack import Attack
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import lease_log

ROOT = Path(__file__).parents[2]
LEARNERS = 2
LISTENING = "0A"
LOOPBACK = "0100007F"
MAX_GROWTH = 64 << 10  # KiB of memory of a process while it is attacked
ALLOWED = ("read a file of the run (its mode allows it)",)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def out() -> Iterator[Path]:
    """Returns a folder with the modes of a run in a shared home directory: all users can read it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def listening(pid: int) -> list[tuple[str, int]]:
    """Returns hexadecimal address and port of each TCP socket on which a process listens."""
    inodes = socket_inodes(pid)
    mine = [found.local.split(":") for found in tcp_sockets() if found.inode in inodes and found.state == LISTENING]
    return sorted((address, int(port, 16)) for address, port in mine)


def peak_memory(pid: int) -> int:
    """Returns the largest memory that a process has had, in KiB."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


class OtherUser(Attack):
    """Attacks as another user, once all learners have connected.

    Attributes:
        rows: (what was tried, what it saw).
        ports: (address, port) on which the learners and their launcher listened.
        growth: the largest growth of a process' memory, in KiB.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.rows: list[tuple[str, str]] = []
        self.ports: list[tuple[str, int]] = []
        self.growth = 0
        self._before = listening(os.getpid())

    def attack(self) -> None:
        self.wait_until(lambda: (self.out / "metrics.jsonl").exists())
        pids = [*(int(path.read_text()) for path in sorted(self.out.glob("*.pid"))), os.getpid()]
        self.ports = [end for pid in pids for end in listening(pid) if end not in self._before]
        memory = {pid: peak_memory(pid) for pid in pids}
        private_dir = Path((self.out / "0.address").read_text().removeprefix("ipc://")).parent
        ports = [port for _, port in self.ports]
        arguments = [str(self.out), str(private_dir), json.dumps(ports), json.dumps(pids)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.other_user", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        self.rows = json.loads(done.stdout)
        self.growth = max(peak_memory(pid) - memory[pid] for pid in pids)


def table(rows: list[tuple[str, str]]) -> str:
    """Returns what was tried and seen as a Markdown table, with repetitions counted."""
    lines = {f"| {what} | {saw} |": 0 for what, saw in rows}
    for what, saw in rows:
        lines[f"| {what} | {saw} |"] += 1
    return "\n".join(["| tried | saw | times |", "|:--|:--|--:|", *(f"{line} {n} |" for line, n in lines.items())])


@pytest.mark.parametrize("strategy", ["dpsgd", "adpsgd"])
def test_another_user_of_the_host_reaches_nothing(
    strategy: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print the table with `pytest -s`."""
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 12)
    command = [sys.executable, "-m", "tests.support.intruder_worker", strategy, str(egs_dir), str(out)]
    with OtherUser(out) as other:
        launch(command, LEARNERS, synchronous=strategy == "dpsgd")
    print(f"\n{strategy}, ports: {other.ports}, growth: {other.growth} KiB\n{table(other.rows)}")

    assert {address for address, _ in other.ports} <= {LOOPBACK}
    assert strategy == "dpsgd" or not other.ports, "only torch's collectives listen on ports"
    gone_through = [
        row for row in other.rows if not row[1].startswith(("refused", "no answer")) and row[0] not in ALLOWED
    ]
    assert all("to a port" in what for what, _ in gone_through), gone_through
    assert len(other.rows) >= 12 and sum("Unix socket" in what for what, _ in other.rows) >= LEARNERS
    assert other.growth < MAX_GROWTH

    summary = json.loads((out / "summary.json").read_text())
    assert summary["restarts"] == 0 and summary["refused"] == 0
    done = [(record["epoch"], batch) for record in lease_log(out) for batch in record["batch"]]
    assert len(done) == len(set(done)) == sum(summary["batches_per_learner"].values())
