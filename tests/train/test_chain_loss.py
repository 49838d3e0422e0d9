"""The loss of chain models beside sums over all paths, one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import SingleProcess
from asr_am.egs.loader import IGNORE
from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.model_file import load_acoustic_model
from asr_am.models.tdnnf import TdnnfOptions
from asr_am.train.chain_loss import ChainLoss, ChainOptions, add_xent
from asr_am.train.frame_loss import batch_loss
from asr_am.train.path_sums import PathSums
from asr_am.train.run_setup import RunSetup
from asr_am.train.schedule import Anneal
from asr_am.train.simulate import simulate_run
from asr_am.train.trainer import train_run
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, WORKLOAD, cluster, final_state
from tests.train.test_mmi_loss import graph as mmi_graph

CPU = torch.device("cpu")
LEAVES, PDFS, STATES = 3, 6, 10


def graph() -> DenominatorGraph:
    """Returns a graph of five phones, with a state for the first step of each and one for the others."""
    phones = mmi_graph()
    arcs_SS = phones.arcs_SS.toarray().astype(np.float64)
    stay, go_on = np.diag(arcs_SS.diagonal()), arcs_SS - np.diag(arcs_SS.diagonal())
    pdf_S = np.concatenate([phones.pdf_S, phones.pdf_S + LEAVES]).astype(np.int32)
    start_S = np.random.default_rng(1).random(STATES)
    return DenominatorGraph(
        sparse.csr_array(np.block([[go_on, stay], [go_on, stay]]).astype(np.float32)), pdf_S,
        (start_S / start_S.sum()).astype(np.float32), PDFS,
    )  # fmt: skip


def scores(chunks: int, frames: int) -> Tensor:
    return 3 * torch.randn(chunks, frames, PDFS, generator=torch.Generator().manual_seed(1))


def loss_of(**options: float) -> ChainLoss:
    return ChainLoss(graph(), replace(ChainOptions(), **options), CPU)


def test_leaks_are_arcs_from_every_state() -> None:
    """Against A' = (I + leaky x 1 start^T) A / (1 + leaky), path by path in float64."""
    leaky, g, scores_BTP = 0.3, graph(), scores(2, 3)
    start_S = g.start_S.astype(np.float64)
    arcs_SS = (np.eye(STATES) + leaky * np.outer(np.ones(STATES), start_S)) / (1 + leaky) @ g.arcs_SS.toarray()
    total, expected_BTP = 0.0, np.zeros(scores_BTP.shape)
    for b, score_TP in enumerate(scores_BTP.double().numpy()):
        weights = {}
        for path in product(range(STATES), repeat=3):
            emitted = np.exp(sum(score_TP[t, g.pdf_S[s]] for t, s in enumerate(path)))
            weights[path] = (start_S @ arcs_SS)[path[0]] * np.prod([arcs_SS[pair] for pair in pairwise(path)]) * emitted
        total += np.log(sum(weights.values()))
        for path, weight in weights.items():
            for t, s in enumerate(path):
                expected_BTP[b, t, g.pdf_S[s]] += weight / sum(weights.values())
    found, probability_BTP = PathSums(g, CPU, leaky).sum_paths(scores_BTP)
    assert float(found) == pytest.approx(total, rel=1e-5)
    np.testing.assert_allclose(probability_BTP.numpy(), expected_BTP, atol=1e-5)


def numerator_of(scores_KP: Tensor, phones: list[int], leaves: list[int], tolerance: int) -> float:
    """Sums over all segmentations of a chunk, with each phone near its place in the alignment."""
    g = graph()
    stays = g.arcs_SS.diagonal()
    loop_P = np.clip([stays[g.pdf_S == leaf + LEAVES].mean() for leaf in range(LEAVES)], 0.01, 0.99)
    starts = [phones.index(n) for n in range(max(phones) + 1)]
    ends = [len(phones) - 1 - phones[::-1].index(n) for n in range(max(phones) + 1)]
    total = 0.0
    for path in product(range(len(starts)), repeat=len(phones)):
        steps = [b - a for a, b in pairwise(path)]
        near = all(starts[n] - tolerance <= k <= ends[n] + tolerance for k, n in enumerate(path))
        if path[0] != 0 or path[-1] != len(starts) - 1 or not set(steps) <= {0, 1} or not near:
            continue
        for begun_before in (True, False):
            leaf = leaves[0]
            cost = np.log(loop_P[leaf] if begun_before else 1 - loop_P[leaf])
            cost += scores_KP[0, leaf + LEAVES * begun_before].item()
            for k, (before, n) in enumerate(pairwise(path), start=1):
                leaf, left = leaves[starts[n]], leaves[starts[before]]
                cost += np.log(loop_P[left] if n == before else 1 - loop_P[left])
                cost += scores_KP[k, leaf + LEAVES * (n == before)].item()
            total += np.exp(cost)
    return float(np.log(total))


@pytest.mark.parametrize("tolerance", [0, 1, 2, 9])
def test_the_numerator_is_the_sum_of_all_segmentations(tolerance: int) -> None:
    """The last chunk has a phone that follows itself."""
    chunks = [[0, 0, 1, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2], [0], [0, 1, 1, 1, 1, 2], [0, 0, 1, 1, 1]]
    leaves = [[0, 0, 1, 1, 2, 0], [2, 2, 2, 2], [1, 0, 1], [1], [0, 1, 1, 1, 1, 2], [2, 2, 2, 2, 2]]
    scores_BKP = scores(len(chunks), 6).requires_grad_()
    phone_BK, leaf_BK = (torch.tensor([row + [row[-1]] * (6 - len(row)) for row in rows]) for rows in (chunks, leaves))
    known_BK = torch.arange(6) < torch.tensor([len(row) for row in chunks])[:, None]
    found = loss_of(tolerance=tolerance).numerator(scores_BKP, leaf_BK, phone_BK, known_BK)
    rows = zip(scores_BKP, chunks, leaves, strict=True)
    expected = sum(numerator_of(scores_KP, *row, tolerance) for scores_KP, *row in rows)
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5)
    found.backward()
    assert scores_BKP.grad is not None
    torch.testing.assert_close(scores_BKP.grad.sum(2), known_BK.float())  # probabilities of pdfs


def example(subsampling: int = 3) -> tuple:
    torch.manual_seed(0)
    model = TdnnfOptions(1, 1, 8, 4, 6, subsampling=subsampling).make(4, PDFS)
    add_xent(model)
    lengths_B = torch.tensor([12, 4, 11])
    targets_BT = torch.randint(0, PDFS, (3, 12))
    targets_BT[torch.arange(12) >= lengths_B[:, None]] = IGNORE
    return model, torch.randn(3, 12, 4), lengths_B, targets_BT


@pytest.mark.parametrize("subsampling", [1, 3])
def test_parts_of_the_loss_and_padding(subsampling: int) -> None:
    model, *data = example(subsampling)
    x_BTF, lengths_B, targets_BT = data
    whole, correct = loss_of(l2=0.1, xent=0.7)(model, *data)
    alone = [
        loss_of(l2=0.1, xent=0.7)(model, x_BTF[b : b + 1, :n], None, targets_BT[b : b + 1, :n])
        for b, n in enumerate(lengths_B.tolist())
    ]
    assert float(whole.detach()) == pytest.approx(sum(float(x.detach()) for x, _ in alone), rel=1e-5)
    assert float(correct) == sum(float(c) for _, c in alone)
    with torch.no_grad():
        plain = loss_of(l2=0.0, xent=0.0)(model, *data)[0]
        squares = sum(float(model(x_BTF[b : b + 1, :n]).square().sum()) for b, n in enumerate(lengths_B.tolist()))
        assert float(loss_of(l2=0.1, xent=0.0)(model, *data)[0] - plain) == pytest.approx(
            subsampling * 0.05 * squares, rel=1e-3
        )
        model.output, kept = model.xent, model.output
        xent, right = batch_loss(model, x_BTF, lengths_B, first_steps(targets_BT, lengths_B, subsampling))
        model.output = kept
        assert float(loss_of(l2=0.0, xent=0.7)(model, *data)[0] - plain) == pytest.approx(0.7 * float(xent), rel=1e-3)
        assert float(right) == float(correct)


def first_steps(targets_BT: Tensor, lengths_B: Tensor, subsampling: int) -> Tensor:
    """Returns targets of which those of middle frames say which outputs are the first ones of their phones."""
    steps_BT = targets_BT.clone()
    for b, length in enumerate(lengths_B.tolist()):
        begun = np.cumsum(targets_BT[b, :length].numpy() < LEAVES)
        before = 0
        for k in range(0, length, subsampling):
            t = min(k + subsampling // 2, length - 1)
            steps_BT[b, t] = targets_BT[b, t] % LEAVES + LEAVES * (begun[t] == before)
            before = begun[t]
    return steps_BT


def test_gradient_is_that_of_the_loss() -> None:
    model, *data = example()
    loss = loss_of(l2=0.01, xent=0.3)
    loss(model, *data)[0].backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    norm2, step, ends = sum(float((g**2).sum()) for g in gradients), 1e-4, []
    for sign in (step, -2 * step):
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p += sign * g / norm2**0.5
            ends.append(float(loss(model, *data)[0]))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm2**0.5, rel=0.02)


def test_learners_are_one_learner_and_the_model_is_saved_without_the_second_layer(tmp_path: Path) -> None:
    egs_dir, denominator = write_examples(tmp_path / "egs", frames_U=(60,) * 12), tmp_path / "graph.npz"
    graph().save(denominator)
    model = TdnnfOptions(1, 1, 12, 4, 6, subsampling=3)
    options = replace(OPTIONS, model=model, chain=ChainOptions(), schedule=Anneal(base=0.01))
    train_run(RunSetup(egs_dir, tmp_path / "run", options, Local, denominator=denominator), SingleProcess())
    four = RunSetup(egs_dir, tmp_path / "four", options, Sync, learners=4, denominator=denominator)
    simulate_run(four, cluster(), WORKLOAD, 0)
    losses = [json.loads((tmp_path / out / "summary.json").read_text())["heldout_loss"] for out in ("run", "four")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][1] < losses[0][0]
    trained, info = load_acoustic_model(tmp_path / "run/best.pt")
    assert info["chain"] is True and trained.xent is None
    weights = final_state(tmp_path / "run")["strategy"]["weights"]
    assert len(weights) == sum(p.numel() for p in trained.parameters()) + 6 * 6 + 6
    start = RunSetup(egs_dir, tmp_path / "next", replace(options, init=str(tmp_path / "run/best.pt")), Sync,
                     denominator=denominator).model()  # fmt: skip
    assert start.xent is not None
    assert torch.equal(start.output.weight, trained.output.weight)


@pytest.mark.parametrize("wrong", [{"tolerance": -1}, {"leaky": -1.0}, {"l2": float("nan")}, {"xent": -0.1}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=rf"train.chain.{next(iter(wrong))}="):
        ChainOptions(**wrong)  # type: ignore[arg-type]
