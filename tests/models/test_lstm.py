from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from asr_am.errors import InputError
from asr_am.models.lstm import Lstm, LstmOptions
from asr_am.models.model_file import load_acoustic_model, save_model
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainer import train
from tests.support.egs_examples import write_examples


def make(lookahead: int = 3) -> Lstm:
    torch.manual_seed(0)
    model = Lstm(LstmOptions(layers=2, cells=8, lookahead=lookahead, dropout=0.3), inputs=6, outputs=11)
    model.set_normalisation(torch.arange(6.0), torch.arange(1.0, 7.0))
    return model.eval()


def inputs() -> Tensor:
    return torch.randn(3, 9, 6) * torch.arange(1.0, 7.0) + torch.arange(6.0)


def test_sizes_of_the_paper() -> None:
    """Ladkat et al., section 3.2: approximately 24 M parameters, 93 MB."""
    with torch.device("meta"):
        model = Lstm(LstmOptions(layers=5, cells=768), inputs=192, outputs=3183)
    parameters = sum(p.numel() for p in model.parameters())
    assert round(parameters / 1e6) == 24 and round(parameters * 4 / 2**20) == 93


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_frame_is_classified_after_the_lookahead(lookahead: int) -> None:
    """Checks that the logits of frame t depend on frames 0 to t + A only."""
    model, x_BTF = make(lookahead), inputs()[:1].requires_grad_()
    for t in range(9):
        (gradient_BTF,) = torch.autograd.grad(model(x_BTF)[0, t].sum(), x_BTF)
        used = gradient_BTF[0].abs().sum(1) > 0
        assert used.tolist() == [frame <= t + lookahead for frame in range(9)]


def test_it_equals_a_delayed_torch_lstm() -> None:
    model, x_BTF = make(), inputs()
    reference = nn.LSTM(6, 8, num_layers=2, batch_first=True)
    for k, layer in enumerate(model.layers):
        for name, weight in layer.named_parameters():
            getattr(reference, name.replace("l0", f"l{k}")).data.copy_(weight)
    long_BTF = torch.cat([x_BTF, x_BTF[:, -1:].expand(-1, 3, -1)], dim=1)
    expected_BTP = model.output(reference((long_BTF - model.mean_F) * model.scale_F)[0])[:, 3:]
    torch.testing.assert_close(model(x_BTF), expected_BTP)


def test_padding_has_no_influence() -> None:
    model, x_BTF, lengths_B = make(), inputs(), torch.tensor([9, 4, 1])
    logits_BTP = model(x_BTF, lengths_B)
    assert logits_BTP.shape == (3, 9, 11)
    for b, length in enumerate(lengths_B.tolist()):
        torch.testing.assert_close(logits_BTP[b, :length], model(x_BTF[b : b + 1, :length])[0])


def test_a_saved_model_is_the_same_model(tmp_path: Path) -> None:
    model, x_BTF = make(), inputs()
    save_model(tmp_path / "best.pt", model, {})
    loaded, _ = load_acoustic_model(tmp_path / "best.pt")
    assert isinstance(loaded, Lstm) and torch.equal(loaded(x_BTF), model(x_BTF)) and not loaded.training
    value = torch.load(tmp_path / "best.pt", weights_only=True)
    torch.save({**value, "model": "transformer"}, tmp_path / "best.pt")
    with pytest.raises(InputError, match=r"best.pt: model._target_=transformer: .* of an installed package"):
        load_acoustic_model(tmp_path / "best.pt")


def test_it_is_trained_from_its_configuration(tmp_path: Path) -> None:
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 20)
    sizes = {"_target_": "asr_am.models.lstm.LstmOptions", "layers": 1, "cells": 16, "lookahead": 1}
    options = TrainOptions.build({"epochs": 3, "batch_size": 8, "threads": 1}, sizes, {"base": 0.3}, seed=1)
    train(egs_dir, tmp_path / "run", options)
    model, info = load_acoustic_model(tmp_path / "run/best.pt")
    assert isinstance(model, Lstm) and model.options.lookahead == 1 and info["heldout_loss"] < 1.2 < 1.79  # of chance
    for wrong, said in (
        ({"_target_": "asr_am.models.gru.GruOptions"}, "_target_=.* cannot be imported"),
        ({"_target_": "asr_am.models.lstm.Lstm"}, "_target_=.* is no model options"),
        ({"_target_": "os.mkdir"}, "_target_=os.mkdir: must be in asr_am.models, or an entry point asr_am.models"),
        ({"lookahead": -1}, "lookahead=-1: must be at least 0"),
        ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
        ({"projection": 8}, "projection: there is no such option"),
    ):
        with pytest.raises(InputError, match=rf"^model\.{said}"):
            TrainOptions.build({}, sizes | wrong, {}, seed=1)
