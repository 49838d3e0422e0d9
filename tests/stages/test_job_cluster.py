"""Stages on a Dask cluster, one of whose workers is killed."""

from __future__ import annotations

import gzip
import logging
import shutil
import threading
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from asr_am.egs import egs_writer
from asr_am.features import extract
from asr_am.features.reader import FeatureReader
from asr_am.stages.app import job_cluster
from asr_am.stages.target import DONE, KEY
from tests.support.configurations import config
from tests.support.dask_cluster import running_cluster
from tests.support.egs_alignments import write_alignments
from tests.support.manifest_corpus import write_corpus
from tests.support.named_pipes import wait_for

OPTIONS = ("corpus=minicts", "features=logmel", "align=triphone", "nj=4")


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "ARCHIVE_SECONDS", 1.0)
    monkeypatch.setattr(egs_writer, "BLOCK", 3)


def run_stage(name: str, exp: Path, *overrides: str) -> None:
    cfg = config(*OPTIONS, f"exp={exp}", *overrides)
    with job_cluster(cfg):
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


def test_stages_finish_when_a_worker_is_killed(
    tmp_path: Path, small_tasks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asr_am")
    here, there = tmp_path / "here", tmp_path / "there"
    write_corpus(here / "minicts" / "data", speakers=6)
    shutil.copytree(here, there)
    with running_cluster(tmp_path, monkeypatch) as cluster:

        def kill_one() -> None:
            wait_for(lambda: any(there.glob("minicts/features/*.partial/finished/*")))
            cluster.kill_worker()

        killer = threading.Thread(target=kill_one)
        killer.start()
        run_stage("features", there, *cluster.overrides)
        killer.join()
        run_stage("features", here, "nj=1")
        for root in (here, there):
            write_labels(root / "minicts")
        run_stage("egs", here, "nj=1")
        run_stage("egs", there, *cluster.overrides)
    made = {name: contents(here / "minicts" / name) for name in ("features", "egs")}
    assert made == {name: contents(there / "minicts" / name) for name in ("features", "egs")}
    assert sum(name.startswith("logmel/train.") and name.endswith(".ark") for name in made["features"]) == 6
    assert "on this host only" not in caplog.text and caplog.text.count("jobs=dask: scheduler tls://") == 2
