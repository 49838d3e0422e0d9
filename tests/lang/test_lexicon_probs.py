"""Probabilities of pronunciations and silence compared with sums by hand, and L compared with its definition."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import kaldifst
import numpy as np
import pytest
from lhotse import SupervisionSegment, SupervisionSet

from asr_am.decode.aligned import count_pairs
from asr_am.decode.graph import compose_lg
from asr_am.hmm.alignments import write_alignments
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.lang.lang_dir import Lang
from asr_am.lang.lexicon import Pronunciation
from asr_am.lang.lexicon_probs import SENTENCE_END, SENTENCE_START, SilenceProbs, Spoken, estimate_probs
from asr_am.lang.prepare import add_probs, prepare_lang, prepare_lm
from tests.support.synthetic_speech import Spoken as Speech
from tests.support.synthetic_speech import all_labels, make_lang, speak, store

A, B = ("A", ("AH",)), ("B", ("B",))
RED, REED = ("READ", ("R", "EH", "D")), ("READ", ("R", "IY", "D"))
SIL = object()


def pairs(*utterances: Sequence[object]) -> Counter[tuple[Spoken, bool, Spoken]]:
    counts = Counter[tuple[Spoken, bool, Spoken]]()
    for utterance in utterances:
        left, silent = SENTENCE_START, False
        for item in [*utterance, SENTENCE_END]:
            if item is SIL:
                silent = True
            else:
                counts[left, silent, item] += 1  # type: ignore[index]
                left, silent = item, False  # type: ignore[assignment]
    return counts


COUNTS = pairs([SIL, A, RED, SIL], [A, SIL, RED], [SIL, REED, SIL, A])


def test_estimates_equal_sums_by_hand(tmp_path: Path) -> None:
    entries = [Pronunciation(*spoken) for spoken in (A, B, RED, REED)]
    probs = estimate_probs(entries, COUNTS)
    # Silence is at 5 of 9 places. READ is RED twice and REED once, plus one each.
    assert probs.overall == 0.56
    assert [entry.probability for entry in probs.entries] == [1, 1, 1, pytest.approx(2 / 3)]
    # after: (times followed by silence + 2 x 0.56) / (times + 2)
    # before: (times after silence + 2) / (times that neighbours let expect + 2), e.g. A: 4 / (2 x 0.62 + 0.71 + 2)
    assert probs.silence == (
        SilenceProbs(0.42, 1.01, 0.98), SilenceProbs(0.56, 1.0, 1.0),
        SilenceProbs(0.53, 1.06, 0.95), SilenceProbs(0.71, 1.15, 0.84),
    )  # fmt: skip
    assert (probs.start, probs.end.before, probs.end.joined) == (0.62, 0.86, 1.14)
    probs.save(tmp_path)
    assert (tmp_path / "lexiconp_silprob.txt").read_text().splitlines() == [
        "A 1 0.42 1.01 0.98 AH", "B 1 0.56 1.00 1.00 B", "READ 1 0.53 1.06 0.95 R EH D",
        "READ 0.666667 0.71 1.15 0.84 R IY D",
    ]  # fmt: skip
    assert (tmp_path / "silprob.txt").read_text() == "<s> 0.62\n</s>_s 0.86\n</s>_n 1.14\noverall 0.56\n"


def test_words_that_were_not_seen_keep_the_probabilities_of_the_lexicon() -> None:
    seen = [Pronunciation(*spoken) for spoken in (A, RED, REED)]
    probs = estimate_probs([Pronunciation("NEW", ("N",), 0.25), Pronunciation("NEW", ("M",), 1.0), *seen], COUNTS)
    assert [entry.probability for entry in probs.entries[:2]] == [0.25, 1.0]


@pytest.fixture
def lang(tmp_path: Path) -> Lang:
    """Returns a lang directory with the probabilities."""
    data, plain, out = tmp_path / "data", tmp_path / "plain", tmp_path / "lang"
    for folder in (data / "lm", plain, out):
        folder.mkdir(parents=True)
    (data / "lexicon.txt").write_text("A AH\nB B\nREAD R EH D\nREAD R IY D\nRED R EH D\n")
    prepare_lang(data, plain, position_dependent=False, silence_prob=0.5)
    add_probs(data, plain, COUNTS, out)
    return Lang.load(out)


def paths(fst: kaldifst.StdVectorFst, left_out: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Returns the cost of every path of an acyclic transducer by its input labels."""
    found = {}
    stack: list[tuple[int, tuple[int, ...], float]] = [(fst.start, (), 0.0)]
    while stack:
        state, labels, cost = stack.pop()
        if math.isfinite(final := fst.final(state).value):
            assert labels not in found
            found[labels] = cost + final
        for arc in kaldifst.ArcIterator(fst, state):
            more = labels if arc.ilabel in left_out else (*labels, arc.ilabel)
            stack.append((arc.nextstate, more, cost + arc.weight.value))
    return found


@pytest.mark.parametrize("name", ["L.fst", "L_disambig.fst"])
def test_each_path_has_the_probabilities_of_its_silences(lang: Lang, name: str) -> None:
    after = {"AH": 0.42, "R EH D": 0.53, "R IY D": 0.71}
    before = {"AH": (0.98, 1.01), "R EH D": (0.95, 1.06), "R IY D": (0.84, 1.15)}
    expected = {}
    for reading, places in itertools.product(("R EH D", "R IY D"), itertools.product((0, 1), repeat=3)):
        start = 0.62 if places[0] else 0.38
        probability = start * (2 / 3 if reading == "R IY D" else 1) * (0.86 if places[2] else 1.14)
        labels = ["SIL"] * places[0]
        for phones, left, right in (("AH", places[0], places[1]), (reading, places[1], places[2])):
            probability *= before[phones][left] * (after[phones] if right else 1 - after[phones])
            labels += [*phones.split(), *["SIL"] * right]
        expected[tuple(lang.phones[label] for label in labels)] = -math.log(probability)
    fst = kaldifst.StdVectorFst.read(str(lang.directory / name))
    sentence = kaldifst.compose(fst, kaldifst.make_linear_acceptor(lang.word_ids("A READ")))
    assert paths(sentence, (0, *lang.disambig)) == pytest.approx(expected, abs=1e-4)


def test_it_determinizes_with_a_language_model(lang: Lang, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "lm/train.txt").write_text("A READ\nRED B\nB B A\nREAD RED\n" * 2)
    (data / "dev").mkdir()
    SupervisionSet.from_segments([SupervisionSegment("s-1", "rec", 0.0, 1.0, text="A RED")]).to_file(
        data / "dev/supervisions.jsonl.gz"
    )
    prepare_lm(data, lang.directory, tmp_path, name="kn", order=2, arpa=None, text="train")
    grammar = kaldifst.StdVectorFst.read(str(tmp_path / "G.fst"))
    lg = compose_lg(kaldifst.StdVectorFst.read(str(lang.directory / "L_disambig.fst")), grammar)
    assert lg.num_states > 10
    for state in kaldifst.StateIterator(lg):
        labels = [arc.ilabel for arc in kaldifst.ArcIterator(lg, state)]
        assert len(labels) == len(set(labels)) and 0 not in labels


def align(root: Path) -> tuple[Lang, Speech]:
    """Writes transcripts and a system with their true alignments."""
    lang = make_lang(root)
    speech = speak(lang, 12)
    folder = root / "align/sat"
    GmmSystem(speech.tree, speech.states, speech.gmms).save(folder)
    copy = {f"sp0.9-{name}": name for name in sorted(speech.text)[:3]}  # which are not counted
    every = speech.frames | {new: speech.frames[name] for new, name in copy.items()}
    labels = speech.labels | {new: speech.labels[name] for new, name in copy.items()}
    frames = store(root / "frames", every)
    write_alignments(folder / "ali", "train", frames, all_labels(frames, replace(speech, labels=labels)))
    (root / "data/train").mkdir()
    texts = speech.text | {new: speech.text[name] for new, name in copy.items()}
    SupervisionSet.from_segments(
        [SupervisionSegment(name, name, 0.0, 1.0, text=" ".join(words)) for name, words in texts.items()]
    ).to_file(root / "data/train/supervisions.jsonl.gz")
    return lang, speech


def test_neighbours_are_counted_in_alignments(tmp_path: Path) -> None:
    lang, speech = align(tmp_path)
    counts = count_pairs(tmp_path / "data", tmp_path / "align/sat", lang)
    expected = Counter[tuple[str, bool, str]]()
    for words in speech.text.values():  # silence is at both ends of each sentence and nowhere else
        chain = ["<s>", *words, "</s>"]
        expected.update((left, "s>" in left + right, right) for left, right in itertools.pairwise(chain))
    assert Counter({(left[0], silent, right[0]): n for (left, silent, right), n in counts.items()}) == expected
    known = {
        (word, tuple(lang.phone_names[phone] for phone in phones))
        for word, variants in lang.pronunciations.items()
        for phones in variants
    }
    assert {right for _, _, right in counts} - {SENTENCE_END} <= known
    assert np.isclose(
        estimate_probs([Pronunciation(*spoken) for spoken in sorted(known)], counts).start, 0.96, atol=0.04
    )
