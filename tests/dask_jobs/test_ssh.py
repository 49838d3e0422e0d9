"""Dask clusters by ssh, of a real sshd of this host."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from asr_am.dask_jobs.client import DaskJobs
from asr_am.dask_jobs.job_options import JobOptions
from asr_am.errors import InputError
from asr_am.parallel import on_cluster, parallel_map
from tests.support.named_pipes import wait_for
from tests.support.processes import ended, process_of

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
NEEDS_SSHD = pytest.mark.skipif(
    SSHD is None or os.getuid() != 0 or not all(map(find_spec, ("distributed", "asyncssh"))),
    reason="no sshd, not root, or the optional extra cluster is not installed",
)
STAGE = """
import sys, time
from pathlib import Path
from asr_am.dask_jobs.client import DaskJobs
from asr_am.dask_jobs.job_options import JobOptions
from asr_am.parallel import on_cluster, parallel_map
from tests.support.processes import process_of
with on_cluster(DaskJobs(JobOptions("ssh", hosts=["n1", "n1"]), Path(sys.argv[1]))):
    print(*parallel_map(process_of, [1, 2, 3], 2, "processes"), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def n1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts an sshd of this host, which ssh finds as host n1."""
    import dask

    assert SSHD is not None
    # Clusters of other tests in this process have sent Dask's messages to files. SSHCluster reads them.
    for name in [name for name in os.environ if name.startswith("DASK_")]:
        monkeypatch.delenv(name)
    dask.config.refresh()
    home, key = tmp_path / "home", tmp_path / "home/.ssh/key"
    key.parent.mkdir(parents=True, mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    public = key.with_suffix(".pub").read_text(encoding="utf-8")
    (tmp_path / "authorized").write_text(public, encoding="utf-8")
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{port} {public}", encoding="utf-8")
    (home / ".ssh/config").write_text(
        f"Host n1\n Hostname 127.0.0.1\n Port {port}\n IdentityFile {key}\n", encoding="utf-8"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    command = [
        SSHD, "-D", "-f", "none", "-p", str(port), "-h", str(key), "-o", f"AuthorizedKeysFile={tmp_path}/authorized",
        "-o", "StrictModes=no", "-o", "ListenAddress=127.0.0.1", "-o", "PidFile=none",
    ]  # fmt: skip
    sshd = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    monkeypatch.setenv("HOME", str(home))

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(answers)
    yield
    sshd.kill()
    sshd.wait()


@NEEDS_SSHD
def test_workers_end_with_their_stage(
    n1: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with subprocess.Popen([sys.executable, "-c", STAGE, logs], stdout=subprocess.PIPE, text=True) as stage:
        assert stage.stdout is not None
        processes = [int(part) for part in stage.stdout.readline().split()]
        stage.send_signal(signal.SIGKILL)
    assert len(processes) == 3
    wait_for(lambda: ended(processes))
    assert len(list(logs.glob("connection.*"))) == 1
    caplog.set_level(logging.INFO)
    with on_cluster(DaskJobs(JobOptions("ssh", hosts=["n1"]), logs)):
        processes = parallel_map(process_of, [1, 2], 2, "processes")
        assert len(list(logs.glob("connection.*"))) == 1, "that of the killed process is removed"
    wait_for(lambda: ended(processes))
    assert "dashboard http://127.0.0.1:" in caplog.text and "/status on n1" in caplog.text


@NEEDS_SSHD
def test_a_host_that_cannot_be_reached_is_named(n1: None, tmp_path: Path) -> None:
    jobs = DaskJobs(JobOptions("ssh", hosts=["n1", "none.invalid"]), tmp_path / "log")
    with on_cluster(jobs), pytest.raises(InputError, match=r"jobs\.hosts: none\.invalid: .*`ssh none\.invalid true`"):
        parallel_map(process_of, [1, 2], 2, "processes")


def test_what_ssh_starts_ends_with_its_connection() -> None:
    command = [sys.executable, "-m", "asr_am.dask_jobs.ssh_child", "sh", "-c", "sleep 600 & echo $$ $!; wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None and started.stdout is not None
        processes = [int(part) for part in started.stdout.readline().split()]
        started.stdin.close()
        assert started.wait() == -signal.SIGKILL
    wait_for(lambda: ended(processes))
