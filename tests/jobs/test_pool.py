"""Maps on hosts of this machine, and what may happen to them. Items are named pipes, so they last as long as needed."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from asr_am.data.checksums import file_crc32
from asr_am.data.textfile import read_lines
from asr_am.errors import InputError, one_line
from asr_am.features.cmvn_deltas import accumulate, add_deltas
from asr_am.jobs import pool as pool_module
from asr_am.jobs.hosts import JobOptions
from asr_am.jobs.pool import TRIES, JobPool
from asr_am.parallel import on_hosts, parallel_map
from asr_am.stages.sections import job_options
from tests.support.configurations import config
from tests.support.job_hosts import FakeHosts
from tests.support.named_pipes import NamedPipes, wait_for
from tests.support.real_slurm import NEEDS_SLURM, real_slurm, show_jobs

ROOT = Path(__file__).parents[2]
COMMAND = "ssh -o BatchMode=yes {host}"
Act = Callable[[], None]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    monkeypatch.setattr(pool_module, "RETRY", 0.02)
    return FakeHosts(tmp_path / "hosts", monkeypatch)


@pytest.fixture
def pipes(tmp_path: Path) -> NamedPipes:
    return NamedPipes(tmp_path, 4)


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Act], None]]:
    """Does something while the test waits for a map. Raises its errors at the end of the test."""
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start(act: Act) -> None:
        def run() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def pool(tmp_path: Path, *names: str, timeout: float = 60.0) -> JobPool:
    return JobPool(JobOptions("ssh", COMMAND, hosts=names, timeout=timeout), tmp_path / "log")


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_results_are_those_of_this_host(hosts: FakeHosts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "asr_am.parallel")
    random = np.random.default_rng(1)
    arrays = [random.standard_normal((5 + n, 3)).astype(np.float32) for n in range(7)]
    with on_hosts(pool(tmp_path, "a", "b")):
        for function in (accumulate, add_deltas):
            for chunk in (1, 3):
                found = parallel_map(function, arrays, 3, "arrays", chunk)
                for one, array in zip(found, arrays, strict=True):
                    np.testing.assert_array_equal(one, function(array))
        assert parallel_map(one_line, ["a\nb", "c"], 2, "lines", here=True) == ["a b", "c"]
        assert "on this host only" not in caplog.text
        assert parallel_map(lambda item: item + 1, [1, 2], 2, "sums") == [2, 3]
        assert "sums: on this host only, as tests.jobs.test_pool.test_results" in caplog.text
    workers = hosts.processes("a") + hosts.processes("b")
    assert len(workers) == 3, "they serve all maps"
    wait_for(lambda: not any(map(running, workers)))
    assert all("OMP_NUM_THREADS=1" in call for call in hosts.calls("ssh"))


def test_a_killed_worker_s_item_is_finished_elsewhere(
    hosts: FakeHosts, pipes: NamedPipes, tmp_path: Path, meanwhile: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    def act() -> None:
        pipes.wait_for_readers(2)
        hosts.shut_down("a")
        wait_for(lambda: "a is left out: its worker ended with status 255, 3 times in a row" in caplog.text)
        pipes.fill()

    meanwhile(act)
    with on_hosts(pool(tmp_path, "a", "b")):
        assert parallel_map(file_crc32, pipes.paths, 2, "pipes") == pipes.expected()
    assert caplog.text.count("WARNING") == 1
    assert "no route to host a" in (tmp_path / "log" / "a.1.log").read_text()


def test_a_silent_host_is_lost(
    hosts: FakeHosts, pipes: NamedPipes, tmp_path: Path, meanwhile: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def act() -> None:
        pipes.wait_for_readers(2)
        hosts.send("a", signal.SIGSTOP)
        wait_for(lambda: "a worker on a gave no sign of life for 2 s, and is started again" in caplog.text)
        pipes.fill()

    meanwhile(act)
    with on_hosts(pool(tmp_path, "a", "b", timeout=2.0)):
        assert parallel_map(file_crc32, pipes.paths, 2, "pipes") == pipes.expected()
    assert len(hosts.processes("b")) == 1, "it was silent for as long, but alive"


def test_without_any_host_the_stage_ends_with_one_line(hosts: FakeHosts, tmp_path: Path) -> None:
    for name in ("a", "b"):
        hosts.shut_down(name)
    with on_hosts(pool(tmp_path, "a", "b")):
        for _ in range(2):
            with pytest.raises(InputError, match=r"jobs=ssh: no host is left, .* \(a, b\); see .*log.*jobs=local"):
                parallel_map(one_line, ["a", "b", "c"], 3, "lines")
    assert len(hosts.calls("ssh")) <= 3 * TRIES


def test_an_item_that_ends_every_worker_is_an_error(
    hosts: FakeHosts, pipes: NamedPipes, tmp_path: Path, meanwhile: Callable
) -> None:
    def act() -> None:
        for number in range(TRIES):
            pipes.wait_for_readers(2)
            for worker in hosts.processes("a")[2 * number :]:
                os.kill(int(Path(f"/proc/{worker}/task/{worker}/children").read_text(encoding="utf-8")), signal.SIGKILL)
            wait_for(lambda: not any(map(running, hosts.processes("a")[: 2 * number + 2])))  # noqa: B023
            pipes.forget_readers()

    meanwhile(act)
    with on_hosts(pool(tmp_path, "a")), pytest.raises(InputError, match="pipes: one job has ended 3 workers"):
        parallel_map(file_crc32, pipes.paths[:2], 2, "pipes")
    assert "the process of a job was killed (out of memory?)" in (tmp_path / "log" / "a.1.log").read_text()


def test_an_error_of_an_item_is_raised(hosts: FakeHosts, tmp_path: Path) -> None:
    missing = [tmp_path / "one", tmp_path / "two"]
    with on_hosts(pool(tmp_path, "a")):
        with pytest.raises(InputError, match=r"(one|two): .*; look for it"):
            parallel_map(partial(read_lines, remedy="look for it"), missing, 2, "lists")
        with pytest.raises(FileNotFoundError) as error:
            parallel_map(file_crc32, missing, 2, "sums")
        assert error.value.filename in map(str, missing)
        with pytest.raises(RuntimeError, match=r"(?s)deltas: Traceback .*in add_deltas"):
            parallel_map(add_deltas, ["a", "b"], 2, "deltas")
    assert "Traceback" in (tmp_path / "log" / "a.1.log").read_text() + (tmp_path / "log" / "a.2.log").read_text()


LEADER = f"""
import sys
from pathlib import Path
from asr_am.data.checksums import file_crc32
from asr_am.jobs.hosts import JobOptions
from asr_am.jobs.pool import JobPool
from asr_am.parallel import on_hosts, parallel_map

folder = Path(sys.argv[1])
with on_hosts(JobPool(JobOptions("ssh", "{COMMAND}", hosts=["a", "b"]), folder / "log")):
    print(parallel_map(file_crc32, [Path(path) for path in sys.argv[2:]], 2, "pipes", keep=folder / "finished"))
"""


def test_a_killed_stage_keeps_what_was_finished(hosts: FakeHosts, pipes: NamedPipes, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEADER, str(tmp_path), *map(str, pipes.paths)]
    leader = subprocess.Popen(command, cwd=ROOT)
    pipes.wait_for_readers(2)
    pipes.fill(pipes.paths[0])
    wait_for(lambda: len(list((tmp_path / "finished").glob("*[!p]"))) == 1)  # not .tmp
    leader.kill()
    leader.wait()
    wait_for(lambda: not any(map(running, hosts.processes("a") + hosts.processes("b"))))  # they end with the leader
    pipes.forget_readers()
    again = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pipes.fill(*pipes.paths[1:])  # the first would wait for ever if it was read again
    assert again.communicate(timeout=60)[0].strip() == str(pipes.expected())


def test_a_damaged_result_of_a_killed_stage_is_computed_again(hosts: FakeHosts, tmp_path: Path) -> None:
    keep, calls = tmp_path / "finished", []
    for _ in range(2):
        with on_hosts(pool(tmp_path, "a")):
            assert parallel_map(one_line, ["a", "b"], 2, "lines", keep=keep) == ["a", "b"]
        files = list(keep.iterdir())
        assert len(files) == 2
        files[0].write_bytes(files[0].read_bytes()[:100])
        calls.append(len(hosts.calls("ssh")))
    assert calls[0] < calls[1]


def test_srun_starts_workers(hosts: FakeHosts, tmp_path: Path) -> None:
    options = job_options(config("jobs=slurm", 'jobs.arguments="--partition=cpu --mem=1G"'))
    with on_hosts(JobPool(options, tmp_path / "log")):
        assert parallel_map(one_line, ["a\nb", "c", "d"], 2, "lines") == ["a b", "c", "d"]
    assert len(hosts.processes("srun")) == 2
    assert all("--unbuffered --partition=cpu --mem=1G sh -c cd " in call for call in hosts.calls("srun"))
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["slurm1.1.log", "slurm2.1.log"]


@NEEDS_SLURM
def test_jobs_of_a_real_slurm_are_cancelled_or_completed(
    pipes: NamedPipes, tmp_path: Path, meanwhile: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> None:
        pipes.wait_for_readers(2)
        subprocess.run(["scancel", "1"], check=True)
        wait_for(lambda: "JobId=3" in show_jobs())
        pipes.fill()

    with real_slurm(monkeypatch):
        meanwhile(act)
        with on_hosts(JobPool(job_options(config("jobs=slurm")), tmp_path / "log")):
            assert parallel_map(file_crc32, pipes.paths, 2, "pipes") == pipes.expected()
        wait_for(lambda: "JobState=COMPLETING" not in show_jobs())
        states = re.findall(r"JobId=(\d).*?JobState=(\w+)", show_jobs(), re.DOTALL)
    assert states[:2] == [("1", "CANCELLED"), ("2", "COMPLETED")], "the third may still start when all is done"


def test_workers_end_with_status_0_and_not_by_a_signal(pipes: NamedPipes, tmp_path: Path, meanwhile: Callable) -> None:
    def act() -> None:
        pipes.wait_for_readers(2)
        pipes.fill()

    status = tmp_path / "status"
    options = JobOptions("slurm", f"sh -c 'sh -c \"$0\"; echo $? >> {status}'")
    meanwhile(act)
    with on_hosts(JobPool(options, tmp_path / "log")):
        assert parallel_map(file_crc32, pipes.paths, 2, "pipes") == pipes.expected()
    assert status.read_text().split() == ["0", "0"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["jobs=ssh"], r"jobs=ssh: needs hosts; give e\.g\. jobs\.hosts=\[node1,node2\]"),
        (["jobs=local", "jobs.hosts=[a]"], "jobs.hosts: jobs=local takes none"),
        (["jobs=slurm", "jobs.timeout=0"], r"jobs\.timeout=0: must be above 0"),
        (["jobs=slurm", "jobs.timeout=soon"], r"jobs\.timeout=soon: "),
        (["jobs=ssh", "jobs.hosts=a"], r"jobs\.hosts=a: "),
        (["jobs=ssh", "jobs.hosts=[a]", "jobs.arguments='\"-p'"], r"jobs\.command=ssh .*No closing quotation"),
        (["jobs=slurm", "jobs.command=no-such-program"], "jobs=slurm: this host has no program no-such-program"),
        (["jobs=slurm", "+jobs.partition=cpu"], r"jobs\.partition: there is no such option"),
    ],
)
def test_wrong_options_are_one_line(hosts: FakeHosts, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_options(config(*overrides))
