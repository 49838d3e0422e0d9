"""Learners that srun starts: its variables, and two tasks that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asr_am.distributed.runtime.slurm import first_host, slurm_environment, tasks_per_host
from asr_am.errors import InputError
from tests.support.egs_examples import write_examples
from tests.support.real_slurm import LAB, NEEDS_SLURM

ROOT = Path(__file__).resolve().parents[3]
TASK = {
    "SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip

# What srun does: it starts each task with its place in the step.
SRUN = """
import os, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NUM_TASKS": sys.argv[1], "SLURM_STEP_TASKS_PER_NODE": sys.argv[1],
        "SLURM_STEP_NODELIST": "localhost",
    })
    for rank in range(int(sys.argv[1]))
]
sys.exit(max(task.wait() for task in tasks))
"""


def test_a_task_knows_its_place() -> None:
    found = slurm_environment(TASK)
    port = found.pop("MASTER_PORT")
    assert 20000 <= int(port) < 32000 and port != slurm_environment(TASK | {"SLURM_STEP_ID": "1"})["MASTER_PORT"]
    assert found == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu07",
    }  # fmt: skip
    assert "MASTER_PORT" not in slurm_environment(TASK | {"MASTER_PORT": "29400"})


@pytest.mark.parametrize(
    "variables", [{}, TASK | {"RANK": "0"}, TASK | {"OMPI_COMM_WORLD_RANK": "5"}, {"SLURM_PROCID": "0"}]
)
def test_outside_of_srun_nothing_changes(variables: dict[str, str]) -> None:
    assert slurm_environment(variables) == {}  # sbatch sets SLURM_PROCID too, but no step


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("n[7,9]-ib", "n7-ib"),
        ("rack[1-2]n[3-4,6]", "rack1n3"),
        ("x-1.y.z", "x-1.y.z"),
    ],
)
def test_the_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_hosts_with_different_numbers_of_tasks_are_refused() -> None:
    assert tasks_per_host("4") == tasks_per_host("4(x3)") == 4
    with pytest.raises(InputError, match=r"2\(x2\),1: hosts need the same number .*--ntasks-per-node"):
        tasks_per_host("2(x2),1")
    for unreadable in ("", "gpu[3"):
        with pytest.raises(InputError, match="holds no host"):
            first_host(unreadable)


COMMANDS = [
    pytest.param([sys.executable, "-c", SRUN, "2"], id="stand-in"),
    pytest.param(
        [LAB, "srun", "--nodes", "2", "--ntasks-per-node", "1"], id="slurm",
        marks=NEEDS_SLURM,
    ),
]  # fmt: skip


@pytest.mark.parametrize("srun", COMMANDS)
def test_tasks_of_srun_train_together(srun: list[str], tmp_path: Path) -> None:
    egs = tmp_path / "minicts/egs/fmllr+logmel-sat"
    egs.parent.mkdir(parents=True)
    write_examples(egs, frames_U=(60,) * 6)
    stage = [
        sys.executable, "-m", "asr_am.stages.train", "corpus=minicts", f"exp={tmp_path}", "launcher=torchrun",
        "learners=2", "strategy=sync", "run=two", "model.layers=1", "model.cells=8", "train.batch_size=4",
        "train.epochs=1", "logger=none", "train.threads=1", "launcher.encrypt=false", "launcher.timeout=200",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER"))}
    done = subprocess.run([*srun, *stage], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "minicts/train/two/summary.json").read_text())
    assert summary["learners"] == 2 and summary["bytes_sent"] > 0
