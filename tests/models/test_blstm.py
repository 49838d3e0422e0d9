from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asr_am.errors import InputError
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.models.model_file import load_acoustic_model, save_model


@pytest.fixture
def model() -> Blstm:
    torch.manual_seed(0)
    model = Blstm(BlstmOptions(layers=2, cells=8, projection=5, dropout=0.3), inputs=6, outputs=11)
    model.set_normalisation(torch.arange(6.0), torch.arange(1.0, 7.0))
    return model.eval()


def test_sizes_of_the_paper() -> None:
    """Zhang et al.: 6 x 512, projection 256, 32,000 outputs, 260 inputs: 165 MB of weights."""
    with torch.device("meta"):
        model = Blstm(BlstmOptions(layers=6, cells=512, projection=256), inputs=260, outputs=32000)
    megabytes = sum(p.numel() for p in model.parameters()) * 4 / 1e6
    assert 160 < megabytes < 175


def test_features_are_normalised_and_padding_ignored(model: Blstm) -> None:
    x_BTF = torch.randn(3, 9, 6) * torch.arange(1.0, 7.0) + torch.arange(6.0)
    lengths_B = torch.tensor([9, 4, 7])
    logits_BTP = model(x_BTF, lengths_B)
    assert logits_BTP.shape == (3, 9, 11)
    for b, length in enumerate(lengths_B.tolist()):
        torch.testing.assert_close(logits_BTP[b, :length], model(x_BTF[b : b + 1, :length])[0])
    bare = Blstm(model.options, 6, 11).eval()
    bare.load_state_dict({**model.state_dict(), "mean_F": torch.zeros(6), "scale_F": torch.ones(6)})
    normal_BTF = (x_BTF - torch.arange(6.0)) / torch.arange(1.0, 7.0)
    torch.testing.assert_close(bare(normal_BTF, lengths_B), logits_BTP)


def test_a_saved_model_is_the_same_model(model: Blstm, tmp_path: Path) -> None:
    info = {"kind": "logmel", "chunk": 21, "pdf_counts": torch.arange(11), "epoch": 3}
    save_model(tmp_path / "best.pt", model, info)
    loaded, back = load_acoustic_model(tmp_path / "best.pt")
    x_BTF = torch.randn(2, 21, 6)
    assert torch.equal(loaded(x_BTF), model(x_BTF)) and not loaded.training
    assert back["dim"] == 6 and back["num_pdfs"] == 11 and torch.equal(back["pdf_counts"], torch.arange(11))
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_damaged_models_are_input_errors(model: Blstm, tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    save_model(path, model, {})
    content = path.read_bytes()
    good = torch.load(path, weights_only=True)
    with pytest.raises(InputError, match="nowhere"):
        load_acoustic_model(tmp_path / "nowhere.pt")
    for damaged in (b"", b"hello", content[:100], content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"best\.pt"):
            load_acoustic_model(path)
    weights = good["weights"]
    wrongs = [
        {"format": "other"},
        {**good, "outputs": 12},
        {**good, "options": {"layers": 2}, "weights": {}},
        {**good, "options": {"depth": 2}},
        {**good, "weights": {**weights, "mean_F": torch.full((6,), torch.nan)}},
        {key: value for key, value in good.items() if key != "info"},
        [1, 2],
    ]
    for wrong in wrongs:
        torch.save(wrong, path)
        with pytest.raises(InputError, match=r"best\.pt"):
            load_acoustic_model(path)


def test_code_in_a_model_file_is_refused_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"format": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match=r"evil\.pt"):
        load_acoustic_model(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
