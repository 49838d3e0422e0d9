"""A team of real processes that faults happen to: kills, pauses, partitions and a failing disk. Needs root.

The run's directory is on a disk of its own, an ext4 file system in a file. On two hosts, each host is a network
namespace, and a veth joins them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from asr_am.distributed.runtime.security import make_key_file
from tests.support.forked_workers import ForkedPopen
from tests.support.other_user import run

ADDRESSES, LINK, PORT = ("10.213.81.1", "10.213.81.2"), "soak", 29431
SIZE = 4  # learners
DISK_BYTES = 32 << 20
SHORT, LONG = (0.3, 4.0), (12.0, 14.0)  # seconds of pauses and partitions: below and above the heartbeats' 10 s
WHOLE_TEAM_PAUSE = 15.0  # seconds
IN_STEP = (
    "sync", "hybrid", "dpsgd", "gtc", "bmuf", "htm", "diloco", "slowmo", "powersgd", "topk", "parallax",
)  # fmt: skip
STRATEGIES = ("adpsgd", "ps_async", "psp", "ps_sync", *IN_STEP)
NEEDS_ALL = ("ps_sync", *IN_STEP)  # strategies that cannot go on without a host


@contextmanager
def network(name: str) -> Iterator[list[str]]:
    """Makes two network namespaces joined by a link. Returns their paths."""
    names = [f"asr-am-{name}-{node}" for node in range(2)]
    try:
        for node, host in enumerate(names):
            run("ip", "netns", "add", host)
            run("ip", "-n", host, "link", "set", "lo", "up")
            if node == 1:
                run("ip", "-n", names[0], "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", host)
        for host, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", host, "address", "add", f"{address}/24", "dev", LINK)
            run("ip", "-n", host, "link", "set", LINK, "up")
        yield [f"/run/netns/{host}" for host in names]
    finally:
        for host in names:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@dataclass
class Disk:
    """A small ext4 file system in a file, which can become full or, as after an error of the disk, read-only."""

    folder: Path
    mounted: bool = False
    broken: bool = False

    def __post_init__(self) -> None:
        image = self.folder / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
        self.path.mkdir()
        self.mount()

    @property
    def path(self) -> Path:
        return self.folder / "disk"

    def mount(self) -> None:
        run("mount", "-o", "loop,errors=remount-ro", self.folder / "image", self.path)
        self.mounted = True

    def unmount(self) -> None:
        if self.mounted:
            run("umount", "-l", self.path)
            self.mounted = False

    def fill(self) -> None:
        block = bytes(1 << 16)
        with suppress(OSError), (self.path / "filler").open("wb", buffering=0) as file:
            while file.write(block) == len(block):
                pass

    def free(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def make_read_only(self) -> None:
        device = subprocess.run(
            ["findmnt", "-no", "SOURCE", self.path], check=True, capture_output=True, text=True
        ).stdout.strip()
        Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("1", encoding="utf-8")
        self.broken = True

    def repair(self) -> None:
        """Checks the file system and mounts it again, if it is read-only. No process may use it."""
        if self.broken:
            run("umount", self.path)
            self.mounted = self.broken = False
            subprocess.run(["fsck.ext4", "-y", self.folder / "image"], check=False, capture_output=True)
            self.mount()


@dataclass
class Team:
    """A run, with the command that starts it on each host.

    Attributes:
        folder: of this run. Has the disk with the run's directory, the processes of learners, and logs.
        spaces: paths of the hosts' network namespaces. Empty for a single host without one.
        commands: how often the command was started.
        launchers: its processes, by host.
    """

    strategy: str
    egs_dir: Path
    folder: Path
    epochs: int
    spaces: list[str]
    commands: int = 0
    launchers: list[ForkedPopen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.notes.mkdir()
        self.disk = Disk(self.folder)
        if self.spaces:
            make_key_file(self.folder / "key")

    @property
    def notes(self) -> Path:
        """What the learners note (`tests.support.fault_worker_main`)."""
        return self.folder / "notes"

    @property
    def out(self) -> Path:
        return self.disk.path / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self) -> None:
        """Starts the command on all hosts."""
        self.commands += 1
        learner = [sys.executable, "-m", "tests.support.fault_worker_main", self.strategy, str(self.egs_dir)]
        options = {
            "command": [*learner, str(self.out), "[]", str(self.epochs)], "namespace": None,
            "learners": SIZE // max(len(self.spaces), 1), "synchronous": self.strategy in IN_STEP,
            "together": self.strategy in NEEDS_ALL, "restart_after": 0.0, "max_restarts": 1000,
            "env": {"NOTES": str(self.notes)}, "fork": True,
        }  # fmt: skip
        if self.spaces:
            options |= {"nodes": 2, "address": f"{ADDRESSES[0]}:{PORT}", "key_file": str(self.folder / "key")}
        self.launchers = []
        for node, space in enumerate(self.spaces or [None]):
            own = {"node_rank": node, "namespace": space} if space else {}
            self.launchers.append(self._fork(json.dumps(options | own)))

    def _fork(self, options: str) -> ForkedPopen:
        with self.log.open("ab") as file:
            saved = os.dup(1), os.dup(2)
            try:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
                command = [sys.executable, "-m", "tests.support.soak_launcher", options]
                return ForkedPopen(command, {**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
            finally:
                for number, copy in zip((1, 2), saved, strict=True):
                    os.dup2(copy, number)
                    os.close(copy)

    def status(self) -> int | None:
        """Returns the exit status of the command on host 0, None while it or another host's runs."""
        ended = [launcher.poll() for launcher in self.launchers]
        return None if None in ended else ended[0]

    def learners(self) -> dict[int, int]:
        """Returns the processes of the learners that run, by rank."""
        found = {int(path.name): int(path.read_text()) for path in self.notes.glob("[0-9]")}
        return {rank: pid for rank, pid in found.items() if _is_learner(pid)}

    def newest(self) -> int:
        """Returns the number of updates of the newest checkpoint, 0 if there is none."""
        names = [path.name for path in self.out.glob("checkpoints/checkpoint-*") if path.suffix != ".partial"]
        return int(max(names, default="-0").split("-")[1])

    def in_commit(self) -> bool:
        return any(self.out.glob("checkpoints/*.partial/run.pt"))

    def starts(self) -> int:
        """Returns how many learners were started."""
        path = self.notes / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def longest_gap(self, since: float) -> float | None:
        """Returns the most seconds without a step of any learner since a time. None if no step has been done since."""
        path = self.notes / "steps"
        times = np.sort(np.fromfile(path)) if path.exists() else np.zeros(0)
        first = int(np.searchsorted(times, since))
        return float(np.diff(times[max(first - 1, 0) :]).max()) if 0 < first < len(times) else None

    def kill(self) -> None:
        """Ends everything."""
        for launcher in self.launchers:
            with suppress(ProcessLookupError):
                launcher.kill()
        for pid in self.learners().values():
            send(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()

    def close(self) -> None:
        self.kill()
        self.disk.unmount()


def _is_learner(pid: int) -> bool:
    """Returns False for a process that has ended, or is another one with the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0] != "Z" and int(fields[3]) == pid  # it leads a session
    except OSError:
        return False


def send(pid: int, number: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def wait_for(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# Each fault returns when it is over. It returns False if it could not happen.


def kill_learners(team: Team, rng: random.Random, count: int) -> bool:
    learners = team.learners()
    ranks = rng.sample(sorted(learners), min(count, len(learners)))
    return sum(send(learners[rank], signal.SIGKILL) for rank in ranks) == count


def kill_leader_in_commit(team: Team, rng: random.Random) -> bool:
    if not wait_for(lambda: team.in_commit() or team.status() is not None, 5.0):
        return False
    learners = team.learners()
    return bool(learners) and send(learners[min(learners)], signal.SIGKILL)


def kill_launcher(team: Team, rng: random.Random, node: int) -> bool:
    if team.launchers[node].poll() is not None:
        return False
    team.launchers[node].kill()
    team.launchers[node].wait()
    return True


def pause(pids: list[int], seconds: float) -> bool:
    stopped = [pid for pid in pids if send(pid, signal.SIGSTOP)]
    time.sleep(seconds)
    for pid in stopped:
        send(pid, signal.SIGCONT)
    return bool(stopped)


def pause_learner(team: Team, rng: random.Random, seconds: tuple[float, float]) -> bool:
    learners = team.learners()
    return bool(learners) and pause([rng.choice(sorted(learners.values()))], rng.uniform(*seconds))


def pause_launcher(team: Team, rng: random.Random) -> bool:
    node = rng.randrange(len(team.launchers))
    return team.launchers[node].poll() is None and pause(
        [team.launchers[node].pid], rng.uniform(*rng.choice([SHORT, LONG]))
    )


def pause_all(team: Team, rng: random.Random) -> bool:
    pids = [launcher.pid for launcher in team.launchers if launcher.poll() is None] + list(team.learners().values())
    return pause(pids, WHOLE_TEAM_PAUSE)


def cut(team: Team, rng: random.Random, seconds: tuple[float, float]) -> bool:
    """Cuts the link between the hosts."""
    if len(team.launchers) < 2 or any(launcher.poll() is not None for launcher in team.launchers):
        return False
    name = Path(team.spaces[0]).name
    run("ip", "-n", name, "link", "set", LINK, "down")
    time.sleep(rng.uniform(*seconds))
    run("ip", "-n", name, "link", "set", LINK, "up")
    return True


def fill_disk(team: Team, rng: random.Random) -> bool:
    team.disk.fill()
    time.sleep(rng.uniform(*SHORT))
    team.disk.free()
    return True


def break_disk(team: Team, rng: random.Random) -> bool:
    """Makes the disk read-only until the command has ended. Its leader cannot write any more."""
    team.disk.make_read_only()
    wait_for(lambda: team.status() is not None, 60.0)
    return True


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: for the table.
        weight: how often it is chosen, relative to the others.
        happen: does it.
        ends: the command may end with an error because of it, and is started again.
        takes_host: it may take a host's learners away for good.
    """

    name: str
    weight: float
    happen: Callable[[Team, random.Random], bool]
    ends: bool = False
    hosts: int = 1
    takes_host: bool = False

    def may_end(self, strategy: str) -> bool:
        """Returns True if the command may end with an error because of the fault."""
        return self.ends or (self.takes_host and strategy in NEEDS_ALL)


FAULTS = (
    Fault("one learner killed", 4, lambda team, rng: kill_learners(team, rng, 1)),
    Fault("two killed", 2, lambda team, rng: kill_learners(team, rng, 2)),
    Fault("all killed", 2, lambda team, rng: kill_learners(team, rng, SIZE)),
    Fault("leader killed in a commit", 4, kill_leader_in_commit),
    Fault("supervisor killed", 2, lambda team, rng: kill_launcher(team, rng, 0), ends=True),
    Fault("other host's launcher killed", 1, lambda team, rng: kill_launcher(team, rng, 1), hosts=2, takes_host=True),
    Fault("learner paused 0.3 to 4 s", 3, lambda team, rng: pause_learner(team, rng, SHORT)),
    Fault("learner paused 12 to 14 s", 1, lambda team, rng: pause_learner(team, rng, LONG)),
    Fault("launcher paused", 1, pause_launcher),
    Fault("all processes paused 15 s", 0.7, pause_all),
    Fault("hosts cut off 0.3 to 4 s", 5, lambda team, rng: cut(team, rng, SHORT), hosts=2),
    Fault("hosts cut off 12 to 14 s", 1.5, lambda team, rng: cut(team, rng, LONG), hosts=2, takes_host=True),
    Fault("disk full 0.3 to 4 s", 2, fill_disk, ends=True),
    Fault("disk read-only", 1.5, break_disk, ends=True),
)
