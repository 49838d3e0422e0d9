"""The ends of a stage: one line for Ctrl-C, SIGTERM, a full disk, a read-only folder and a typo."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from asr_am.errors import InputError
from asr_am.stages.app import reports_errors
from asr_am.stages.stage_log import start_logging
from asr_am.stages.target import Target
from tests.support.toy_stage import ENVIRONMENT, ROOT, start

FROM_C = "import ctypes; ctypes.CFUNCTYPE(None)(lambda: time.sleep(60))(); time.sleep(60)"  # as llvmlite does
SLEEP, POOL = "time.sleep(60)", "parallel_map(time.sleep, [60, 60, 60], 2, 'sleeping')"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)


def processes_of(group: int) -> list[str]:
    """Returns the living processes of a process group. A container may leave dead ones as zombies."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [row[2] for row in rows if row[0] == str(group) and row[1][0] != "Z"]


@pytest.mark.parametrize("body", [SLEEP, POOL, FROM_C], ids=["one process", "pool", "a call from C"])
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"),
        (signal.SIGUSR1, 75, "asked to end by a signal"),
    ],
)  # fmt: skip
def test_a_signal_ends_a_stage_with_one_line(
    tmp_path: Path, body: str, number: signal.Signals, status: int, word: str
) -> None:
    process = start(tmp_path, body)
    wait_for(tmp_path / "minicts/started")
    time.sleep(0.3)
    begin = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10 and process.returncode == status
    assert errors.count("\n") == 1 and f"stage toy: {word}; the same command continues" in errors
    assert "Traceback" not in (tmp_path / "minicts/log/toy.log").read_text()
    assert not processes_of(process.pid)


def test_messages_name_paths_that_will_be_there(tmp_path: Path) -> None:
    """An error keeps the path of what is unfinished."""
    told = "import logging; logging.getLogger('asr_am').warning('see %s/list.txt', out)"
    process = start(tmp_path, f"{told}; raise InputError(f'{{out}}/list.txt: bad')")
    _, errors = process.communicate(timeout=60)
    assert "WARNING see" in errors and "toy-1/list.txt" in errors
    assert f"ERROR stage toy: {tmp_path}/minicts/toy-1.partial/list.txt: bad" in errors


@pytest.mark.parametrize("module", ["asr_am.stages", "omegaconf", "hydra.main", "asr_am.stages.app"])
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGUSR2, 75, "asked to end by a signal")],
)
def test_a_signal_during_the_imports_of_a_stage_is_one_line(
    module: str, number: signal.Signals, status: int, word: str
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "asr_am.stages.egs", "corpus=minicts", "exp=/nowhere"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().endswith(f" {module}\n"):
        assert process.poll() is None
    process.send_signal(number)
    errors = [line for line in process.stderr if not line.startswith("import time:")]
    assert process.wait(timeout=30) == status
    assert len(errors) == 1 and errors[0].endswith(f"{word}; the same command continues\n"), errors


def test_arithmetic_of_a_stage_has_one_thread() -> None:
    """Several jobs of a stage share the cores: with two threads each, log-mel takes three times as long."""
    product = "import os, asr_am.stages.app, numpy as np; np.ones((500, 500)) @ np.ones((500, 500))"
    count = f"{product}; print(len(os.listdir('/proc/self/task')))"
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", count], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_a_stage_ends_with_one_line_if_its_recipe_has_ended_before_it_began() -> None:
    shell = f'export ASR_AM_RECIPE=$$; (sleep 0.2; exec "{sys.executable}" -m asr_am.stages.egs corpus=minicts) &'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "ERROR terminated; the same command continues\n"


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    process = start(tmp_path, "pass")
    assert process.wait(timeout=60) == 0
    again = f'"{sys.executable}" "{tmp_path}/toy.py" -m exp="{tmp_path}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", again], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)])
def test_a_signal_while_a_module_is_imported_is_no_other_error(stop: BaseException) -> None:
    with pytest.raises(type(stop)) as caught, reports_errors("toy", []):
        raise ImportError("initialization failed") from stop  # as pybind11 does
    assert caught.value is stop


def test_torchrun_ends_its_report_with_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))  # as torchrun does for each process
    with pytest.raises(SystemExit), reports_errors("toy", []):
        raise InputError("learners=4: wrong")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert "traceback : stage toy: learners=4: wrong" in str(ChildFailedError("train", {0: failure}))


def test_a_killed_recipe_leaves_no_stage_behind(tmp_path: Path) -> None:
    process = start(tmp_path, SLEEP)
    process.kill()
    process.communicate()
    shell = f'export ASR_AM_RECIPE=$$; "{sys.executable}" "{tmp_path}/toy.py" -m exp="{tmp_path}/shell"; true'
    recipe = subprocess.Popen(
        ["bash", "-c", shell], cwd=ROOT, env=ENVIRONMENT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(tmp_path / "shell/minicts/started")
    recipe.terminate()
    recipe.wait(timeout=10)
    deadline = time.monotonic() + 20
    while processes_of(recipe.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(recipe.pid)


def test_nobody_has_to_read_all_of_the_help() -> None:
    command = f"set -o pipefail; {sys.executable} -m asr_am.stages egs --help | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("\n") == 1 and not done.stderr


@pytest.mark.parametrize(
    ("body", "overrides", "expected"),
    [
        ("open('/dev/full', 'w').write('x' * 100000)", (), "minicts/toy-1: the disk is full; free some space"),
        ("pass", ("trian.epochs=3",), "trian.epochs: there is no such option; did you mean train.epochs"),
        ("pass", ("run=${nothing}",), "Interpolation key 'nothing' not found"),
        ("pass", ("strategy=snyc",), "strategy=snyc: there is no such choice; did you mean sync?"),
        ("pass", ("exp=/dev/null/exp",), "/dev/null/exp/minicts: Not a directory; make it accessible"),
        ("pass", ("exp=/proc/exp",), "/proc/exp: no folder can be made there; write elsewhere with exp=DIR"),
        ("pass", ("corpus=kaldi", "corpus.name=x", "corpus.hours=-1"), "toy: corpus.hours=-1: must not be negative"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line(tmp_path: Path, body: str, overrides: tuple[str, ...], expected: str) -> None:
    process = start(tmp_path, body, *overrides)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and expected in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [\n", r"conf/mine\.yaml:2: not YAML \(.*\); correct this line"),
        (b"a:\t- b: c\n", r"conf/mine\.yaml:1: not YAML"),
        (b"a: caf\xe9\n", r"conf/mine\.yaml: is not UTF-8"),
    ],
)
def test_a_mistake_in_a_file_of_conf_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: bytes, expected: str
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_bytes(content)
    monkeypatch.setattr("asr_am.stages.app.CONF", tmp_path / "conf")
    with pytest.raises(SystemExit), reports_errors("toy", []):
        OmegaConf.load(tmp_path / "conf/mine.yaml")
    assert re.search(expected, caplog.messages[-1]) and not caplog.records[-1].exc_info


def test_torch_save_on_a_full_disk_is_an_input_error(tmp_path: Path) -> None:
    import torch

    def build(out: Path) -> None:
        torch.save(torch.zeros(100_000), "/dev/full")

    with pytest.raises(InputError, match="out: the disk is full"):
        Target(tmp_path / "out", [], {}, build).run()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "erase"), [(Terminal, "\r\x1b[J"), (io.StringIO, "")])
def test_a_message_does_not_share_the_line_of_a_progress_bar(
    stream: type[io.StringIO], erase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, errors = stream(), stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    start_logging(tmp_path / "toy.log")
    logging.getLogger("asr_am.toy").info("done")
    logging.getLogger("asr_am.toy").warning("slow")
    assert out.getvalue() == f"{erase}  done\n"
    assert errors.getvalue() == f"{erase}WARNING slow\n"
    assert "\x1b" not in (tmp_path / "toy.log").read_text()
