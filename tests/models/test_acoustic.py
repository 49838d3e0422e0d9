"""What every acoustic model must hold, whatever its layers are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from asr_am.decode.scorer import Window, log_posteriors
from asr_am.distributed.strategies.sync import Sync
from asr_am.egs.loader import IGNORE
from asr_am.egs.store import log_priors
from asr_am.errors import InputError
from asr_am.models.acoustic import AcousticModel, model_options
from asr_am.models.model_file import load_acoustic_model, save_model
from asr_am.network_export import export_network
from asr_am.train.frame_loss import batch_loss
from asr_am.train.schedule import Anneal
from asr_am.train.trainer import train
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, virtually

SMALL = {
    "blstm": {"layers": 2, "cells": 8, "projection": 5},
    "blstm 3": {"layers": 2, "cells": 8, "projection": 5, "subsampling": 3},
    "lstm": {"layers": 2, "cells": 8},
    "tdnnf": {"near_layers": 1, "far_layers": 2, "width": 12, "bottleneck": 4, "projection": 5},
    "tdnnf 3": {"near_layers": 1, "far_layers": 1, "width": 12, "bottleneck": 4, "projection": 5, "subsampling": 3},
    "conformer": {"layers": 2, "width": 8, "heads": 2, "feed_forward": 12, "kernel": 5},
    "conformer 3": {"layers": 1, "width": 8, "heads": 2, "feed_forward": 12, "kernel": 3, "subsampling": 3},
}
NEW = [name for name in SMALL if name not in ("blstm", "lstm")]


def options_of(name: str, **changed: object) -> dict:
    file = name.split()[0]
    return {"_target_": f"asr_am.models.{file}.{file.capitalize()}Options", **SMALL[name], **changed}


def make(name: str, inputs: int = 6, outputs: int = 11, **changed: object) -> AcousticModel:
    torch.manual_seed(0)
    model = model_options(**options_of(name, **changed)).make(inputs, outputs)
    model.set_normalisation(torch.arange(1.0, 1.0 + inputs), torch.arange(2.0, 2.0 + inputs))
    return model


@pytest.mark.parametrize("name", SMALL)
def test_padding_has_no_influence(name: str) -> None:
    """Nor has what is in it, however large."""
    model, lengths_B = make(name).eval(), torch.tensor([11, 4, 1, 10])
    x_BTF = torch.randn(4, 11, 6)
    logits_BKP = model(x_BTF, lengths_B)
    assert logits_BKP.shape == (4, -(-11 // model.subsampling), 11)
    other_BTF = x_BTF.clone()
    for b, length in enumerate(lengths_B.tolist()):
        outputs = -(-length // model.subsampling)
        torch.testing.assert_close(logits_BKP[b, :outputs], model(x_BTF[b : b + 1, :length])[0], atol=1e-5, rtol=1e-5)
        other_BTF[b, length:] = 1e4
    other_BKP = model(other_BTF, lengths_B)
    for b, outputs in enumerate((-(-lengths_B // model.subsampling)).tolist()):
        torch.testing.assert_close(other_BKP[b, :outputs], logits_BKP[b, :outputs], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_cross_entropy_of_the_middle_frames(name: str, dtype: torch.dtype) -> None:
    model, lengths_B, n = make(name).eval(), torch.tensor([11, 4, 1]), make(name).subsampling
    x_BTF, targets_BT = torch.randn(3, 11, 6), torch.randint(11, (3, 11))
    targets_BT[torch.arange(11) >= lengths_B[:, None]] = IGNORE
    loss, correct = batch_loss(model, x_BTF, lengths_B, targets_BT, dtype)
    sums = right = 0.0
    for b, length in enumerate(lengths_B.tolist()):
        logits_KP = model(x_BTF[b : b + 1, :length])[0]
        targets_K = torch.stack([targets_BT[b, min(k + n // 2, length - 1)] for k in range(0, length, n)])
        frames_K = torch.tensor([min(n, length - k) for k in range(0, length, n)])
        sums += float((cross_entropy(logits_KP, targets_K, reduction="none") * frames_K).sum().detach())
        right += float(((logits_KP.argmax(1) == targets_K) * frames_K).sum())
    exact = dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(sums, rel=1e-5 if exact else 2e-2)
    assert not exact or float(correct) == right
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NEW)
def test_nothing_but_weights_changes_in_training(name: str) -> None:
    """Strategies send parameters. Statistics of batches would be a learner's own."""
    model = make(name, dropout=0.2).train()
    before = {key: value.clone() for key, value in model.named_buffers()}
    batch_loss(model, torch.randn(2, 9, 6), None, torch.zeros(2, 9, dtype=torch.int64))[0].backward()
    assert before.keys() == {"mean_F", "scale_F"}
    assert all(torch.equal(value, before[key]) for key, value in model.named_buffers())


@pytest.mark.parametrize("name", ["tdnnf 3", "conformer"])
def test_sync_learners_are_one_learner(name: str, tmp_path: Path) -> None:
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 12)
    options = replace(OPTIONS, model=model_options(**options_of(name)), schedule=Anneal(base=0.02))
    train(egs_dir, tmp_path / "one", options)
    one = json.loads((tmp_path / "one/summary.json").read_text())
    four = virtually(egs_dir, tmp_path / "four", Sync, options=options)
    assert four["heldout_loss"] == pytest.approx(one["heldout_loss"], rel=1e-3)
    model, info = load_acoustic_model(tmp_path / "four/best.pt")
    assert type(model).__name__.lower() == name.split()[0] and info["heldout_loss"] < 1.79


@pytest.mark.parametrize(("name", "chain"), [("tdnnf", False), ("blstm 3", True), ("conformer 3", True)])
def test_exported_networks_have_the_same_scores(name: str, chain: bool, tmp_path: Path) -> None:
    info = {"kind": "logmel", "chunk": 12, "pdf_counts": torch.arange(1, 12)}
    model, x_BTF = make(name).eval(), torch.randn(3, 12, 6)
    save_model(tmp_path / "best.pt", model, info | {"chain": chain})
    assert export_network(tmp_path / "best.pt", tmp_path / "net.pt2") < 1e-4
    exported, expected = torch.export.load(tmp_path / "net.pt2").module()(x_BTF), model(x_BTF)
    if not chain:
        expected = expected.log_softmax(2) - torch.from_numpy(log_priors(info["pdf_counts"].numpy()))
    torch.testing.assert_close(exported, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(OSError, match="/proc/"):
        export_network(tmp_path / "best.pt", Path("/proc/net.pt2"))


def test_outputs_of_chain_models_are_repeated_and_others_are_made_for_each_frame() -> None:
    model, x_TF = make("tdnnf 3").eval(), torch.randn(12, 6)
    scores_TP = torch.from_numpy(log_posteriors(model, x_TF.numpy(), Window(0, 0), softmax=False))
    expected_KP = model(x_TF[None])[0]
    torch.testing.assert_close(scores_TP, expected_KP[torch.arange(12) // 3])
    scores_TP = torch.from_numpy(log_posteriors(model, x_TF.numpy(), Window(0, 0)))
    torch.testing.assert_close(scores_TP[1::3], expected_KP.log_softmax(1))  # middle frames
    x_TF = x_TF[:10]
    shifted_TP = torch.from_numpy(log_posteriors(model, x_TF.numpy(), Window(9, 1)))  # windows at frames 0 and 1
    assert shifted_TP.shape == (10, 11) and shifted_TP.isfinite().all()


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("tdnnf", {"subsampling": 2}, "subsampling=2: must be one of 1, 3"),
        ("tdnnf", {"bottleneck": 0}, "bottleneck=0: must be at least 1"),
        ("conformer", {"subsampling": 5}, "subsampling=5: must be one of 1, 2, 3, 4"),
        ("conformer", {"heads": 3}, "width=8: must be a multiple of model.heads=3"),
        ("conformer", {"kernel": 4}, "kernel=4: must be odd"),
        ("conformer", {"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
    ],
)
def test_options_are_checked(name: str, wrong: dict, said: str) -> None:
    with pytest.raises(InputError, match=rf"^model\.{said}"):
        model_options(**options_of(name, **wrong))
