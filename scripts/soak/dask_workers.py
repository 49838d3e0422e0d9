"""Kills Dask workers while they work for the stages of a tiny recipe: `python -m scripts.soak.dask_workers [KILLS]`.

A first run on this host leaves a copy of its exp before and after each stage, and a second one shows which files differ
anyway, by times. Then each stage with parallel jobs runs
on two workers, one of which is killed with SIGKILL, KILLS times, at random moments while there are jobs. Files must be
those of the first run. Last, the scheduler is killed: the stage must end with one line, and the same command continue.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed import Client

from asr_am.dask_jobs.keys import CERTIFICATE, KEY, make_keys, read_keys
from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from scripts.soak.recipe_kills import (
    FORK_SERVER,
    LIMIT,
    PRELOADED,
    finish,
    read_files,
    restore,
    start,
    undisturbed,
    varying_files,
)  # fmt: skip
from scripts.soak.results import record

STAGES = ("data", "lang", "features", "align", "speaker", "egs", "decode")
WITHOUT_JOBS = ("lang",)
MANY = (  # enough speech for several jobs in each stage
    "corpus.hours=0.2", "corpus.test_words=500", "systems=[mono,sat]", "rescore=false",
)  # fmt: skip
WORKERS = 2
SECTION = "Stages whose Dask workers were killed"


class Cluster:
    """A scheduler and workers of this host, which are processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.keys, self._log = folder / "keys", (folder / "dask.log").open("ab")
        if not self.keys.exists():
            make_keys(self.keys)
        cert, key = str(self.keys / CERTIFICATE), str(self.keys / KEY)
        self._tls = ["--tls-ca-file", cert, "--tls-cert", cert, "--tls-key", key]
        file = folder / "scheduler.json"
        file.unlink(missing_ok=True)
        self.scheduler = self._start(
            "scheduler", "--protocol", "tls", "--host", "127.0.0.1", "--port", "0",
            "--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file),
        )  # fmt: skip
        while not file.exists():
            time.sleep(0.1)
        one = "--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--scheduler-file", str(file)
        self.nannies = [self._start("worker", *one) for _ in range(WORKERS)]
        self.client = Client(scheduler_file=str(file), security=read_keys(self.keys))
        self.overrides = "jobs=dask", f"jobs.scheduler={self.client.scheduler.address}", f"jobs.keys={self.keys}"
        self.client.wait_for_workers(WORKERS, timeout=120)

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments, *self._tls]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def busy(self) -> bool:
        return any(self.client.processing().values())

    def kill_worker(self, rng: random.Random) -> None:
        """Kills one of the processes that nannies have started."""
        nanny = rng.choice(self.nannies).pid
        for child in Path(f"/proc/{nanny}/task/{nanny}/children").read_text(encoding="utf-8").split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)

    def close(self) -> None:
        with suppress(Exception):
            self.client.close(timeout=5)
        for process in (*self.nannies, self.scheduler):
            process.terminate()
        for process in (*self.nannies, self.scheduler):
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        self._log.close()


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.close()


def kill_workers(cluster: Cluster, stage: str, kills: int, folder: Path, rng: random.Random) -> tuple[int, int, float]:
    """Runs a stage whose workers are killed. Returns its exit status, the number of kills and its seconds."""
    log, begin, killed = folder / f"{stage}.log", time.monotonic(), 0
    process = start(stage, folder / "exp", log, *MANY, *cluster.overrides)
    while process.poll() is None and time.monotonic() - begin < LIMIT:
        if killed < kills and cluster.busy():
            time.sleep(rng.uniform(0, 0.5))
            cluster.kill_worker(rng)
            killed += 1
            time.sleep(rng.uniform(1, 4))
        time.sleep(0.02)
    return process.wait(10), killed, time.monotonic() - begin


def kill_scheduler(cluster: Cluster, stage: str, folder: Path) -> list[str]:
    """Kills the scheduler while a stage has jobs. Returns what the stage says of it."""
    log = folder / f"{stage}.scheduler.log"
    process = start(stage, folder / "exp", log, *MANY, *cluster.overrides)
    while not cluster.busy():
        time.sleep(0.02)
    cluster.scheduler.kill()
    status = process.wait(LIMIT)
    text = log.read_text(encoding="utf-8")
    errors = [line for line in text.splitlines() if line.startswith(("ERROR", "WARNING", "Traceback"))]
    return [f"exit status {status}", *errors]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak.dask_workers", description=__doc__.split("\n")[0])
    parser.add_argument("kills", type=int, nargs="?", default=2, help="kills per stage (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    FORK_SERVER.set_forkserver_preload([*PRELOADED, *(f"asr_am.stages.{stage}" for stage in STAGES), "lhotse"])
    rng, failed = random.Random(arguments.seed), False
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        seconds = undisturbed(folder, STAGES, *MANY)
        varying = varying_files(folder, STAGES, *MANY)
        with cluster_in(folder) as cluster:
            for number, stage in enumerate(STAGES):
                if stage in WITHOUT_JOBS:
                    continue
                restore(folder / f"state{number}", folder / "exp")
                status, kills, spent = kill_workers(cluster, stage, arguments.kills, folder, rng)
                different = compare(folder / f"state{number + 1}", folder / "exp", varying)
                values = {
                    "kills": kills, "equal": "yes" if not different and status == 0 else "no",
                    "seconds": f"{spent:.1f}", "seconds on this host": f"{seconds[stage]:.1f}",
                }  # fmt: skip
                print(f"{stage}: {values}", *(f"  differs: {name}" for name in different), sep="\n", flush=True)
                record(SECTION, stage, values)
                failed = failed or bool(different) or status != 0 or not kills
            number = STAGES.index("align")
            restore(folder / f"state{number}", folder / "exp")
            said = kill_scheduler(cluster, "align", folder)
        print("scheduler killed:", *said, sep="\n  ", flush=True)
        with cluster_in(folder) as cluster:
            finish("align", folder / "exp", folder / "align.log", *MANY, *cluster.overrides)
        different = compare(folder / f"state{number + 1}", folder / "exp", varying)
        print("  the same command continues:", different or "equal", flush=True)
        failed = failed or bool(different) or len(said) != 2
    return int(failed)


def compare(expected: Path, found: Path, varying: Sequence[str]) -> list[str]:
    """Returns the names of files that differ, without those that always do."""
    one, other = read_files(expected), read_files(found)
    return sorted({name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} - {*varying})


if __name__ == "__main__":
    sys.exit(main())
