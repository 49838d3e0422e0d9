"""Sweeps: killed and continued, and under Hydra's other launchers, where a job fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asr_am.stages.egs import egs_dir
from asr_am.stages.train import targets
from tests.support import toy_stage
from tests.support.configurations import config
from tests.support.egs_examples import write_examples
from tests.support.toy_stage import ENVIRONMENT, ROOT

TINY = (
    "corpus=kaldi", "corpus.name=toy", "features=logmel", "align=triphone", "model.layers=1", "model.cells=8",
    "model.projection=4", "train.epochs=2", "train.batch_size=8", "train.threads=1", "train.device=cpu", "logger=none",
    "launcher=virtual", "learners=2",
)  # fmt: skip
STRATEGIES = ("sync", "bmuf")


def start(exp: Path) -> subprocess.Popen[str]:
    """Starts a sweep of stage train on small examples."""
    command = [
        sys.executable,
        "-m",
        "asr_am.stages.train",
        "-m",
        f"exp={exp}",
        *TINY,
        "strategy=" + ",".join(STRATEGIES),
    ]
    return subprocess.Popen(
        command, env=ENVIRONMENT, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finished(exp: Path) -> dict[str, tuple[int, list[float]]]:
    """Returns for each finished run when it was finished, and its held-out losses."""
    found = {}
    for done in (exp / "toy/train").glob("*/.done"):
        if done.stat().st_size:
            losses = json.loads((done.parent / "summary.json").read_text())["heldout_loss"]
            found[done.parent.name] = done.stat().st_mtime_ns, losses
    return found


def test_a_killed_sweep_continues_to_the_same_results(tmp_path: Path) -> None:
    configs = [config(*TINY, f"strategy={name}", f"exp={tmp_path / 'alone'}") for name in STRATEGIES]
    write_examples(egs_dir(configs[0]))
    write_examples(egs_dir(config(*TINY, f"exp={tmp_path}")))
    for cfg in configs:
        targets(cfg)[0].run()
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while not finished(tmp_path):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (name, first), *others = finished(tmp_path).items()
    assert not others
    process = start(tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    expected = {name: losses for name, (_, losses) in finished(tmp_path / "alone").items()}
    assert {name: losses for name, (_, losses) in finished(tmp_path).items()} == expected and len(expected) == 2
    assert finished(tmp_path)[name] == first  # not trained again


@pytest.mark.parametrize(
    "launcher",
    [(), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), ("hydra/launcher=local",)],
    ids=["hydra", "joblib", "submitit"],
)
def test_the_others_go_on_after_a_failed_job(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    if launcher:
        name = "submitit" if launcher == ("hydra/launcher=local",) else "joblib"
        pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher", reason="the extra `sweeps` is not installed")
    body = 'if out.name == "toy-2.partial": raise InputError("two is wrong")'
    process = toy_stage.start(tmp_path, body, "seed=1,2,3", *launcher)
    _, errors = process.communicate(timeout=120)
    done = {path.parent.name for path in (tmp_path / "minicts").glob("toy-*/.done")}
    assert process.returncode == 1 and done == {"toy-1", "toy-3"}
    last = errors.splitlines()[-1]
    assert "stage toy: run=blstm-local-b64-s2 failed (two is wrong); the same command continues" in last
    assert "Traceback" not in errors
