"""Sweeps: killed and continued, under Hydra's other launchers, where a job fails, and searches."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from asr_am.report.runs import read_training_run
from asr_am.stages.layout import egs_dir
from asr_am.stages.train import targets
from tests.support import slurm_commands, toy_stage
from tests.support.configurations import config
from tests.support.egs_examples import write_examples
from tests.support.toy_stage import ENVIRONMENT, ROOT

TINY = (
    "corpus=kaldi", "corpus.name=toy", "features=logmel", "align=triphone", "model.layers=1", "model.cells=8",
    "model.projection=4", "train.epochs=4", "train.batch_size=8", "train.threads=1", "train.device=cpu", "logger=none",
)  # fmt: skip
VIRTUAL = ("launcher=virtual", "learners=2", "cluster.jitter=0")


def installed(plugin: str) -> bool:
    """Returns True if a plugin of Hydra is installed."""
    return find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.hydra_{plugin}") is not None


def needs(plugin: str) -> pytest.MarkDecorator:
    """Returns the mark of a test that is skipped without a plugin of Hydra."""
    return pytest.mark.skipif(not installed(plugin), reason="the extra `sweeps` is not installed")


# Without the extra, two strategies and two batches have to do: a job costs two seconds.
STRATEGIES = ("sync", "bmuf", "adpsgd", "ps_sync") if installed("submitit_launcher") else ("sync", "adpsgd")
BATCHES = (4, 8, 16) if installed("submitit_launcher") else (4, 8)
NUM_RUNS = len(STRATEGIES) * len(BATCHES)
LAUNCHERS = [
    pytest.param(("hydra/launcher=basic",), id="hydra"),
    pytest.param(("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), id="joblib", marks=needs("joblib_launcher")),
    pytest.param(("hydra/launcher=local",), id="submitit", marks=needs("submitit_launcher")),
]


def start(exp: Path, *overrides: str) -> subprocess.Popen[str]:
    """Starts a sweep of stage train on small examples."""
    return subprocess.Popen(
        [sys.executable, "-m", "asr_am.stages.train", "-m", f"exp={exp}", *TINY, *overrides], env=ENVIRONMENT, cwd=ROOT,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def finished(exp: Path) -> dict[str, int]:
    """Returns for each finished run when it was finished."""
    return {path.parent.name: path.stat().st_mtime_ns for path in (exp / "toy/train").glob("*/.done")}


def interrupted(exp: Path) -> set[str]:
    """Returns the unfinished runs with a checkpoint."""
    return {path.parents[1].name for path in (exp / "toy/train").glob("*/checkpoints/checkpoint-?????????")} - finished(
        exp
    ).keys()


def kill_after(process: subprocess.Popen[str], exp: Path, runs: int) -> dict[str, int]:
    """Kills a sweep with all of its processes in a run after so many finished ones, which it returns."""
    deadline = time.monotonic() + 240
    while len(finished(exp)) < runs or not interrupted(exp):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    return finished(exp)


Table = dict[str, tuple[str, list[float]]]


def table(exp: Path) -> Table:
    """Returns the digest of the options and the held-out losses of each finished run, as in the report's table."""
    runs = [read_training_run(exp / "toy/train" / name) for name in finished(exp)]
    return {run.name: (run.config_hash, list(run.loss_E)) for run in runs}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """exp/ with examples."""
    exp = tmp_path_factory.mktemp("exp")
    write_examples(egs_dir(config(*TINY, f"exp={exp}")))
    return exp


@pytest.fixture(scope="module")
def expected(examples: Path) -> Table:
    """The table of the runs of the sweep, made one by one."""
    for strategy, batch in product(STRATEGIES, BATCHES):
        cfg = config(*TINY, *VIRTUAL, f"strategy={strategy}", f"train.batch_size={batch}", f"exp={examples}")
        targets(cfg)[0].run()
    return table(examples)


def copy_examples(examples: Path, exp: Path) -> None:
    """Copies the examples with their dates, on which keys of runs depend."""
    shutil.copytree(examples / "toy/egs", exp / "toy/egs")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_sweep_continues_to_the_same_table(
    examples: Path, expected: Table, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    copy_examples(examples, tmp_path)
    swept = ("strategy=" + ",".join(STRATEGIES), "train.batch_size=" + ",".join(map(str, BATCHES)))
    before = kill_after(start(tmp_path, *VIRTUAL, *swept, *launcher), tmp_path, NUM_RUNS // 2)
    assert len(before) < NUM_RUNS
    process = start(tmp_path, *VIRTUAL, *swept, *launcher)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert output.splitlines()[-NUM_RUNS - 1].split() == ["run", "held-out", "loss"]
    found = table(tmp_path)
    assert len(found) == NUM_RUNS and found.keys() == expected.keys()
    for name, (config_hash, losses) in expected.items():
        bound = 1e-3 if "adpsgd" in name else 0.0  # it notices that a continued run has other message delays
        assert found[name] == (config_hash, pytest.approx(losses, abs=bound, rel=0))
    assert before.items() <= finished(tmp_path).items()  # not trained again


@pytest.mark.skipif(installed("submitit_launcher"), reason="the extra `sweeps` is installed")
def test_a_choice_without_its_plugin_names_the_extra(tmp_path: Path) -> None:
    process = start(tmp_path, "hydra/launcher=local", "seed=1,2")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and errors.endswith("needs the extra `sweeps`; pip install -e '.[sweeps]'\n")


@needs("optuna_sweeper")
@pytest.mark.parametrize(
    "launcher", [(), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2")]
)
def test_a_killed_search_continues_with_the_same_trials(
    examples: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    copy_examples(examples, tmp_path)
    search = (*launcher, "hydra/sweeper=search", "hydra.sweeper.n_trials=6",
              "schedule.base=tag(log,interval(0.001,0.1))", "run=lr-${schedule.base}")  # fmt: skip
    before = kill_after(start(tmp_path, *search), tmp_path, 3)
    assert len(before) < 6
    process = start(tmp_path, *search)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert before.items() <= finished(tmp_path).items() and len(finished(tmp_path)) == 6
    best = re.search(r"Best value: (\S+)", output)
    runs = [read_training_run(tmp_path / "toy/train" / name) for name in finished(tmp_path)]
    assert best and float(best[1]) == pytest.approx(min(run.best_loss for run in runs))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_others_go_on_after_a_failed_job(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    if launcher:
        body = 'if out.name == "toy-2.partial": raise InputError("two is wrong")'
    process = toy_stage.start(tmp_path, body, "seed=1,2,3", *launcher)
    check_failed_job(tmp_path, process)


def check_failed_job(exp: Path, process: subprocess.Popen[str]) -> None:
    """Checks that a sweep has made toy-1 and toy-3, and has named toy-2."""
    _, errors = process.communicate(timeout=120)
    done = {path.parent.name for path in (exp / "minicts").glob("toy-*/.done")}
    assert process.returncode == 1 and done == {"toy-1", "toy-3"}, errors
    last = errors.splitlines()[-1]
    assert "stage toy: run=blstm-local-b64-s2 failed (two is wrong); when that is corrected, the same command" in last
    assert "Traceback" not in errors


@needs("submitit_launcher")
def test_slurm_runs_the_jobs_and_requeues_a_preempted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """toy-3 waits in its first attempt, until Slurm wants its place for another job."""
    for name, value in slurm_commands.install(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(ENVIRONMENT, name, value)
    waiting = tmp_path / "minicts/toy-3.partial/attempt"
    body = (
        'if out.name == "toy-2.partial": raise InputError("two is wrong")\n'
        '    if out.name == "toy-3.partial" and not (out / "attempt").exists():\n'
        '        (out / "attempt").touch(), time.sleep(120)'
    )
    process = toy_stage.start(tmp_path, body, "seed=1,2,3", "hydra/launcher=slurm", "hydra.launcher.partition=gpu")
    deadline = time.monotonic() + 60
    while not waiting.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    slurm_commands.scancel("--signal=USR2", "1_2")
    check_failed_job(tmp_path, process)
    script = slurm_commands.state_file("1", "sh").read_text()
    assert {
        "#SBATCH --array=0-2%3",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=1440",
        "#SBATCH --cpus-per-task=4",
    } <= set(script.splitlines())


def test_each_job_has_a_header_and_the_sweep_ends_with_a_table(examples: Path, tmp_path: Path) -> None:
    copy_examples(examples, tmp_path)
    process = start(tmp_path, *VIRTUAL, "strategy=sync", "seed=1,2")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    lines = [line.strip() for line in output.splitlines()]
    headers = [line for line in lines if line.startswith("job ")]
    assert headers == [f"job {nth} of 2: run=blstm-sync-v2-b8-s{nth}" for nth in (1, 2)] and lines[0] == headers[0]
    losses = {name: min(losses) for name, (_, losses) in table(tmp_path).items()}
    assert [line.split() for line in lines[-3:]] == [
        ["run", "held-out", "loss"], *([name, f"{losses[name]:.4f}"] for name in sorted(losses)),
    ]  # fmt: skip
    assert "#1" not in output


def test_a_failed_job_is_in_the_table(examples: Path, tmp_path: Path) -> None:
    copy_examples(examples, tmp_path)
    process = start(tmp_path, *VIRTUAL, "strategy=sync", "schedule.base=0.01,1e30", "run=rate-${schedule.base}")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "run=rate-1e+30 failed" in errors.splitlines()[-1]
    rows = [line.split() for line in output.splitlines()[-2:]]
    assert rows[0][0] == "rate-0.01" and float(rows[0][1]) > 0 and rows[1] == ["rate-1e+30", "–"]
