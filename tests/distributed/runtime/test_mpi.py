"""Learners that mpirun has started."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.runtime.mpi_environment import mpi_environment
from asr_am.distributed.runtime.mpi_link import start_mpi
from asr_am.errors import InputError
from tests.support import mpirun
from tests.support.egs_examples import write_examples
from tests.support.synchronous_worker import PROBLEM, ROUNDED, STRATEGIES
from tests.support.toy_training import MakeStrategy, train

ROOT = Path(__file__).resolve().parents[3]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
NEEDS_MPI = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="no mpi4py, or no mpirun: install '.[mpi]'"
)
ENVIRONMENT = os.environ | mpirun.ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def start(size: int, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = mpirun.mpirun_command(size, sys.executable, *arguments, options=options, program=str(MPIRUN))
    return subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=120)


def worker(scenario: str, folder: Path, *more: str, size: int = 4) -> None:
    done = start(size, "-m", "tests.support.mpi_worker", scenario, str(folder), *more)
    assert done.returncode == 0, done.stdout + done.stderr


def left(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob(f"{name}.?.pt"))]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synchronous")
    worker("synchronous", folder)
    return folder


def check_training(folder: Path, strategies: dict[str, MakeStrategy], wire: WireDtype) -> None:
    """Checks that learners have the bits of virtual ones, whatever their number: sums have the order of ranks."""
    for name, make in strategies.items():
        virtual, learners = train(PROBLEM, make, wire=wire), left(folder, name)
        assert len(learners) == 4
        for rank, found in enumerate(learners):
            assert torch.equal(found["replica"], virtual[rank].replica), name
            assert found["sent"] == virtual[rank].strategy.team.comm_stats.bytes_sent, name


@NEEDS_MPI
def test_synchronous_learners_have_the_bits_of_virtual_ones(synchronous: Path) -> None:
    check_training(synchronous, ROUNDED | STRATEGIES, "float32")


@NEEDS_MPI
def test_learners_round_as_virtual_ones(tmp_path: Path) -> None:
    worker("rounded", tmp_path)
    check_training(tmp_path, ROUNDED, "bfloat16")


@NEEDS_MPI
def test_all_that_groups_can_do(synchronous: Path) -> None:
    for rank, found in enumerate(left(synchronous, "collectives")):
        assert found["x"].tolist() == [1.0 if rank < 2 else 3.0] * 5
        assert found["numbers"].tolist() == ([0, 1] if rank < 2 else [2, 3])
        assert found["rows"].tolist() == [0, 0, 1, 0, 1, 2] and found["rows"].dtype == torch.int32
        assert found["y"].tolist() == [{0: 1.5, 3: 1.5}.get(rank, float(rank))] * 3 and found["z"].tolist() == [2.0] * 2


@NEEDS_MPI
def test_messages_arrive_and_no_core_is_busy_while_all_idle(synchronous: Path) -> None:
    found = left(synchronous, "messages")
    assert len(found) == 4 and all(each["busy"] < 0.5 and each["hosts"] == [0] * 4 for each in found)


@NEEDS_MPI
@pytest.mark.parametrize("name", ["adpsgd", "psp"])
def test_asynchronous_learners_do_every_batch_once(name: str, tmp_path: Path) -> None:
    """The record of each segment is audited by the training loop."""
    worker("asynchronous", tmp_path, name)
    learners = left(tmp_path, name)
    assert len(learners) == 4 and sum(sum(found["sent"].values()) for found in learners) > 1000


@NEEDS_MPI
def test_a_failed_learner_ends_the_others(tmp_path: Path) -> None:
    done = start(3, "-m", "tests.support.mpi_worker", "fails", str(tmp_path))
    assert done.returncode == 1 and "this learner has failed" in done.stderr


@NEEDS_MPI
@pytest.mark.parametrize("dies", [False, True])
def test_stage_train_has_the_bits_of_real_processes(dies: bool, tmp_path: Path) -> None:
    """Also if a learner is killed, and a spare takes its place."""
    egs = tmp_path / "minicts/egs/fmllr+logmel-sat"
    egs.parent.mkdir(parents=True)
    write_examples(egs, frames_U=(60,) * 6)
    stage = [
        "-m", "asr_am.stages", "train", "corpus=minicts", f"exp={tmp_path}", "learners=2", "strategy=sync",
        "model.layers=1", "model.cells=8", "train.batch_size=4", "train.epochs=9", "logger=none", "train.threads=1",
        "train.device=cpu",
    ]  # fmt: skip
    fault, options = ["cluster.faults.crashes=[{learner:1,at:0.1}]"] * dies, mpirun.ULFM * dies
    done = start(2 + dies, *stage, "launcher=mpi", "run=mpi", *fault, options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("process 1 has ended: 2 learners go on" in done.stdout + done.stderr) == dies
    subprocess.run(
        [sys.executable, *stage, "launcher=process", "run=process"], env=ENVIRONMENT, cwd=ROOT, check=True, timeout=120
    )
    folders = [tmp_path / "minicts/train" / name for name in ("mpi", "process")]
    summaries = [json.loads((folder / "summary.json").read_text(encoding="utf-8")) for folder in folders]
    assert summaries[0]["heldout_loss"] == summaries[1]["heldout_loss"]
    assert dies or summaries[0]["bytes_sent"] == summaries[1]["bytes_sent"] > 0
    assert summaries[0]["faults_fired"] == ({"crash": 1} if dies else {})
    assert summaries[0]["restarts"] == 2 * dies, "of both learners"
    one, other = (torch.load(folder / "best.pt", weights_only=True) for folder in folders)
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])


def test_mpirun_tells_who_a_process_is() -> None:
    assert mpi_environment({}) == {} == mpi_environment({"RANK": "1", "OMPI_COMM_WORLD_RANK": "3"})
    started = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert mpi_environment(started) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def test_without_mpirun_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"^launcher=mpi: mpirun has not started this process; use mpirun -n 4 python"):
        start_mpi()


def test_a_missing_mpi4py_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InputError, match=r"^launcher=mpi: mpi4py cannot be loaded .*pip install '\.\[mpi\]'"):
        start_mpi()
