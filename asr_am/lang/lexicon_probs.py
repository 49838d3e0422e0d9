"""Probabilities of pronunciations, and of silence before and after each, estimated from aligned training speech.

The estimates are those of Chen et al., "Pronunciation and silence probability modeling for ASR" (Interspeech 2015), as
in Kaldi's dict_dir_add_pronprobs.sh, with its smoothing, its rounding and its files lexiconp_silprob.txt and
silprob.txt. Rounding lets the decoding graph share states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asr_am.data.textfile import write_lines
from asr_am.lang.lexicon import Pronunciation

SMOOTHING = 2.0  # counts added to silence beside a pronunciation: lambda_2 and lambda_3 in the paper
LEAST, MOST = 0.01, 0.99

# A word with its phones. The edges of an utterance have no phones.
Spoken = tuple[str, tuple[str, ...]]
SENTENCE_START: Spoken = ("<s>", ())
SENTENCE_END: Spoken = ("</s>", ())
# How often one pronunciation follows another, without or with silence between them: (left, silence, right).
PairCounts = Mapping[tuple[Spoken, bool, Spoken], int]


@dataclass(frozen=True)
class SilenceProbs:
    """Silence beside one pronunciation.

    Attributes:
        after: probability of silence after it.
        before: factor on its probability after silence, 1 if silence before it is as frequent as its left neighbours
            let expect.
        joined: the same factor where no silence is before it.
    """

    after: float
    before: float
    joined: float


@dataclass(frozen=True)
class LexiconProbs:
    """What was estimated.

    Attributes:
        entries: the lexicon, each pronunciation with its probability relative to the likeliest one of the word.
        silence: silence beside each pronunciation, parallel to `entries`.
        start: probability of silence at the beginning of an utterance.
        end: factors for the end of an utterance. Its `after` has no meaning.
        overall: share of silence among all places between words.
    """

    entries: tuple[Pronunciation, ...]
    silence: tuple[SilenceProbs, ...]
    start: float
    end: SilenceProbs
    overall: float

    def save(self, folder: Path) -> None:
        """Writes Kaldi's lexiconp_silprob.txt and silprob.txt."""
        lines = [
            f"{entry.word} {entry.probability:.6g} {near.after:.2f} {near.before:.2f} {near.joined:.2f} "
            + " ".join(entry.phones)
            for entry, near in zip(self.entries, self.silence, strict=True)
        ]
        write_lines(folder / "lexiconp_silprob.txt", lines)
        overall = {"<s>": self.start, "</s>_s": self.end.before, "</s>_n": self.end.joined, "overall": self.overall}
        write_lines(folder / "silprob.txt", [f"{name} {value:.2f}" for name, value in overall.items()])


def estimate_probs(entries: Sequence[Pronunciation], counts: PairCounts) -> LexiconProbs:
    """Estimates all probabilities.

    Each pronunciation is counted once more than it was seen, times its probability in `entries`. So words that were not
    seen keep theirs.

    Args:
        counts: pairs of neighbours in the training speech, including the edges of utterances.
    """
    seen, followed, before, after = (Counter[Spoken]() for _ in range(4))
    pairs = Counter[tuple[Spoken, Spoken]]()
    for (left, silent, right), count in counts.items():
        seen[right] += count
        followed[left] += count
        pairs[left, right] += count
        if silent:
            before[right] += count
            after[left] += count
    overall = min(MOST, max(LEAST, round(before.total() / max(1, seen.total()), 2)))

    spoken = [(entry.word, entry.phones) for entry in entries]
    after_of = {
        key: min(MOST, max(LEAST, round((after[key] + overall * SMOOTHING) / (followed[key] + SMOOTHING), 2)))
        for key in [SENTENCE_START, *spoken]
    }
    expected: defaultdict[Spoken, float] = defaultdict(float)  # silences before it by those after its left neighbours
    for (left, right), count in pairs.items():
        expected[right] += count * after_of[left]

    def beside(key: Spoken) -> SilenceProbs:
        with_silence = (before[key] + SMOOTHING) / (expected[key] + SMOOTHING)
        joined = (seen[key] - before[key] + SMOOTHING) / (seen[key] - expected[key] + SMOOTHING)
        return SilenceProbs(after_of.get(key, 0.0), *(max(LEAST, round(value, 2)) for value in (with_silence, joined)))

    smoothed = [seen[key] + entry.probability for key, entry in zip(spoken, entries, strict=True)]
    largest: dict[str, float] = {}
    for entry, value in zip(entries, smoothed, strict=True):
        largest[entry.word] = max(value, largest.get(entry.word, 0.0))
    weighted = tuple(
        Pronunciation(entry.word, entry.phones, value / largest[entry.word])
        for entry, value in zip(entries, smoothed, strict=True)
    )
    return LexiconProbs(weighted, tuple(map(beside, spoken)), after_of[SENTENCE_START], beside(SENTENCE_END), overall)
