"""Learners that are forked by a process with their imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq
from omegaconf import OmegaConf

from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.runtime.control_server import wait_for_message
from asr_am.distributed.runtime.fork_server import ForkServer
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.worker_process import _signal
from asr_am.errors import InputError
from asr_am.stages.layout import egs_dir, run_dir
from asr_am.stages.train_config import with_schedule
from tests.support.configurations import config
from tests.support.egs_examples import write_examples

ROOT = Path(__file__).parents[3]


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.support.forked_learner", str(folder)]


def environment(rank: int) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "COMMON": "x"}


def wait_for(ready: Callable[[], Any]) -> Any:
    end = time.monotonic() + 30
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def said(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"{rank}.json"
    wait_for(path.exists)
    return dict(json.loads(path.read_text()))


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    try:
        return path.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_learners_are_prepared_once_and_are_processes_of_their_own(tmp_path: Path) -> None:
    with closing(ForkServer(command(tmp_path))) as server:
        learners = [server.fork(environment(rank)) for rank in range(4)]
        assert [learner.wait(30) for learner in learners[:3]] == [0, 1, -signal.SIGKILL]
        found = [said(tmp_path, rank) for rank in range(4)]
        assert [one["pid"] for one in found[:3]] != [found[0]["pid"]] * 3 and learners[3].pid == found[3]["pid"]
        assert all(one["session"] == one["pid"] and one["prepared"] == 1 for one in found)
        assert {one["common"] for one in found} == {"x"}
        assert learners[3].poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            learners[3].wait(0.05)
        os.killpg(learners[3].pid, signal.SIGTERM)
        assert learners[3].wait(30) == -signal.SIGTERM
    assert len((tmp_path / "servers").read_text().split()) == 1


def test_a_server_that_was_killed_takes_its_learners_along_and_is_replaced(tmp_path: Path) -> None:
    with closing(ForkServer(command(tmp_path))) as server:
        lost = server.fork(environment(3))
        pid = said(tmp_path, 3)["pid"]
        os.kill(int((tmp_path / "servers").read_text()), signal.SIGKILL)
        assert lost.wait(30) == -signal.SIGKILL
        wait_for(lambda: not is_alive(pid))
        assert server.fork(environment(0)).wait(30) == 0
    assert len((tmp_path / "servers").read_text().split()) == 2


def test_a_request_to_end_that_all_processes_get_leaves_the_learners_to_save_a_checkpoint(tmp_path: Path) -> None:
    with closing(ForkServer(command(tmp_path))) as server:
        learner = server.fork(environment(3))
        said(tmp_path, 3)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(int((tmp_path / "servers").read_text()), number)
        time.sleep(0.2)
        assert learner.poll() is None


def test_learners_that_have_just_been_forked_get_signals(tmp_path: Path) -> None:
    with closing(ForkServer(command(tmp_path))) as server:
        for _ in range(20):
            learner = server.fork(environment(3))
            _signal(learner, signal.SIGTERM)
            assert learner.wait(5) == -signal.SIGTERM


def test_an_end_is_reported_while_the_launcher_waits_for_messages(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        with closing(ForkServer(command(tmp_path))) as server:
            learner = server.fork(environment(3))
            said(tmp_path, 3)
            assert learner.poll() is None
            os.killpg(learner.pid, signal.SIGKILL)
            began = time.monotonic()
            assert not wait_for_message(router, 30.0, server) and time.monotonic() < began + 15
            assert learner.poll() == -signal.SIGKILL
        began = time.monotonic()
        assert not wait_for_message(router, 0.1, server) and time.monotonic() > began + 0.09, "it has ended"


def test_learners_end_with_their_launcher(tmp_path: Path) -> None:
    text = (
        "import sys, time; from asr_am.distributed.runtime.fork_server import ForkServer; import os; "
        f"server = ForkServer({command(tmp_path)!r}); "
        "server.fork({**os.environ, 'RANK': '3', 'COMMON': 'x'}); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", text], env=environment(0)) as launcher:
        pid, server = said(tmp_path, 3)["pid"], int((tmp_path / "servers").read_text())
        launcher.kill()
    wait_for(lambda: not is_alive(pid) and not is_alive(server))


def test_a_server_serves_all_starts_of_a_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COMMON", "x")
    with pytest.raises(InputError, match=r"learner 1 on .* failed"):
        launch(command(tmp_path), 2, synchronous=True, fork=True)
    with pytest.raises(LearnerLost, match=r"learner 2 on .*SIGKILL"):
        launch([*command(tmp_path), "stay"], 3, synchronous=True, fork=True, max_restarts=1)
    assert len((tmp_path / "servers").read_text().split()) == 2


@pytest.mark.parametrize("threads", [0, 2])
def test_what_learners_need_is_opened_without_a_thread_or_a_gpu(threads: int, tmp_path: Path) -> None:
    cfg = config(
        "corpus=minicts", "align=triphone", "strategy=sync", "launcher=process", "learners=2", "train.device=cpu",
        "train.batch_size=4", "model.layers=1", "model.cells=8", f"train.threads={threads}", f"exp={tmp_path}",
    )  # fmt: skip
    write_examples(egs_dir(cfg))
    (out := run_dir(cfg)).mkdir(parents=True)
    OmegaConf.save(with_schedule(cfg), out / "config.yaml", resolve=True)
    text = (
        "import os, sys, torch\nfrom asr_am.stages import train_worker\n"
        f"train_worker.prepare({str(out / 'config.yaml')!r})\n"
        "assert {'torch._dynamo', 'wandb'} <= sys.modules.keys()\n"
        "(config,) = train_worker._prepared.values()\nrun = vars(config)['_cpu_run']\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), '_start' in vars(run))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment(0) | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "False", str(threads == 0)], "two threads would make other first weights"
