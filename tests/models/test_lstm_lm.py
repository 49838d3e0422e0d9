"""Probabilities, sizes and files of the recurrent LM. Shapes: B sentences, T units of a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.errors import InputError
from asr_am.lang.units import BOUNDARY, Units
from asr_am.models import lm_scorer
from asr_am.models.lm_file import load_lm, save_lm
from asr_am.models.lm_scorer import word_logprobs
from asr_am.models.lstm_lm import IGNORED, LstmLm, LstmLmOptions

UNITS = Units(["</s>", "<unk>", "▁GO", "ING", "▁SEE"], {"GO": (2,), "GOING": (2, 3), "SEE": (4,), "SEEING": (4, 3)})
SMALL = LstmLmOptions(embedding=6, cells=8, projection=5)
SENTENCES = [["GOING", "SEE"], [], ["SEEING", "WHAT", "GO", "GO"], ["SEE"]]


def model(options: LstmLmOptions = SMALL) -> LstmLm:
    torch.manual_seed(1)
    made = LstmLm(options, len(UNITS)).eval()
    torch.nn.init.normal_(made.output.weight)
    return made


def slow_logprobs(lm: LstmLm, sentence: list[str]) -> list[float]:
    """Computes one unit after the other, each from the complete history."""
    history, found = [BOUNDARY], []
    for spelled in [*(UNITS.of(word) for word in sentence), (BOUNDARY,)]:
        total = 0.0
        for unit in spelled:
            h_P = lm.hidden(torch.tensor([history]))[0, -1:]
            total += torch.log_softmax(lm.logits(h_P), dim=1)[0, unit].item()
            history.append(unit)
        found.append(total)
    return found


@pytest.mark.parametrize(("positions", "logits"), [(4096, 1 << 25), (3, 7)])
def test_word_probabilities_are_the_sums_of_their_units(
    positions: int, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_scorer, "POSITIONS", positions)
    monkeypatch.setattr(lm_scorer, "LOGITS", logits)
    lm = model()
    for sentence, found in zip(SENTENCES, word_logprobs(lm, UNITS, SENTENCES), strict=True):
        assert len(found) == len(sentence) + 1
        assert found == pytest.approx(slow_logprobs(lm, sentence), abs=1e-5)


def test_the_loss_is_the_mean_over_units_with_a_target() -> None:
    lm = model()
    input_BT = torch.tensor([[BOUNDARY, 2, 3], [BOUNDARY, 4, 0]])
    target_BT = torch.tensor([[2, 3, BOUNDARY], [4, BOUNDARY, IGNORED]])
    going, see = word_logprobs(lm, UNITS, [["GOING"], ["SEE"]])
    assert lm(input_BT, target_BT).item() == pytest.approx(-(going.sum() + see.sum()) / 5, abs=1e-5)


@pytest.mark.parametrize("options", [SMALL, LstmLmOptions(embedding=5, cells=8, projection=5, tied=True)])
def test_tied_embeddings_share_parameters(options: LstmLmOptions) -> None:
    lm = LstmLm(options, 100)
    lstm = 4 * options.cells * (options.embedding + options.projection + 2) + options.projection * options.cells
    rows = options.embedding if options.tied else options.embedding + options.projection
    assert sum(p.numel() for p in lm.parameters()) == 100 * (rows + 1) + lstm


def test_training_with_samples_looks_rows_up_and_validation_does_not_sample() -> None:
    lm = LstmLm(LstmLmOptions(embedding=6, cells=8, projection=5, samples=2), 50)
    input_BT, target_BT = torch.tensor([[0, 7]]), torch.tensor([[7, 0]])
    lm.train()(input_BT, target_BT).backward()
    for table, rows in ((lm.embedding, 2), (lm.output, 4)):
        assert table.weight.grad is not None and 0 < int(table.weight.grad.any(dim=1).sum()) <= rows
    lm.eval()
    assert lm(input_BT, target_BT).item() == lm(input_BT, target_BT).item() == pytest.approx(np.log(50), abs=0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"projection": 256}, "must be below cells"),
        ({"tied": True, "embedding": 64}, "must be equal"),
        ({"dropout": 1.0}, "dropout"),
        ({"cells": 0}, "at least 1"),
    ],
)
def test_invalid_options_are_refused(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LstmLmOptions(**values)


def test_more_samples_than_units_are_refused() -> None:
    with pytest.raises(InputError, match="there are 5 units"):
        LstmLm(LstmLmOptions(samples=6), 5)


def test_the_file_holds_the_same_model(tmp_path: Path) -> None:
    lm = model()
    save_lm(tmp_path / "best.pt", lm, UNITS, {"epoch": 3})
    loaded, units, info = load_lm(tmp_path / "best.pt")
    assert units == UNITS and info == {"epoch": 3}
    for a, b in zip(word_logprobs(lm, UNITS, SENTENCES), word_logprobs(loaded, units, SENTENCES), strict=True):
        assert np.array_equal(a, b)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    with pytest.raises(InputError, match=r"best.pt: not readable.*run stage 8 \(rescore\) again"):
        load_lm(path)
    save_lm(path, model(), UNITS, {})
    content = path.read_bytes()
    for cut in (0, 100, len(content) // 2, len(content) - 10):
        path.write_bytes(content[:cut])
        with pytest.raises(InputError, match="not readable"):
            load_lm(path)
    torch.save({"format": "asr_am acoustic model 1"}, path)
    with pytest.raises(InputError, match="is not a language model"):
        load_lm(path)
    lm = model()
    lm.bias.weight.data[0] = float("nan")
    save_lm(path, lm, UNITS, {})
    with pytest.raises(InputError, match="not finite"):
        load_lm(path)
    save_lm(path, model(), Units(["</s>", "<unk>"], {}), {})
    with pytest.raises(InputError, match="not a complete language model"):
        load_lm(path)
