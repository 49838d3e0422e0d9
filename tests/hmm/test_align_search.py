"""The alignment search beside kaldi_decoder's FasterDecoder, with scores that are known and with scores on demand."""

from __future__ import annotations

from pathlib import Path

import kaldi_decoder
import kaldifst
import numpy as np
import pytest
import torch

from asr_am.hmm.alignment_graphs import align_graph
from asr_am.hmm.frame_loops import Scores, best_path
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.viterbi import AlignOptions, align, search
from tests.support.gmm_cases import random_gmms
from tests.support.synthetic_speech import training_context


def reference(graph: kaldifst.StdVectorFst, ll_TC: np.ndarray, beam: float) -> list[int] | None:
    """Returns the labels of kaldi_decoder's best path, None if it does not end in a final state."""
    decoder = kaldi_decoder.FasterDecoder(graph, kaldi_decoder.FasterDecoderOptions(beam=beam))
    decoder.decode(kaldi_decoder.DecodableCtc(ll_TC))
    if not decoder.reached_final():
        return None
    labels = kaldifst.get_linear_symbol_sequence(decoder.get_best_path()[1])[1]
    return labels if len(labels) == len(ll_TC) else None


def random_graph(rng: np.random.Generator, states: int, arcs: int, labels: int) -> kaldifst.StdVectorFst:
    """Makes a graph of random arcs, a quarter without a label. Those lead to higher states, so they make no cycle."""
    source_A, target_A = rng.integers(0, states, (2, arcs))
    label_A = np.where((rng.random(arcs) < 0.25) & (source_A < target_A), 0, rng.integers(1, labels + 1, arcs))
    rows_A4 = np.stack([source_A, target_A, label_A, label_A], axis=1).astype(np.int32)
    final_S = np.where(rng.random(states) < 0.2, rng.random(states), np.inf)
    return FstArrays.build(0, rows_A4, rng.random(arcs) * 3, final_S).to_fst()


@pytest.mark.parametrize(("beam", "different"), [(3.0, 3), (8.0, 0), (100.0, 0)])
def test_paths_are_those_of_kaldi_decoder(beam: float, different: int) -> None:
    """A cutoff falls while tokens are expanded, so with narrow beams the path may depend on their order."""
    rng = np.random.default_rng(int(beam))
    found, others = 0, 0
    for _ in range(60):
        states, frames = int(rng.integers(2, 150)), int(rng.integers(1, 30))
        graph = random_graph(rng, states, 4 * states, 12)
        ll_TC = rng.normal(0, 2, (frames, 12)).astype(np.float32)
        expected = reference(graph, ll_TC, beam)
        labels_T, _ = search(graph, ll_TC, AlignOptions(beam=beam, retry_beam=beam))
        found += expected is not None
        others += (None if labels_T is None else labels_T.tolist()) != expected
    assert found > 20 and others <= different


def test_scores_are_computed_where_they_are_needed(tmp_path: Path) -> None:
    """Aligns with likelihoods on demand and with a matrix of all likelihoods. A narrow beam needs few of them."""
    ctx, spoken = training_context(tmp_path, 12)
    options = AlignOptions(beam=3.0, retry_beam=60.0)
    graphs = ctx.compile("train", spoken.tree, spoken.states, options)
    boost = {3: 2.0}
    found = align(graphs, ctx.train, spoken.gmms, options, 2, "align", boost)
    boost_P = np.zeros(spoken.gmms.num_pdfs, np.float32)
    boost_P[3] = np.log(2.0)
    total, computed, all_scores = 0.0, 0, 0
    for shard, first, end in graphs.shards:
        part = graphs.load(shard)
        for index in range(first, end):
            x_TD, rows = ctx.train.read(ctx.train.span(index)), ctx.train.span(index)
            pdf_Q = part.pdfs(index - first)
            ll_TQ = spoken.gmms.log_likelihoods(torch.from_numpy(x_TD), pdf_Q).numpy() + boost_P[pdf_Q]
            all_TQ = (ll_TQ * np.float32(0.1)).astype(np.float32)
            fst = part.fst(index - first)
            arrays = FstArrays.from_fst(fst)
            columns_A = np.searchsorted(pdf_Q, np.append(-1, spoken.states.pdf_L)[arrays.ilabel_A])
            column_L = np.searchsorted(pdf_Q, spoken.states.pdf_L).clip(max=len(pdf_Q) - 1)
            expected = reference(fst, np.take(all_TQ, column_L, axis=1), 60.0)
            assert found.labels_N[rows].tolist() == expected
            chosen_T = np.searchsorted(pdf_Q, spoken.states.pdf_L[found.labels_N[rows] - 1])
            total += float(np.take_along_axis(ll_TQ, chosen_T[:, None], axis=1).sum())
            unknown_TQ = np.full_like(all_TQ, np.nan)
            scores = Scores(unknown_TQ, x_TD, spoken.gmms.packed(), pdf_Q, boost_P, np.float32(0.1))
            assert best_path(align_graph(arrays, columns_A), scores, 3.0, np.zeros(len(x_TD), np.int32)) < 0
            known = ~np.isnan(unknown_TQ)
            np.testing.assert_allclose(unknown_TQ[known], all_TQ[known], rtol=1e-4, atol=1e-4)
            computed, all_scores = computed + int(known.sum()), all_scores + known.size
    assert found.loglik == pytest.approx(total / ctx.train.num_frames, rel=1e-4)
    assert computed < 0.8 * all_scores


def test_likelihoods_of_packed_mixtures_are_those_of_all_gaussians() -> None:
    gmms = random_gmms()
    x_TD = np.random.default_rng(1).normal(0, 2, (5, gmms.dim)).astype(np.float32)
    pdf_Q = np.arange(gmms.num_pdfs, dtype=np.int32)
    unknown_TQ = np.full((5, gmms.num_pdfs), np.nan, np.float32)
    rows = [[0, 0, q + 1, 0] for q in range(gmms.num_pdfs)]  # a state with a loop for every pdf
    arrays = FstArrays.build(0, np.array(rows, np.int32), np.zeros(len(rows)), np.zeros(1))
    scores = Scores(unknown_TQ, x_TD, gmms.packed(), pdf_Q, np.zeros(gmms.num_pdfs, np.float32), np.float32(1))
    label_T = np.zeros(5, np.int32)
    total = best_path(align_graph(arrays, arrays.ilabel_A - 1), scores, 10.0, label_T)
    expected_TP = gmms.log_likelihoods(torch.from_numpy(x_TD)).numpy()
    np.testing.assert_allclose(unknown_TQ, expected_TP, rtol=1e-5, atol=1e-4)
    assert label_T.tolist() == (expected_TP.argmax(axis=1) + 1).tolist()
    assert total == pytest.approx(float(expected_TP.max(axis=1).sum()), rel=1e-5)
