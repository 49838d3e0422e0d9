"""Estimates of what stages write, against what they have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asr_am.features.reader import FeatureReader
from asr_am.stages import egs, features, train
from asr_am.stages.target import used_bytes
from asr_am.train.checkpoint import KEPT
from tests.support.configurations import config
from tests.support.egs_alignments import write_alignments
from tests.support.manifest_corpus import write_corpus


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with data, features and alignments."""
    folder = tmp_path_factory.mktemp("exp")
    root = folder / "minicts"
    write_corpus(root / "data", speakers=20)
    for target in features.targets(config(f"exp={folder}", "nj=1")):
        target.run()
    labels = {}
    for subset in ("train", "dev"):
        reader = FeatureReader(root / "features", "mfcc", subset)
        labels[subset] = {name: np.ones(len(reader[name]), dtype=np.int32) for name in reader.utterances}
    write_alignments(root / "align/tri", labels)
    return folder


def test_features_and_examples(exp: Path) -> None:
    for kind in ("logmel", "lfbe64_lfr"):
        cfg = config(f"exp={exp}", "nj=1", f"features={kind}", "align=triphone")
        for target in features.targets(cfg) + egs.targets(cfg):
            target.run()
            assert target.num_bytes is not None
            assert target.num_bytes() == pytest.approx(used_bytes(target.out), rel=0.15), target.out


@pytest.mark.parametrize(("strategy", "optimizer"), [("sync", "adam"), ("ps_sync", "sgd")])
def test_a_training_run(exp: Path, strategy: str, optimizer: str) -> None:
    cfg = config(
        f"exp={exp}", "align=triphone", "features=logmel", "model.layers=1", "model.cells=64", "logger=none",
        "train.epochs=2", "train.batch_size=64", f"strategy={strategy}", f"train.optimizer.kind={optimizer}",
        "schedule.base=0.003", "launcher=virtual", "learners=2", "nj=1",
    )  # fmt: skip
    for target in [*egs.targets(cfg), *train.targets(cfg)]:
        target.run()
    checkpoints = sorted((target.out / "checkpoints").glob("checkpoint-*"))
    assert len(checkpoints) == KEPT
    assert target.num_bytes is not None
    most = used_bytes(target.out) + used_bytes(checkpoints[0])  # while a third one is written
    assert 0.6 < target.num_bytes() / most < 1
