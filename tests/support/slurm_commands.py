"""Slurm's commands for a single host, as far as submitit uses them: sbatch runs the real batch script.

A job array has as many tasks at once as it asks for. A task that is requeued while it runs starts again when it has
ended. Logs, states and process ids are files in SLURM_STAND_IN, named <job>_<task>.<what>.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Writes the commands to `folder`. Returns the environment that finds them."""
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_STAND_IN": str(folder)}


def state_file(task: str, what: str) -> Path:
    """Returns the file that says `what` of a task such as 1_0."""
    return Path(os.environ["SLURM_STAND_IN"]) / f"{task}.{what}"


def sbatch(script: str) -> None:
    """Starts the tasks of a batch script in the background, and prints the number of the job."""
    job = str(len(list(state_file("x", "x").parent.glob("*.sh"))) + 1)
    state_file(job, "sh").write_text(Path(script).read_text(encoding="utf-8"))
    subprocess.Popen(
        [sys.executable, __file__, "run", job], start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    print(f"Submitted batch job {job}")


def run(job: str) -> None:
    """Runs all tasks of a job."""
    script = state_file(job, "sh").read_text()
    array = re.search(r"--array=0-(\d+)%(\d+)", script)
    tasks = [f"{job}_{number}" for number in range(int(array[1]) + 1)] if array else [job]
    with ThreadPoolExecutor(int(array[2]) if array else 1) as pool:
        list(pool.map(run_task, tasks))


def run_task(task: str) -> None:
    """Runs one task, again as often as it is requeued."""
    job, _, number = task.partition("_")
    variables = {"SLURM_JOB_ID": job, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node[1]"}
    variables |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": number} if number else {}
    again = True
    while again:
        state_file(task, "state").write_text("RUNNING")
        status = subprocess.call(["bash", str(state_file(job, "sh"))], env=os.environ | variables)
        again = state_file(task, "requeued").exists()
        state_file(task, "requeued").unlink(missing_ok=True)
    state_file(task, "state").write_text("FAILED" if status else "COMPLETED")


def srun(*arguments: str) -> None:
    """Becomes the program of a task, with its output in the files that --output and --error name."""
    words = list(arguments)
    job, number = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID")
    task = f"{job}_{number}" if number else job
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--output", "--error"):
            file = words.pop(0).replace("%A_%a", task).replace("%j", task).replace("%t", "0")
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1 if option == "--output" else 2)
    state_file(task, "pid").write_text(str(os.getpid()))
    os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_ID": "0"}
    os.execvp(words[0], words)


def sacct(*arguments: str) -> None:
    """Prints the states of all tasks of the jobs after -j."""
    print("JobID|State|NodeList")
    for option, job in pairwise(arguments):
        if option == "-j":
            for path in sorted(state_file(job, "state").parent.glob(f"{job}*.state")):
                print(f"{path.stem}|{path.read_text()}|node1")


def scancel(*arguments: str) -> None:
    """Sends a signal to the program of a task: --signal=USR2 TASK."""
    name = arguments[0].partition("=")[2]
    os.kill(int(state_file(arguments[1], "pid").read_text()), signal.Signals[f"SIG{name}"])


def scontrol(action: str, task: str) -> None:
    """Requeues a task: requeue TASK."""
    assert action == "requeue"
    state_file(task, "requeued").touch()


if __name__ == "__main__":
    {function.__name__: function for function in (sbatch, run, srun, sacct, scancel, scontrol)}[sys.argv[1]](
        *sys.argv[2:]
    )
