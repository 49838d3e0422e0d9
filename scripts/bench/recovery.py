"""Measures the time from kill -9 of one of four learners to the next step, by its parts.

    python -m scripts.bench.recovery [--kills 5] [--strategy sync,bmuf,adpsgd,ps_sync,gtc] [--programs] [OPTION=VALUE]

Learners are the program of `launcher=process` (`asr_am.stages.train_worker`) on made-up examples, with a network of
4 MB and a step of about 0.1 s on two cores. They are killed at random moments. Each part ends when the last of the new
learners has done it. Figures are medians in seconds. The worst may have the validation after an epoch, which the next
leader does again. Under adpsgd the others go on: `next step` is theirs, and the parts are those of the learner that was
killed, to its next step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LEARNERS = 4
EVENTS = "ASR_AM_BENCH_EVENTS"
PARTS = ("detect", "tear down", "start", "import", "connect", "set up and load", "first step")
OVERRIDES = (
    "corpus=minicts", "align=triphone", "launcher=process", f"learners={LEARNERS}", "train.device=cpu", "logger=none",
    "train.epochs=100000", "train.batch_size=64", "train.checkpoint_every=25", "model.layers=1", "model.cells=320",
    "launcher.max_restarts=100000", "launcher.restart_after=0",
)  # fmt: skip


def note(event: str, **values: object) -> None:
    """Appends an event of this process."""
    line = json.dumps({"time": time.time(), "pid": os.getpid(), "event": event, **values}) + "\n"
    descriptor = os.open(os.environ[EVENTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def learner() -> None:
    """Is a learner that notes its progress."""
    del sys.argv[1]
    os.dup2(2, 1)  # only the table goes to the output
    note("began", rank=int(os.environ["RANK"]))
    from asr_am.stages import train_worker
    from asr_am.train.step_reports import StepReports
    from asr_am.train.trainer import Trainer

    note("imported")
    connect, begin, show = train_worker.connect_team, Trainer._begin, StepReports.show

    def noting_connect(config: Any) -> Any:
        team = connect(config)
        note("connected")
        return team

    def noting_begin(self: Trainer) -> None:
        begin(self)
        note("loaded", updates=self.progress.updates)

    def noting_show(self: StepReports, batches: int) -> None:
        note("stepped")
        show(self, batches)

    train_worker.connect_team, Trainer._begin, StepReports.show = noting_connect, noting_begin, noting_show  # type: ignore[method-assign]
    train_worker.main()


def read(events: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()] if events.exists() else []


class Killer(threading.Thread):
    """Kills learners of the run that the main thread launches, and ends it then."""

    def __init__(self, events: Path, kills: int, together: bool) -> None:
        super().__init__(daemon=True)
        self.events, self.kills, self.together, self.rows = events, kills, together, list[list[float]]()

    def run(self) -> None:
        rng, since = random.Random(1), 0.0
        for _ in range(self.kills):
            pids = self._await_steps(since, LEARNERS)
            time.sleep(rng.uniform(2, 5))
            since = time.time()
            os.kill(pids[rng.choice(sorted(pids))], signal.SIGKILL)
            self._await_steps(since, LEARNERS)
            self.rows.append(self._parts(since))
        os.kill(os.getpid(), signal.SIGUSR1)

    def _await_steps(self, since: float, learners: int) -> dict[int, int]:
        """Waits until all learners have done a step after a time, new ones for the dead. Returns processes by rank."""
        while True:
            events = read(self.events)
            pids = {event["rank"]: event["pid"] for event in events if event["event"] == "began"}
            stepped = {event["pid"] for event in events if event["event"] == "stepped" and event["time"] > since}
            replaced = since == 0 or any(e["event"] == "began" and e["time"] > since for e in events)
            if replaced and len(stepped & set(pids.values())) >= learners:
                return pids
            time.sleep(0.1)

    def _parts(self, killed: float) -> list[float]:
        """Returns the seconds of each part, and to the next step."""
        after = [event for event in read(self.events) if event["time"] > killed]
        new = {event["pid"] for event in after if event["event"] == "began"}
        ends = [
            min(event["time"] for event in after if event["event"] == "detected"),
            min((event["time"] for event in after if event["event"] == "torn down"), default=0.0),
            *(
                max(min(e["time"] for e in after if e["event"] == name and e["pid"] == pid) for pid in new)
                for name in ("began", "imported", "connected", "loaded")
            ),
            min(event["time"] for event in after if event["event"] == "stepped" and event["pid"] in new),
        ]
        ends[1] = ends[1] or ends[0]
        going_on = new if self.together else {event["pid"] for event in after}
        next_step = min(e["time"] for e in after if e["event"] == "stepped" and e["pid"] in going_on) - killed
        return [*(end - begin for begin, end in zip([killed, *ends], ends, strict=False)), next_step]


def measure(strategy: str, kills: int, fork: bool, overrides: list[str]) -> list[list[float]]:
    """Trains, kills, and returns the rows of `Killer`."""
    from omegaconf import OmegaConf

    from asr_am.distributed.runtime.launcher import launch
    from asr_am.distributed.runtime.worker_process import WorkerProcesses
    from asr_am.errors import Preempted
    from asr_am.stages.layout import egs_dir, run_dir
    from asr_am.stages.train_config import TrainConfig, with_schedule
    from tests.support.configurations import config
    from tests.support.egs_examples import write_examples

    ended, end = WorkerProcesses.ended, WorkerProcesses.end

    def noting_ended(self: WorkerProcesses) -> Any:
        found = ended(self)
        if found:
            note("detected")
        return found

    def noting_end(self: WorkerProcesses, *arguments: Any) -> None:
        end(self, *arguments)
        note("torn down")

    WorkerProcesses.ended, WorkerProcesses.end = noting_ended, noting_end  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            cfg = config(*OVERRIDES, f"exp={folder}", f"strategy={strategy}", *overrides)
            out, events = run_dir(cfg), Path(folder, "events")
            out.mkdir(parents=True)
            write_examples(egs_dir(cfg), frames_U=(700,) * 40)
            parsed = TrainConfig.parse(cfg, out)
            OmegaConf.save(with_schedule(cfg), out / "config.yaml", resolve=True)
            os.environ[EVENTS] = str(events)
            killer = Killer(events, kills, parsed.synchronous or parsed.together)
            killer.start()
            with contextlib.suppress(Preempted):
                launch(
                    [sys.executable, "-m", "scripts.bench.recovery", "learner", str(out / "config.yaml")], LEARNERS,
                    synchronous=parsed.synchronous, together=parsed.together, fork=fork,
                    **parsed.launch_options.of_launch(),
                )  # fmt: skip
            return killer.rows
    finally:
        WorkerProcesses.ended, WorkerProcesses.end = ended, end  # type: ignore[method-assign]


def prepare(_: str, path: str) -> None:
    """Prepares learners (`fork_server`)."""
    from asr_am.stages import train_worker

    train_worker.prepare(path)


def main() -> None:
    if sys.argv[1] == "learner":
        learner()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--strategy", default="sync,bmuf,adpsgd,ps_sync,gtc")
    parser.add_argument("--programs", action="store_true", help="start each learner as a program, and fork none")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    arguments = parser.parse_args()
    from asr_am.report.markup import table

    rows = []
    for strategy in arguments.strategy.split(","):
        found = measure(strategy, arguments.kills, not arguments.programs, arguments.overrides)
        *parts, next_step = (statistics.median(column) for column in zip(*found, strict=True))
        worst = max(row[-1] for row in found)
        rows.append([strategy, *(f"{seconds:.2f}" for seconds in (*parts, next_step, worst))])
        print(strategy, rows[-1], file=sys.stderr, flush=True)
    print(table(["", *PARTS, "next step", "worst"], rows))


if __name__ == "__main__":
    main()
