"""Launches over real ssh on two addresses of this machine. Skipped without OpenSSH's server."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asr_am.distributed.runtime.worker_process import free_port
from asr_am.errors import InputError
from asr_am.parallax.ssh_launch import SSH, Machine, launch

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/support/parallax_program.py")
MACHINES = (Machine("127.0.0.1", (0, 2)), Machine("localhost", (1, 3)))
SSHD = shutil.which("sshd", path=os.defpath + ":/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(SSHD is None, reason="no sshd: install openssh-server")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Starts an sshd that accepts one key and the client's environment. Yields the ssh command for it."""
    assert SSHD is not None
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd of root confines unprivileged processes there
    port = free_port("127.0.0.1")
    options = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": tmp_path / "host", "PidFile": "none", "UsePAM": "no",
        "AuthorizedKeysFile": tmp_path / "user.pub", "StrictModes": "no", "PermitRootLogin": "yes", "AcceptEnv": "*",
    }  # fmt: skip
    (tmp_path / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    log = tmp_path / "sshd.log"
    with subprocess.Popen([SSHD, "-D", "-f", tmp_path / "sshd_config", "-E", log]) as server:
        deadline = time.monotonic() + 20
        while not (log.exists() and "listening" in log.read_text()):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        environment = [f"{name}={value}" for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")]
        environment += [f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", "TORCH_CPP_LOG_LEVEL=FATAL"]
        yield (
            *SSH, "-F", "none", "-p", str(port), "-l", getpass.getuser(), "-i", str(tmp_path / "user"), "-o",
            "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o",
            "SetEnv=" + " ".join(environment),
        )  # fmt: skip
        server.terminate()


def test_a_program_runs_on_all_machines(tmp_path: Path, shell: tuple[str, ...]) -> None:
    launch(MACHINES, [PROGRAM, str(tmp_path)], free_port("127.0.0.1"), shell)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [one["devices"] for one in seen] == ["0,2", "0,2", "1,3", "1,3"]
    assert all(one["hosts"] == [0, 0, 1, 1] and one["losses"] == seen[0]["losses"] for one in seen)


def test_a_failure_ends_the_program_on_all_machines(tmp_path: Path, shell: tuple[str, ...]) -> None:
    """Fails on one machine once the program runs on the other, which must not leave a process behind."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys, time\n"
        "running = pathlib.Path(sys.argv[1])\n"
        "if os.environ['GROUP_RANK'] == '0':\n"
        "    running.write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "while not running.exists() or not running.read_text():\n"
        "    time.sleep(0.05)\n"
        "sys.exit(3)\n"
    )
    machines = tuple(Machine(machine.host, (0,)) for machine in MACHINES)
    with pytest.raises(InputError, match=r"localhost: .* ended with status"):
        launch(machines, [str(program), str(tmp_path / "pid")], free_port("127.0.0.1"), shell)
    process = Path("/proc", (tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not process.exists()
