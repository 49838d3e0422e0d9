"""Hosts files, and programs on two addresses of this machine with a local shell instead of ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from asr_am.distributed.runtime.worker_process import free_port
from asr_am.errors import InputError
from asr_am.parallax.ssh_launch import Machine, launch, read_hosts
from tests.support.toy_lm import EVERY, assert_close, make_batches, reference, rounds_of

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/support/parallax_program.py")
HERE = (sys.executable, "-c", "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[2]])")


def test_a_hosts_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two\nnode1: 0,1, 2\n\n10.0.0.2:5,7,1 # these\n")
    assert read_hosts(path) == (Machine("node1", (0, 1, 2)), Machine("10.0.0.2", (5, 7, 1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1\n", r"hosts:1: 'node1': expected a machine"), ("a: 0\nb: x\n", r"hosts:2: 'b: x': expected a machine"),
        ("a: 0\na: 1\n", r"hosts:2: .* is listed twice"), ("a: 0,0\n", r"hosts:1: .* is listed twice"),
        (": 0\n", r"hosts:1: ': 0': expected a machine"), ("a b: 0\n", r"hosts:1: .* expected a machine"),
        ("a:\n", "hosts:1: "),
        ("a: 0\nb: 1,2\n", r"hosts: all machines must have equally many devices"),
        ("# nothing\n", r"hosts: lists no machines"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(InputError, match=message):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(InputError, match="nowhere: cannot be read"):
        read_hosts(tmp_path / "nowhere")


def test_a_program_runs_on_all_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}.items():
        monkeypatch.setenv(name, value)
    machines = (Machine("127.0.0.1", (0, 2)), Machine("localhost", (1, 3)))
    launch(machines, [PROGRAM, str(tmp_path)], free_port("127.0.0.1"), HERE)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert sorted(one["devices"] for one in seen) == ["0,2", "0,2", "1,3", "1,3"]
    assert all(one["losses"] == seen[0]["losses"] for one in seen)
    expected = reference("sgd", rounds_of(make_batches(4 * EVERY)), 0.3)
    assert all(one["hosts"] == [0, 0, 1, 1] for one in seen)
    assert_close({name: torch.tensor(w) for name, w in seen[3]["weights"].items()}, expected[-1])


def test_an_error_on_one_machine_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    lines = (sys.executable, "-c", "import sys, time; sys.exit(7) if sys.argv[1] == 'b' else time.sleep(600)")
    with pytest.raises(InputError, match=r"b: .* ended with status 7"):
        launch((Machine("a", (0,)), Machine("b", (0,))), ["train.py"], shell=lines)


def test_a_shell_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match=r"--shell no-such-shell -q: cannot be run \(.*No such file"):
        launch((Machine("a", (0,)),), ["train.py"], shell=("no-such-shell", "-q"))


def test_sigterm_ends_what_the_launcher_started(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a: 0\nb: 0\n")
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/$1.pid"\nexec sleep 600\n')
    shell.chmod(0o755)
    command = [sys.executable, "-m", "asr_am.parallax.ssh_launch", "--shell", str(shell)]
    launcher = subprocess.Popen([*command, str(tmp_path / "hosts.txt"), "train.py"], cwd=ROOT)
    while not all((path := tmp_path / f"{host}.pid").exists() and path.read_text() for host in "ab"):
        assert launcher.poll() is None
        time.sleep(0.01)
    launcher.terminate()
    assert launcher.wait(30) == 128 + signal.SIGTERM
    for host in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{host}.pid").read_text()), 0)


SIGNALLED = """
import os, signal, subprocess, sys
from asr_am.parallax import ssh_launch

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Popen
sys.argv = ["ssh_launch", "--shell", "sh -c 'exec sleep 600'", sys.argv[1], "train.py"]
ssh_launch.main()
"""


def test_sigterm_while_a_process_starts_ends_it_too(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a: 0\nb: 0\n")
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path / "hosts.txt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    (pid,) = done.stdout.split()  # the second machine's was not started
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
