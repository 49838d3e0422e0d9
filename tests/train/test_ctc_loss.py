"""The loss of CTC beside sums over all outputs, one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import SingleProcess
from asr_am.egs.loader import IGNORE
from asr_am.errors import InputError
from asr_am.models.model_file import load_acoustic_model
from asr_am.models.tdnnf import TdnnfOptions
from asr_am.train.chain_loss import ChainOptions, add_xent
from asr_am.train.ctc_loss import CtcLoss, CtcOptions, ctc_scores
from asr_am.train.run_setup import RunSetup
from asr_am.train.schedule import Anneal
from asr_am.train.simulate import simulate_run
from asr_am.train.trainer import train_run
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, WORKLOAD, cluster

PHONES, PDFS = 3, 6
# pdf of each frame: that of a phone's first frame, then that of the others. The second chunk begins inside a phone.
CHUNKS = [[0, 3, 3, 1, 4, 0, 3, 3], [4, 4, 2, 5, 5], [2, 2, 5]]
SEQUENCES = [[0, 1, 0], [1, 2], [2, 2]]


def summed(scores_KC: np.ndarray, phones: list[int]) -> float:
    """Sums over all outputs that become these phones. The last column is blank."""
    total = 0.0
    for path in product(range(PHONES + 1), repeat=len(scores_KC)):
        if [unit for unit, _ in groupby(path) if unit != PHONES] == phones:
            total += np.exp(sum(scores_KC[k, unit] for k, unit in enumerate(path)))
    return float(np.log(total))


def test_the_loss_is_that_of_all_outputs_that_become_the_phones() -> None:
    torch.manual_seed(1)
    model = TdnnfOptions(1, 1, 8, 4, 6, subsampling=1).make(4, PDFS)
    add_xent(model)
    lengths_B = torch.tensor([len(chunk) for chunk in CHUNKS])
    targets_BT = torch.tensor([chunk + [IGNORE] * (8 - len(chunk)) for chunk in CHUNKS])
    x_BTF = torch.randn(3, 8, 4)
    loss, _ = CtcLoss(PDFS, CtcOptions(xent=0.0))(model, x_BTF, lengths_B, targets_BT)
    with torch.no_grad():
        scores_BKC = model(x_BTF, lengths_B)[..., : PHONES + 1].log_softmax(-1).double().numpy()
    sums = [summed(scores_BKC[b, :n], SEQUENCES[b]) for b, n in enumerate(lengths_B.tolist())]
    assert float(loss.detach()) == pytest.approx(-sum(sums), rel=1e-4)
    loss.backward()
    assert model.output.weight.grad is not None
    assert not model.output.weight.grad[PHONES + 1 :].any(), "pdfs that are no output of CTC"


def test_what_is_decoded_with_is_emitted_by_phones_of_one_state() -> None:
    """Of each phone the first step emits it, and a later one it or blank."""
    logits_KP = torch.randn(4, PDFS, generator=torch.Generator().manual_seed(1))
    p_KC = logits_KP[:, : PHONES + 1].softmax(-1)
    expected = torch.cat([p_KC[:, :PHONES], p_KC[:, :PHONES] + p_KC[:, PHONES:]], dim=1)
    torch.testing.assert_close(ctc_scores(logits_KP).exp(), expected)


def test_learners_are_one_learner(tmp_path: Path) -> None:
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 12)
    options = replace(
        OPTIONS, model=TdnnfOptions(1, 1, 12, 4, 6, subsampling=3), ctc=CtcOptions(), schedule=Anneal(base=0.01)
    )
    train_run(RunSetup(egs_dir, tmp_path / "run", options, Local), SingleProcess())
    simulate_run(RunSetup(egs_dir, tmp_path / "four", options, Sync, learners=4), cluster(), WORKLOAD, 0)
    losses = [json.loads((tmp_path / out / "summary.json").read_text())["heldout_loss"] for out in ("run", "four")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][1] < losses[0][0]
    trained, info = load_acoustic_model(tmp_path / "run/best.pt")
    assert info["ctc"] is True and info["chain"] is False and trained.xent is None


def test_two_losses_are_refused() -> None:
    with pytest.raises(InputError, match=r"train\.chain and train\.ctc: give one"):
        replace(OPTIONS, chain=ChainOptions(), ctc=CtcOptions())
