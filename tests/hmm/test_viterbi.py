"""Viterbi alignment of synthetic speech, flat start, failed utterances, and alignments on disk."""

from __future__ import annotations

import itertools
import pickle
import random
from functools import partial
from pathlib import Path

import kaldifst
import kaldiio
import numpy as np
import pytest

from asr_am.dask_jobs.encoding import encode
from asr_am.errors import InputError
from asr_am.hmm.alignment_graphs import compile_graphs
from asr_am.hmm.alignments import LabelFile, check_alignments, load_labels, read_alignments, write_alignments
from asr_am.hmm.flat_start import equal_alignment, flat_gmms
from asr_am.hmm.gmm import single_gaussians
from asr_am.hmm.training import silence_pdfs
from asr_am.hmm.viterbi import AlignOptions, _align_shard, align, search
from tests.support.kaldi_scp import load_scp
from tests.support.synthetic_speech import EASY, aligned_data, all_labels, make_lang, speak, training_context


def test_the_true_states_are_found_by_any_number_of_workers(tmp_path: Path) -> None:
    ctx, spoken = training_context(tmp_path)
    graphs = ctx.compile("train", spoken.tree, spoken.states, EASY)
    found = align(graphs, ctx.train, spoken.gmms, EASY, 1, "align")
    assert found.failed == [] and found.retried == 0
    assert (found.labels_N == all_labels(ctx.train, spoken)).mean() > 0.99
    x_ND, means_PD = ctx.train.x_ND, spoken.gmms.means_GD
    residual_ND = x_ND - means_PD[spoken.states.pdf_L[found.labels_N - 1]]
    density = -0.5 * (residual_ND**2).sum(axis=1) - 0.5 * residual_ND.shape[1] * np.log(2 * np.pi)
    assert found.loglik == pytest.approx(density.mean(), rel=1e-3)

    two_jobs = align(graphs, ctx.train, spoken.gmms, EASY, 2, "align")
    np.testing.assert_array_equal(two_jobs.labels_N, found.labels_N)

    labels, boost_P = LabelFile.create(tmp_path, ctx.train.num_frames), np.zeros(spoken.gmms.num_pdfs, np.float32)
    work = partial(_align_shard, graphs, ctx.train, spoken.gmms.packed(), boost_P, EASY, labels)
    work, shards = pickle.loads(encode((work, graphs.shards)))  # as another host does
    assert sum(work(shard).frames for shard in shards) == ctx.train.num_frames
    np.testing.assert_array_equal(labels.read(), found.labels_N)


def test_search_finds_the_best_path() -> None:
    """Compares a graph of two branches of three states each with an enumeration of all paths."""
    text = "0 1 1 0 0.3\n0 4 4 0 0.1\n"
    for first in (1, 4):
        for state in range(first, first + 3):
            text += f"{state} {state} {state} 0 {0.1 * state}\n"
            text += f"{state} {state + 1} {state + 1} 0 0.2\n" if state < first + 2 else f"{state} 0.5\n"
    graph = kaldifst.compile(text, acceptor=False)
    ll_TC = np.random.default_rng(0).normal(0, 2, (7, 6)).astype(np.float32)
    best = (-np.inf, [])
    for first in (1, 4):
        for cut in itertools.combinations(range(1, 7), 2):
            lengths = np.diff([0, *cut, 7])
            labels = np.repeat(np.arange(first, first + 3), lengths).tolist()
            cost = (0.3 if first == 1 else 0.1) + 0.4 + 0.5
            cost += sum(0.1 * (first + i) * (length - 1) for i, length in enumerate(lengths))
            best = max(best, (float(ll_TC[range(7), np.array(labels) - 1].sum()) - cost, labels))
    labels_T, used_retry = search(graph, ll_TC, AlignOptions(beam=50.0))
    assert labels_T is not None and labels_T.tolist() == best[1] and not used_retry


def test_the_retry_beam_recovers_a_pruned_path() -> None:
    """Many branches score better at first, but only one ends in a final state."""
    ways = "".join(f"0 {state} 1 0 0\n{state} {state} 1 0 0\n" for state in range(4, 104))
    graph = kaldifst.compile(f"0 2 2 0 0\n{ways}2 2 2 0 0\n2 3 3 0 0\n3 0\n", acceptor=False)
    ll_TC = np.array([[0, -8, -99], [0, -8, -99], [0, -99, -8]], dtype=np.float32)
    narrow = AlignOptions(beam=5.0, retry_beam=60.0)
    labels_T, used_retry = search(graph, ll_TC, narrow)
    assert labels_T is not None and labels_T.tolist() == [2, 2, 3] and used_retry
    labels_T, used_retry = search(graph, ll_TC, AlignOptions(beam=5.0, retry_beam=6.0))
    assert labels_T is None and used_retry


def test_utterances_too_short_for_their_transcript_fail(tmp_path: Path) -> None:
    lang = make_lang(tmp_path)
    spoken = speak(lang, 6)
    names = sorted(spoken.frames)
    for name in (names[1], names[4]):
        spoken.frames[name] = spoken.frames[name][:2]
    train = aligned_data(tmp_path / "train", lang, spoken)
    graphs = compile_graphs(
        tmp_path / "graphs", train.frames, train.words_U, lang.directory / "L.fst", spoken.tree, spoken.states, 0.1, 1
    )
    found = align(graphs, train.frames, spoken.gmms, EASY, 1, "align")
    assert found.failed == [names[1], names[4]]
    assert equal_alignment(graphs, train.frames, 0, 1).failed == [names[1], names[4]]
    for index in range(6):
        assert (found.labels_N[train.frames.span(index)] > 0).all() == (index not in (1, 4))
    write_alignments(tmp_path / "ali", "train", train.frames, found.labels_N)
    assert [name for name, _ in read_alignments(tmp_path / "ali", "train")] == [names[i] for i in (0, 2, 3, 5)]

    for name in names:
        spoken.frames[name] = spoken.frames[name][:2]
    hopeless = aligned_data(tmp_path / "hopeless", lang, spoken)
    with pytest.raises(InputError, match="no utterance could be aligned"):
        align(graphs, hopeless.frames, spoken.gmms, EASY, 1, "align")


def test_an_equal_alignment_is_a_path_with_even_durations(tmp_path: Path) -> None:
    ctx, spoken = training_context(tmp_path)
    graphs = ctx.compile("train", spoken.tree, spoken.states, EASY)
    found = equal_alignment(graphs, ctx.train, 0, 1)
    assert found.failed == [] and (found.labels_N > 0).all()
    np.testing.assert_array_equal(found.labels_N, equal_alignment(graphs, ctx.train, 0, 2).labels_N)
    for index in range(len(ctx.train.utterances)):
        labels_T = found.labels_N[ctx.train.span(index)]
        lengths = np.diff(np.flatnonzero(np.diff(labels_T, prepend=-1, append=-1)))
        assert lengths.max() - lengths.min() <= 1
        assert (spoken.states.labels_L3[labels_T[[0, -1]] - 1, 1] == [0, 2]).all(), (
            "begins in a first and ends in a last state"
        )


def test_flat_gmms_have_the_moments_of_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality is bitwise for any number of blocks."""
    ctx, _ = training_context(tmp_path)
    monkeypatch.setattr("asr_am.hmm.flat_start.BLOCK", 100)
    gmms, var_D = flat_gmms(ctx.train, 3)
    x_ND = ctx.train.x_ND
    mean_D = x_ND.mean(axis=0, dtype=np.float64)
    np.testing.assert_array_equal(var_D, np.square(x_ND).mean(axis=0, dtype=np.float64) - mean_D**2)
    np.testing.assert_array_equal(gmms.means_GD, np.tile(mean_D, (3, 1)).astype(np.float32))


def test_boosting_silence_aligns_more_frames_to_it(tmp_path: Path) -> None:
    ctx, spoken = training_context(tmp_path, 10)
    flat = single_gaussians(np.zeros_like(spoken.gmms.means_GD), np.ones_like(spoken.gmms.vars_GD))
    graphs = ctx.compile("train", spoken.tree, spoken.states, EASY)
    pdfs = silence_pdfs(ctx.lang, spoken.states)
    silent = []
    for factor in (1.0, 4.0):
        found = align(graphs, ctx.train, flat, EASY, 1, "align", dict.fromkeys(pdfs, factor))
        silent.append(np.isin(spoken.states.pdf_L[found.labels_N - 1], pdfs).mean())
    assert silent[0] == 0 and silent[1] > 0.3, "all states are alike except for the boost"


@pytest.fixture
def written(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Alignments in a folder that was renamed, the frames and labels they fit, utterance lengths, and states."""
    ctx, spoken = training_context(tmp_path, 6)
    labels_N = all_labels(ctx.train, spoken)
    write_alignments(tmp_path / "ali.partial", "train", ctx.train, labels_N)
    (tmp_path / "ali.partial").rename(tmp_path / "ali")
    lengths = dict(zip(ctx.train.utterances, np.diff(ctx.train.offsets_U1).tolist(), strict=True))
    return tmp_path / "ali", ctx.train, labels_N, lengths, spoken.states


def test_alignments_can_be_read_after_moving_the_folder(written) -> None:  # type: ignore[no-untyped-def]
    folder, frames, labels_N, lengths, states = written
    assert check_alignments(folder, "train", lengths, states) == 6
    np.testing.assert_array_equal(load_labels(folder, "train", frames, states), labels_N)
    stored = load_scp(folder / "train.scp")
    assert len(stored) == 6
    for name, labels_T in stored.items():
        np.testing.assert_array_equal(labels_T, labels_N[frames.span(frames.utterances.index(name))])
        assert labels_T.dtype == np.int32


def test_inconsistent_alignments_name_the_utterance(written) -> None:  # type: ignore[no-untyped-def]
    folder, frames, _, lengths, states = written
    name = frames.utterances[3]
    with pytest.raises(InputError, match=f"{name} has .* frames"):
        check_alignments(folder, "train", lengths | {name: lengths[name] + 1}, states)
    with pytest.raises(InputError, match=f"{name} is not an utterance"):
        check_alignments(folder, "train", {n: lengths[n] for n in lengths if n != name}, states)
    with pytest.raises(InputError, match="no such alignments"):
        check_alignments(folder, "dev", lengths, states)
    for label, states_read in ((0, states), (len(states.labels_L3) + 1, states)):
        kaldiio.save_ark(str(folder / "train.ark"), {name: np.full(lengths[name], label, dtype=np.int32)})
        with pytest.raises(InputError, match=f"{name} has graph labels outside"):
            check_alignments(folder, "train", lengths, states_read)
    kaldiio.save_ark(str(folder / "train.ark"), {name: np.zeros((3, 2), dtype=np.float32)})
    with pytest.raises(InputError, match="not a vector"):
        check_alignments(folder, "train", lengths, states)


def test_truncated_archives_are_input_errors(written) -> None:  # type: ignore[no-untyped-def]
    folder, _, _, lengths, states = written
    content = (folder / "train.ark").read_bytes()
    for cut in [0, *random.Random(0).sample(range(1, len(content)), 60)]:
        (folder / "train.ark").write_bytes(content[:cut])
        try:
            aligned = check_alignments(folder, "train", lengths, states)
        except InputError:
            continue
        assert 0 < aligned < 6, "only a cut between two utterances is not detected here"
