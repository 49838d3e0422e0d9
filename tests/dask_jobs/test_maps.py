"""Maps on a Dask cluster of this host, and what may happen to it. Items are named pipes, so they last as needed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from asr_am.dask_jobs import client
from asr_am.dask_jobs.job_options import JobOptions
from asr_am.dask_jobs.keys import CERTIFICATE, KEY, make_keys
from asr_am.data.checksums import _crc32_once, file_crc32
from asr_am.data.textfile import read_lines
from asr_am.errors import InputError, one_line
from asr_am.features.cmvn_deltas import accumulate, add_deltas
from asr_am.parallel import on_cluster, parallel_map
from asr_am.stages.sections import job_options
from tests.support.configurations import config
from tests.support.dask_cluster import RunningCluster, end_worker, fail, running_cluster
from tests.support.named_pipes import NamedPipes, wait_for
from tests.support.processes import ended, process_of
from tests.support.real_slurm import NEEDS_SLURM, real_slurm, show_jobs

Act = Callable[[], None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with pytest.MonkeyPatch.context() as patch, running_cluster(tmp_path_factory.mktemp("cluster"), patch) as running:
        yield running


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


def test_results_are_those_of_this_host(
    cluster: RunningCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asr_am")
    random = np.random.default_rng(1)
    arrays = [random.standard_normal((5 + n, 3)).astype(np.float32) for n in range(7)]
    with on_cluster(cluster.jobs(tmp_path / "log")):
        for function in (accumulate, add_deltas):
            for chunk in (1, 3):
                found = parallel_map(function, arrays, 3, "arrays", chunk)
                for one, array in zip(found, arrays, strict=True):
                    np.testing.assert_array_equal(one, function(array))
        assert parallel_map(one_line, ["a\nb", "c"], 2, "lines", here=True) == ["a b", "c"]
        assert "on this host only" not in caplog.text
        assert parallel_map(lambda item: item + 1, [1, 2], 2, "sums") == [2, 3]
        assert "sums: on this host only, as " in caplog.text
    assert caplog.text.count("jobs=dask: scheduler tls://") == 1
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["dask.log"]


def test_errors_of_items_are_raised(cluster: RunningCluster, tmp_path: Path) -> None:
    missing = [tmp_path / "one", tmp_path / "two"]
    with on_cluster(cluster.jobs(tmp_path / "log")):
        with pytest.raises(InputError, match=r"(one|two): .*; look for it"):
            parallel_map(partial(read_lines, remedy="look for it"), missing, 2, "lists")
        with pytest.raises(FileNotFoundError) as error:
            parallel_map(fail, missing, 2, "sums")
        assert error.value.filename in map(str, missing)
        assert parallel_map(one_line, ["a", "b"], 2, "lines") == ["a", "b"], "the cluster goes on"


def test_what_a_worker_has_read_is_read_again_by_the_next_map(cluster: RunningCluster, tmp_path: Path) -> None:
    path = tmp_path / "read"
    cached = partial(_crc32_once, _size=1, _mtime_ns=1)
    with on_cluster(cluster.jobs(tmp_path / "log")):
        for content in (b"a", b"b"):
            path.write_bytes(content)
            assert parallel_map(cached, [path] * 4, 2, "sums") == [zlib.crc32(content)] * 4


def test_a_killed_worker_s_item_is_finished_elsewhere(
    cluster: RunningCluster, pipes: NamedPipes, tmp_path: Path, meanwhile: Callable
) -> None:
    def act() -> None:
        pipes.wait_for_readers(2)
        cluster.kill_worker()
        pipes.fill()

    before = cluster.workers()
    meanwhile(act)
    with on_cluster(cluster.jobs(tmp_path / "log")):
        assert parallel_map(file_crc32, pipes.paths, 2, "pipes") == pipes.expected()
    wait_for(lambda: len(cluster.workers()) == 2 and cluster.workers() != before)


def test_an_item_that_ends_every_worker_is_an_error(cluster: RunningCluster, tmp_path: Path) -> None:
    message = r"one job has ended 2 workers, the last one at tls://.*jobs\.memory"
    with on_cluster(cluster.jobs(tmp_path / "log")), pytest.raises(InputError, match=message):
        parallel_map(end_worker, [1, 2], 2, "ends")


def test_workers_must_share_software_and_files(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_cluster(cluster.jobs(tmp_path / "log")):
        with monkeypatch.context() as patch:
            patch.setitem(client.SOFTWARE, "torch", "1.0")
            with pytest.raises(InputError, match=r"worker on .* has torch 2.*, this stage 1\.0; start it again"):
                parallel_map(one_line, ["a", "b"], 2, "lines")
        for folder in (tmp_path / "log").glob("connection.*"):
            folder.rmdir()
        with pytest.raises(InputError, match=r"does not see .*connection\..*; hosts of jobs must share"):
            parallel_map(one_line, ["a", "b"], 2, "lines")


def test_another_key_is_refused(cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT", 2.0)
    make_keys(tmp_path / "keys")
    for options in (replace(cluster.options, keys=str(tmp_path / "keys")), replace(cluster.options, keys=None)):
        with (
            on_cluster(client.DaskJobs(options, tmp_path / "log")),
            pytest.raises(InputError, match=r"jobs\.scheduler=tls://.*: (no answer|needs jobs\.keys)"),
        ):
            parallel_map(one_line, ["a", "b"], 2, "lines")


def test_a_lost_scheduler_is_one_line(
    tmp_path: Path, meanwhile: Callable, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    make_keys(tmp_path)
    cert, address = str(tmp_path / CERTIFICATE), tmp_path / "scheduler.json"
    command = [
        sys.executable, "-m", "distributed.cli.dask_scheduler", "--protocol", "tls", "--host", "127.0.0.1",
        "--port", "0", "--no-dashboard", "--scheduler-file", str(address), "--tls-ca-file", cert, "--tls-cert", cert,
        "--tls-key", str(tmp_path / KEY),
    ]  # fmt: skip
    scheduler = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: address.exists() and address.read_text().endswith("}"))
        url = json.loads(address.read_text())["address"]
        options = JobOptions("dask", scheduler=url, keys=str(tmp_path), timeout=0.1)
        with (
            on_cluster(client.DaskJobs(options, tmp_path / "log")),
            pytest.raises(InputError, match=r"jobs=dask: there was no worker for 0\.1 s; see the logs in .*log"),
        ):
            parallel_map(one_line, ["a", "b"], 2, "lines")
        with on_cluster(client.DaskJobs(replace(options, timeout=None), tmp_path / "log")):
            caplog.clear()
            meanwhile(lambda: (wait_for(lambda: "waiting for workers" in caplog.text), scheduler.kill()))
            for _ in range(2):
                with pytest.raises(InputError, match=r"jobs=dask: the scheduler is lost.*The same command continues"):
                    parallel_map(one_line, ["a", "b"], 2, "lines")
    finally:
        scheduler.kill()
        scheduler.wait()
    assert "Traceback" not in caplog.text and "Traceback" not in capfd.readouterr().err


def test_a_stage_starts_workers_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with on_cluster(client.DaskJobs(job_options(config("jobs=dask")), tmp_path / "log")):
        processes = parallel_map(process_of, [1, 2, 3], 2, "processes")
    assert os.getpid() not in processes
    wait_for(lambda: ended(processes))
    assert "dashboard http://127.0.0.1:" in caplog.text
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["dask.log", "workers.log"]


@NEEDS_SLURM
def test_jobs_of_a_real_slurm_are_submitted_again(
    pipes: NamedPipes, tmp_path: Path, meanwhile: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> None:
        pipes.wait_for_readers(2)
        subprocess.run(["scancel", "1"], check=True)
        wait_for(lambda: "JobId=3" in show_jobs())  # the files of the first are closed by now
        pipes.fill()

    with real_slurm(monkeypatch):
        meanwhile(act)
        with on_cluster(client.DaskJobs(job_options(config("jobs=slurm", "jobs.memory=1GB")), tmp_path / "log")):
            assert parallel_map(file_crc32, pipes.paths, 2, "pipes") == pipes.expected()
        wait_for(lambda: "JobState=RUNNING" not in show_jobs())
