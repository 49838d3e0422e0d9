"""The MMI loss beside sums over all paths, one by one, and beside autograd."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from asr_am.egs.loader import IGNORE
from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.acoustic import AcousticModel
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.models.tdnnf import TdnnfOptions
from asr_am.train.frame_loss import batch_loss
from asr_am.train.mmi_loss import MmiLoss, MmiOptions

STATES, PDFS = 5, 3


def graph() -> DenominatorGraph:
    rng = np.random.default_rng(0)
    arcs_SS = rng.random((STATES, STATES)) * (rng.random((STATES, STATES)) < 0.6) + 0.1 * np.eye(STATES)
    arcs_SS /= arcs_SS.sum(1, keepdims=True)
    start_S = rng.random(STATES)
    pdf_S = np.array([0, 1, 2, 1, 0], np.int32)
    return DenominatorGraph(
        sparse.csr_array(arcs_SS.astype(np.float32)), pdf_S, (start_S / start_S.sum()).astype(np.float32), PDFS
    )


def make_loss(scale: float = 0.5, ce_weight: float = 0.0) -> MmiLoss:
    priors = np.log([0.5, 0.2, 0.3]).astype(np.float32)
    return MmiLoss(graph(), priors, MmiOptions(scale, ce_weight), torch.device("cpu"))


def scores(chunks: int, frames: int) -> Tensor:
    return 3 * torch.randn(chunks, frames, PDFS, generator=torch.Generator().manual_seed(1))


def batch() -> tuple[Blstm, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Blstm(BlstmOptions(1, 8, 6), 4, PDFS)
    lengths_B = torch.tensor([6, 3, 5])
    targets_BT = torch.randint(0, PDFS, (3, 6))
    targets_BT[torch.arange(6) >= lengths_B[:, None]] = IGNORE
    return model, torch.randn(3, 6, 4), lengths_B, targets_BT


def test_sum_over_paths_is_that_of_each_path_alone() -> None:
    scores_BTP, g = scores(2, 4), graph()
    arcs_SS = g.arcs_SS.toarray().astype(np.float64)
    total, expected_BTP = 0.0, np.zeros(scores_BTP.shape)
    for b, score_TP in enumerate(scores_BTP.double().numpy()):
        weights = {}
        for path in product(range(STATES), repeat=4):
            emitted = np.exp(sum(score_TP[t, g.pdf_S[s]] for t, s in enumerate(path)))
            before = (g.start_S.astype(np.float64) @ arcs_SS)[path[0]]
            weights[path] = before * np.prod([arcs_SS[pair] for pair in pairwise(path)]) * emitted
        sum_ = sum(weights.values())
        total += np.log(sum_)
        for path, weight in weights.items():
            for t, s in enumerate(path):
                expected_BTP[b, t, g.pdf_S[s]] += weight / sum_
    found, probability_BTP = make_loss().paths.sum_paths(scores_BTP)
    assert float(found) == pytest.approx(total, rel=1e-5)
    np.testing.assert_allclose(probability_BTP.numpy(), expected_BTP, atol=1e-5)


def test_gradient_is_that_of_the_loss() -> None:
    """Compares the gradient with differences of the loss, in the direction of the gradient."""
    model, *data = batch()
    loss = make_loss(ce_weight=0.3)
    loss(model, *data)[0].backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    norm2, step = sum(float((g**2).sum()) for g in gradients), 1e-3
    ends = []
    for sign in (step, -2 * step):
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p += sign * g / norm2**0.5
            ends.append(float(loss(model, *data)[0]))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm2**0.5, rel=0.01)


def test_padding_has_no_influence_and_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x_BTF, lengths_B, targets_BT = batch()
    loss = make_loss(ce_weight=0.3)
    whole, correct = loss(model, x_BTF, lengths_B, targets_BT)
    alone = [
        loss(model, x_BTF[b : b + 1, :n], None, targets_BT[b : b + 1, :n]) for b, n in enumerate(lengths_B.tolist())
    ]
    assert float(whole.detach()) == pytest.approx(sum(float(x.detach()) for x, _ in alone), rel=1e-5)
    assert float(correct) == sum(float(c) for _, c in alone)
    gradient = torch.autograd.grad(whole, model.output.weight)[0]
    monkeypatch.setattr("asr_am.train.path_sums.MEMORY", 1)
    parts = loss(model, x_BTF, lengths_B, targets_BT)[0]
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, model.output.weight)[0], gradient)


def test_an_output_for_three_frames_is_the_score_of_each() -> None:
    model = TdnnfOptions(1, 1, 8, 4, 6, subsampling=3).make(4, PDFS)
    _, x_BTF, lengths_B, targets_BT = batch()

    class Repeated(AcousticModel):
        """The same network with an output per frame."""

        output = model.output

        def hidden(self, x_BTF: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
            return model.hidden(x_BTF, lengths_B, dtype)[:, torch.arange(x_BTF.shape[1]) // 3]

    loss, correct = make_loss(ce_weight=0.3)(model, x_BTF, lengths_B, targets_BT)
    expected, _ = make_loss(ce_weight=0.3)(Repeated(4, PDFS), x_BTF, lengths_B, targets_BT)
    torch.testing.assert_close(loss, expected)
    assert correct == batch_loss(model, x_BTF, lengths_B, targets_BT)[1]


def test_cross_entropy_is_added() -> None:
    model, *data = batch()
    with torch.no_grad():
        with_ce, without = make_loss(ce_weight=0.3)(model, *data)[0], make_loss()(model, *data)[0]
        cross_entropy, correct = batch_loss(model, *data)
    assert float(with_ce - without) == pytest.approx(0.3 * float(cross_entropy), rel=1e-4)
    assert float(correct) == float(make_loss()(model, *data)[1])


def test_an_impossible_pdf_has_no_probability() -> None:
    """A pdf that no state has gets probability 0, however high its score."""
    g = graph()
    fewer = DenominatorGraph(g.arcs_SS, np.where(g.pdf_S == 2, 1, g.pdf_S).astype(np.int32), g.start_S, PDFS)
    loss = MmiLoss(fewer, np.zeros(PDFS, np.float32), MmiOptions(), torch.device("cpu"))
    scores_BTP = scores(2, 30)
    scores_BTP[..., 2] += 20
    total, probability_BTP = loss.paths.sum_paths(scores_BTP)
    assert torch.isfinite(total) and probability_BTP[..., 2].eq(0).all()
    torch.testing.assert_close(probability_BTP.sum(2), torch.ones(2, 30))


@pytest.mark.parametrize("wrong", [{"acoustic_scale": 0.0}, {"ce_weight": -1.0}, {"acoustic_scale": float("nan")}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"train.mmi: acoustic_scale="):
        MmiOptions(**wrong)
