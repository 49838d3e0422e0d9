"""Training with the MMI loss: chunks longer than those of the examples, strategies, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse

from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import SingleProcess
from asr_am.egs.loader import IGNORE, Loader
from asr_am.egs.store import EgsSet
from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.model_file import load_acoustic_model
from asr_am.train.mmi_loss import MmiOptions
from asr_am.train.run_setup import RunSetup, StrategyFactory
from asr_am.train.simulate import simulate_run
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainer import train_run
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, WORKLOAD, cluster

PDFS = 6
MMI = replace(OPTIONS, mmi=MmiOptions(acoustic_scale=1.0), chunk=20, epochs=3)


@pytest.fixture
def egs_dir(tmp_path: Path) -> Path:
    return write_examples(tmp_path / "egs")


def write_graph(path: Path, pdfs: int = PDFS) -> Path:
    """Writes a graph whose states each have a pdf and last three frames on average, as in the examples."""
    arcs_SS = np.full((pdfs, pdfs), 1 / (3 * (pdfs - 1)), np.float32)
    np.fill_diagonal(arcs_SS, 2 / 3)
    start_S = np.full(pdfs, 1 / pdfs, np.float32)
    DenominatorGraph(sparse.csr_array(arcs_SS), np.arange(pdfs, dtype=np.int32), start_S, pdfs).save(path)
    return path


def make_run(
    egs_dir: Path, out: Path, options: TrainOptions, strategy: StrategyFactory = Local, learners: int = 1
) -> RunSetup:
    graph = write_graph(egs_dir.parent / "graph.npz")
    return RunSetup(egs_dir, out, options, strategy, learners=learners, denominator=graph)


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def test_chunks_may_be_longer_than_those_of_the_examples(egs_dir: Path) -> None:
    egs = EgsSet(egs_dir, "train")
    loader = Loader(egs, 100, chunk=64)
    batch = loader.batch(loader.plan(0), 0)
    assert batch.lengths_B.tolist() == [egs.index.frames_U[u] for u in batch.utterances]
    for x_TF, targets_T, u, length in zip(
        batch.x_BTF, batch.targets_BT, batch.utterances, batch.lengths_B, strict=True
    ):
        rows = slice(begin := int(egs.index.begin_U[u]), begin + int(length))
        shard = egs.index.shard_U[u]
        assert np.array_equal(x_TF[:length].numpy(), egs.features[shard][rows].astype(np.float32))
        assert np.array_equal(targets_T[:length].numpy(), egs.targets[shard][rows])
        assert (x_TF[length:] == 0).all() and (targets_T[length:] == IGNORE).all()


def test_training_lowers_the_loss_and_keeps_the_chunk(egs_dir: Path, tmp_path: Path) -> None:
    train_run(make_run(egs_dir, out := tmp_path / "run", replace(MMI, epochs=6)), SingleProcess())
    losses = summary(out)["heldout_loss"]
    assert losses[-1] < losses[0] - 0.1
    assert load_acoustic_model(out / "best.pt")[1]["chunk"] == 20


def test_learners_in_step_are_one_learner(egs_dir: Path, tmp_path: Path) -> None:
    train_run(make_run(egs_dir, one := tmp_path / "one", MMI), SingleProcess())
    run = make_run(egs_dir, four := tmp_path / "four", MMI, Sync, learners=4)
    simulate_run(run, cluster(), WORKLOAD)
    assert summary(four)["heldout_loss"] == pytest.approx(summary(one)["heldout_loss"], rel=1e-4)


def test_a_resumed_run_has_the_same_bits(egs_dir: Path, tmp_path: Path) -> None:
    train_run(make_run(egs_dir, whole := tmp_path / "whole", MMI), SingleProcess())
    train_run(make_run(egs_dir, parts := tmp_path / "parts", replace(MMI, epochs=1)), SingleProcess())
    train_run(make_run(egs_dir, parts, MMI), SingleProcess())
    (a, _), (b, _) = (load_acoustic_model(out / "best.pt") for out in (whole, parts))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_what_does_not_fit_is_refused(egs_dir: Path, tmp_path: Path) -> None:
    run = RunSetup(egs_dir, tmp_path / "run", MMI, Local)
    with pytest.raises(InputError, match="needs a denominator graph"):
        run.learner(SingleProcess())
    graph = write_graph(tmp_path / "graph.npz", PDFS + 1)
    run = RunSetup(egs_dir, tmp_path / "run", MMI, Local, denominator=graph)
    with pytest.raises(InputError, match=r"graph.npz: has 7 pdfs, the examples have 6; run stage 5"):
        run.learner(SingleProcess())
    with pytest.raises(InputError, match=r"train\.label_smoothing"):
        replace(MMI, label_smoothing=0.1)
    with pytest.raises(InputError, match=r"train\.chunk=-1"):
        replace(MMI, chunk=-1)
