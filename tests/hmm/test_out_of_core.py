"""What keeps memory flat: ranges of utterances, labels in a file, pdfs looked up when read, and parts of a set."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asr_am.dask_jobs.encoding import encode
from asr_am.errors import InputError
from asr_am.hmm.align_corpus import align_corpus
from asr_am.hmm.alignments import FramePdfs, LabelFile, range_runs, read_alignments, runs_of
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.training import subset_of
from asr_am.hmm.tree_build import accumulate_tree_stats
from tests.support.gmm_training import LDA, MONO, SAT, TRI, distort, phones_in, write_corpus
from tests.support.synthetic_speech import all_labels, training_context, write_features


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_am.hmm.frames.RANGE", 100)


@pytest.mark.usefixtures("small_ranges")
def test_ranges_cover_every_utterance_once(tmp_path: Path) -> None:
    lengths = {"a": 0, "b": 99, "c": 1, "d": 350, "e": 40, "f": 40, "g": 0}
    frames = FrameStore.write(
        tmp_path / "frames", sorted(lengths), lambda name: np.full((lengths[name], 2), ord(name), np.float32), "frames"
    )
    ranges = frames.ranges()
    assert len(ranges) > 2
    assert [u for first, end in ranges for u in range(first, end)] == list(range(len(lengths)))
    x_ND = np.concatenate([frames.read(frames.rows(first, end)) for first, end in ranges])
    np.testing.assert_array_equal(x_ND, frames.x_ND)
    assert frames.read(frames.span(0)).shape == (0, 2)


def test_frames_stay_readable_when_their_folder_is_replaced(tmp_path: Path) -> None:
    old = FrameStore.write(tmp_path / "frames", ["a"], lambda _: np.zeros((9, 2), np.float32), "frames")
    new = FrameStore.write(tmp_path / "frames", ["a"], lambda _: np.ones((9, 2), np.float32), "frames")
    assert old.read(slice(2, 9)).sum() == 0 and new.read(slice(2, 9)).sum() == 14
    np.testing.assert_array_equal(pickle.loads(encode(new)).x_ND, new.x_ND)
    with pytest.raises(InputError, match="frames: was replaced while it was used"):
        pickle.loads(encode(old))  # on another host


@pytest.mark.usefixtures("small_ranges")
def test_statistics_of_ranges_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, spoken = training_context(tmp_path)
    labels_N = all_labels(ctx.train, spoken)
    parts = list(range_runs(labels_N, ctx.train, spoken.states))
    whole = runs_of(labels_N, ctx.train.offsets_U1, spoken.states)
    assert len(parts) > 5
    np.testing.assert_array_equal(np.concatenate([part.windows_R3 for part in parts]), whole.windows_R3)
    many = accumulate_tree_stats(ctx.train, labels_N, spoken.states, 2)
    monkeypatch.setattr("asr_am.hmm.frames.RANGE", 10**6)
    one = accumulate_tree_stats(ctx.train, labels_N, spoken.states, 1)
    np.testing.assert_array_equal(many.windows_M3, one.windows_M3)
    np.testing.assert_array_equal(many.state_M, one.state_M)
    np.testing.assert_allclose(many.sums_MF, one.sums_MF, rtol=1e-9)


def test_labels_in_a_file_and_their_pdfs(tmp_path: Path) -> None:
    ctx, spoken = training_context(tmp_path, 6)
    labels_N = all_labels(ctx.train, spoken)
    labels_N[5:9] = 0
    file = LabelFile.create(tmp_path, len(labels_N) + 3)
    file.write(40, labels_N[40:])
    file.write(0, labels_N[:40])
    np.testing.assert_array_equal(file.read(), [*labels_N, 0, 0, 0])
    assert not any(path.is_file() for path in tmp_path.iterdir()), "the file lasts as long as the map"
    pdfs = FramePdfs.of(labels_N, spoken.states)
    expected_N = np.where(labels_N > 0, spoken.states.pdf_L[labels_N - 1], -1)
    np.testing.assert_array_equal(pdfs[slice(0, len(labels_N))], expected_N)
    np.testing.assert_array_equal(pdfs.counts(99), np.bincount(expected_N[expected_N >= 0], minlength=99))
    wanted_P = np.arange(spoken.states.num_pdfs) % 2 == 0
    only_N = np.where((expected_N >= 0) & (expected_N % 2 == 0), expected_N, -1)
    np.testing.assert_array_equal(pdfs.only(wanted_P)[slice(0, len(labels_N))], only_N)


def test_subsets_are_nested_and_keep_the_order(tmp_path: Path) -> None:
    ctx, _ = training_context(tmp_path)
    data = ctx.sets["train"]
    ctx = replace(ctx, sets=ctx.sets | {"train": replace(data, speakers_U=[n[:4] for n in ctx.train.utterances])})
    small, large = subset_of(ctx, 7), subset_of(ctx, 20)
    assert len(small.train.utterances) == 7 and set(small.train.utterances) < set(large.train.utterances)
    assert large.train.utterances == sorted(large.train.utterances) and small.others == ctx.train.utterances
    for index, name in enumerate(large.train.utterances):
        whole = ctx.train.utterances.index(name)
        np.testing.assert_array_equal(large.train.read(large.train.span(index)), ctx.train.read(ctx.train.span(whole)))
        part = large.sets["train"]
        assert (part.words_U[index], part.speakers_U[index]) == (data.words_U[whole], name[:4])
    assert subset_of(ctx, 0) is ctx and subset_of(ctx, 40) is ctx


def test_copies_at_other_speeds_are_left_out_of_training(tmp_path: Path) -> None:
    """Names that only look like those of copies are none."""
    ctx, _ = training_context(tmp_path)
    data = ctx.sets["train"]
    names = ctx.train.utterances
    ctx.train.utterances[:] = [f"sp0.9-{names[5]}", "sp0.9-alone", *names[2:]]
    ctx = replace(ctx, sets=ctx.sets | {"train": replace(data, speakers_U=list(names))}, copies=False)
    names = ctx.train.utterances
    part = subset_of(ctx, 0)
    assert part.train.utterances == names[1:] and part.others == names
    with_copies = replace(ctx, copies=True)
    assert subset_of(part, 0) is part and subset_of(with_copies, 0) is with_copies
    assert set(subset_of(ctx, 7).train.utterances) < set(names[1:]) and len(subset_of(ctx, 7).train.utterances) == 7
    frames = (subset_of(ctx, 0).train, ctx.train)
    np.testing.assert_array_equal(*(store.read(store.span(k)) for store, k in zip(frames, (6, 7), strict=True)))


def test_early_systems_train_on_some_utterances_and_align_what_the_next_one_needs(tmp_path: Path) -> None:
    _, sets = write_corpus(tmp_path)
    for subset, spoken in sets.items():
        distort(spoken)
        write_features(tmp_path / "features", spoken, subset)
    options = {
        "mono": MONO, "tri": replace(TRI, utterances=45), "lda_mllt": replace(LDA, utterances=50),
        "sat": replace(SAT, utterances=55),
    }  # fmt: skip
    out = tmp_path / "align"
    align_corpus(tmp_path / "data", tmp_path / "lang", tmp_path / "features", out, **options, whole="lda_mllt")
    aligned = {name: {utterance for utterance, _ in read_alignments(out / name / "ali", "train")} for name in options}
    assert {name: len(utterances) for name, utterances in aligned.items()} == {
        "mono": 45, "tri": 50, "lda_mllt": 60, "sat": 60,
    }  # fmt: skip
    assert aligned["mono"] < aligned["tri"] < aligned["lda_mllt"] == set(sets["train"].labels)
    for name in options:
        for subset, spoken in sets.items():
            found = phones_in(out / name, subset)
            truth = {
                n: spoken.states.labels_L3[labels_T - 1, :2] for n, labels_T in spoken.labels.items() if n in found
            }
            assert np.concatenate([(found[n] == truth[n]).all(axis=1) for n in truth]).mean() > 0.7, (name, subset)
