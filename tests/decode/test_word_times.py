"""Word times and confidences on known alignments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asr_am.decode.ctm import CtmWord, write_ctm
from asr_am.decode.hypotheses import TimedWord, hypotheses, nonspeech_words, time_words
from asr_am.decode.lattice import Lattice, LmScale
from asr_am.decode.search import SearchOptions, search
from asr_am.lang.lang_dir import Lang
from asr_am.lang.prepare import prepare_lang
from tests.support.hmm_reference import LeftTree, small_lang, small_states
from tests.support.manifest_corpus import utterance, write_recording
from tests.support.synthetic_lattices import alignment, log_likelihoods, search_graph, small_graph


def aligned(lang: Lang, text: str, names: str, seed: int = 0) -> tuple[list[TimedWord], list[tuple[int, int]]]:
    """Returns the timed words on an alignment of the named phones, and (label, phone index) of each frame."""
    states = small_states(lang, LeftTree())
    phones = [lang.phones[name] for name in names.split()]
    frames = alignment(phones, states, LeftTree(), np.random.default_rng(seed))
    labels = np.array([label for label, _ in frames])
    return time_words(lang.word_ids(text), labels, states, lang), frames


def spans(frames: list[tuple[int, int]], phone_spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns (first frame, number of frames) of spans of phones."""
    of_phone = np.array([phone for _, phone in frames])
    inside = [np.flatnonzero((of_phone >= first) & (of_phone < last)) for first, last in phone_spans]
    return [(int(i[0]), len(i)) for i in inside]


@pytest.mark.parametrize(
    ("text", "names", "phone_spans"),
    [
        ("A", "aa", [(0, 1)]),
        ("A B", "SIL aa SIL bb SIL", [(1, 2), (3, 4)]),
        ("A B", "bb aa bb", [(0, 2), (2, 3)]),  # second pronunciation of A
        ("AB A", "aa bb aa", [(0, 2), (2, 3)]),
        ("A B A", "aa bb bb aa", [(0, 1), (1, 2), (2, 4)]),
        ("A A", "aa aa", [(0, 1), (1, 2)]),
        ("B B2 B", "bb SIL bb bb", [(0, 1), (2, 3), (3, 4)]),
    ],
)
def test_words_stand_where_their_phones_are(
    tmp_path: Path, text: str, names: str, phone_spans: list[tuple[int, int]]
) -> None:
    lang = small_lang(tmp_path)
    timed, frames = aligned(lang, text, names)
    assert [word.word for word in timed] == lang.word_ids(text)
    assert [(word.start, word.frames) for word in timed] == spans(frames, phone_spans)


def marked_lang(folder: Path) -> Lang:
    """Returns a lang directory whose phones have position markers."""
    data, lang_dir = folder / "data", folder / "lang"
    data.mkdir()
    lang_dir.mkdir()
    (data / "lexicon.txt").write_text("A aa\nAB aa bb\n")
    prepare_lang(data, lang_dir, position_dependent=True, silence_prob=0.5)
    return Lang.load(lang_dir)


def test_marked_phones_give_the_same_times(tmp_path: Path) -> None:
    timed, frames = aligned(marked_lang(tmp_path), "A AB A", "SIL aa_S aa_B bb_E SIL aa_S")
    assert [(word.start, word.frames) for word in timed] == spans(frames, [(1, 2), (2, 4), (5, 6)])


@pytest.mark.parametrize(
    ("text", "names", "phone_spans"),
    [
        ("A <unk> A", "SIL aa_S aa_B bb_I bb_E SIL aa_S", [(1, 2), (2, 5), (6, 7)]),
        ("<unk> <unk>", "bb_S bb_B bb_E", [(0, 1), (1, 3)]),
        ("A <unk>", "aa_S bb_B bb_I", [(0, 1), (1, 3)]),  # cut off
        ("A <unk> A", "aa_S SPN aa_S", [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_the_unknown_word_has_any_phones(
    tmp_path: Path, text: str, names: str, phone_spans: list[tuple[int, int]]
) -> None:
    timed, frames = aligned(marked_lang(tmp_path), text, names)
    assert [(word.start, word.frames) for word in timed] == spans(frames, phone_spans)


def test_the_unknown_word_has_any_phones_without_marks(tmp_path: Path) -> None:
    timed, frames = aligned(small_lang(tmp_path), "B <unk> A", "bb bb bb SIL aa")
    assert [(word.start, word.frames) for word in timed] == spans(frames, [(0, 1), (1, 3), (4, 5)])


def test_a_word_cut_off_by_the_end_keeps_its_beginning(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    timed, frames = aligned(lang, "A AB", "aa aa")
    assert [(word.start, word.frames) for word in timed] == spans(frames, [(0, 1), (1, 2)])


def test_a_word_without_any_phone_has_no_frames(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    timed, frames = aligned(lang, "A B", "aa SIL")
    assert timed[0].frames == spans(frames, [(0, 1)])[0][1]
    assert [word.frames for word in timed[1:]] == [0]


def test_words_that_do_not_fit_share_the_frames(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    timed, frames = aligned(lang, "B B", "aa aa")
    assert [word.word for word in timed] == lang.word_ids("B B")
    assert timed[0].start == 0 and sum(word.frames for word in timed) == len(frames)


def test_no_words_or_no_frames_is_no_error(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    states = small_states(lang, LeftTree())
    assert time_words([], np.array([1, 1]), states, lang) == []
    assert time_words(lang.word_ids("A"), np.array([], dtype=np.int32), states, lang) == []


@pytest.mark.parametrize(("clarity", "sure"), [(60.0, True), (1.0, False)])
def test_decoded_words_have_their_times_and_are_sure_of_clear_speech(
    tmp_path: Path, clarity: float, sure: bool
) -> None:
    """Checks the path from scores to timed words, over minimization, lattice and grid."""
    lang = small_lang(tmp_path)
    states = small_states(lang, LeftTree())
    graph = search_graph(small_graph(lang, states, LeftTree(), tmp_path))
    rng = np.random.default_rng(3)
    phones = [lang.phones[name] for name in ("SIL", "aa", "SIL", "bb", "aa", "bb", "SIL")]
    frames = alignment(phones, states, LeftTree(), rng)
    scores_TP = log_likelihoods([label for label, _ in frames], states, rng, clarity)
    lattice = Lattice.from_arrays(search(graph, scores_TP, states, SearchOptions(lattice_beam=8.0)).arrays)
    grid = [LmScale(5.0), LmScale(10.0, 0.5), LmScale(10.0, -0.5)]
    for words in hypotheses(lattice, grid, states, lang):
        assert all(0.0 <= word.confidence <= 1.0 for word in words)
        if sure:  # A, then bb aa bb: B or B2 and AB or A B.., or A (bb aa) and B: the first word is certain
            assert words[0].word == "A"
            assert [(words[0].start, words[0].frames)] == spans(frames, [(1, 2)])
            assert words[0].confidence > 0.95
            assert words[-1].start + words[-1].frames == spans(frames, [(3, 6)])[0][0] + spans(frames, [(3, 6)])[0][1]
        else:
            assert min(word.confidence for word in words) < 0.9


def test_what_is_no_speech_is_known_by_its_phones(tmp_path: Path) -> None:
    data, lang_dir = tmp_path / "data", tmp_path / "lang"
    data.mkdir()
    lang_dir.mkdir()
    (data / "lexicon.txt").write_text("A aa\n")
    (data / "nonspeech.txt").write_text("[LAUGHTER] NSN\n")
    prepare_lang(data, lang_dir, position_dependent=True, silence_prob=0.5)
    lang = Lang.load(lang_dir)
    assert {lang.word_names[word] for word in nonspeech_words(lang)} == {"[LAUGHTER]", "<unk>"}


def test_ctm_lines_are_sorted_and_in_recording_time(tmp_path: Path) -> None:
    recording = write_recording(tmp_path, "rec", 0, "PCM_16")
    segments = {segment.id: segment for segment in (utterance(recording, "s", index) for index in range(4))}
    words = {key: [CtmWord(10, 20, "ONE", 0.5), CtmWord(30, 1, "TWO", 1.0)] for key in reversed(segments)}
    write_ctm(tmp_path / "x.ctm", segments, words)
    fields = [line.split() for line in (tmp_path / "x.ctm").read_text().splitlines()]
    assert fields[0] == ["rec", "A", "0.10", "0.20", "ONE", "0.50"]
    assert fields[1] == ["rec", "A", "0.30", "0.01", "TWO", "1.00"]
    assert [(f[1], float(f[2])) for f in fields] == sorted((f[1], float(f[2])) for f in fields)
    assert [f[2] for f in fields if f[1] == "B"] == ["1.10", "1.30", "3.10", "3.30"]
