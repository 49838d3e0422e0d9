"""Stages on four hosts, network namespaces of this machine where the user may make them. One host is killed."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from asr_am.egs import egs_writer
from asr_am.features import extract
from asr_am.features.reader import FeatureReader
from asr_am.jobs import pool
from asr_am.stages.app import job_hosts
from asr_am.stages.target import DONE, KEY
from tests.support.configurations import config
from tests.support.egs_alignments import write_alignments
from tests.support.job_hosts import FakeHosts
from tests.support.manifest_corpus import write_corpus
from tests.support.named_pipes import wait_for

NAMES = ("a", "b", "c", "d")
OPTIONS = ("corpus=minicts", "features=logmel", "align=triphone", "nj=4")


@pytest.fixture
def namespaces() -> Iterator[str]:
    """Makes a network namespace for each host. Yields what their names begin with, which may be that of none."""
    prefix = f"asr-am-{os.getpid()}-"
    if shutil.which("ip") is not None:
        for name in NAMES:
            subprocess.run(["ip", "netns", "add", prefix + name], check=False, capture_output=True)
    yield prefix
    for name in NAMES:
        if Path(f"/run/netns/{prefix}{name}").exists():
            subprocess.run(["ip", "netns", "del", prefix + name], check=True)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "ARCHIVE_SECONDS", 1.0)
    monkeypatch.setattr(egs_writer, "BLOCK", 3)
    monkeypatch.setattr(pool, "RETRY", 0.05)


def run_stage(name: str, exp: Path, *overrides: str) -> None:
    cfg = config(*OPTIONS, f"exp={exp}", *overrides)
    with job_hosts(cfg):
        for target in import_module(f"asr_am.stages.{name}").targets(cfg):
            assert target.run()


def write_labels(root: Path) -> None:
    """Writes random alignments of the features."""
    random = np.random.default_rng(1)
    labels = {
        subset: {
            name: random.integers(1, 61, len(reader[name]), dtype=np.int32) for name in reader.utterances
        }
        for subset, reader in ((s, FeatureReader(root / "features", "logmel", s)) for s in ("train", "dev"))
    }  # fmt: skip
    write_alignments(root / "align" / "tri", labels)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files that a stage has made. Those of gzip hold the time."""
    return {
        str(path.relative_to(folder)): gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (DONE, KEY)
    }


def test_stages_finish_elsewhere(
    tmp_path: Path,
    namespaces: str,
    small_tasks: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "asr_am")
    here, there = tmp_path / "here", tmp_path / "there"
    write_corpus(here / "minicts" / "data", speakers=6)
    shutil.copytree(here, there)
    hosts = FakeHosts(tmp_path / "hosts", monkeypatch, namespaces)
    on_four = ("jobs=ssh", f"jobs.hosts=[{','.join(NAMES)}]")

    def kill_one() -> None:
        wait_for(lambda: any(there.glob("minicts/features/*.partial/finished/*")) and hosts.processes("c"))
        links.update(os.readlink(f"/proc/{process}/ns/net") for name in NAMES for process in hosts.processes(name))
        hosts.shut_down("c")

    links: set[str] = set()
    killer = threading.Thread(target=kill_one)
    killer.start()
    run_stage("features", there, *on_four)
    killer.join()
    run_stage("features", here, "nj=1")
    for root in (here, there):
        write_labels(root / "minicts")
    run_stage("egs", here, "nj=1")
    run_stage("egs", there, *on_four)
    made = {name: contents(here / "minicts" / name) for name in ("features", "egs")}
    assert made == {name: contents(there / "minicts" / name) for name in ("features", "egs")}
    assert sum(name.startswith("logmel/train.") and name.endswith(".ark") for name in made["features"]) == 6
    assert "on this host only" not in caplog.text and "c is left out" in caplog.text
    assert all(hosts.processes(name) for name in "abd")
    if not Path(f"/run/netns/{namespaces}a").exists():
        pytest.skip("passed, but on hosts without network namespaces, which this user may not make")
    assert len(links) > 1 and os.readlink("/proc/self/ns/net") not in links
