"""Words with times and confidences from a lattice, for every LM scale of a grid.

In a minimized graph the output label of a word may be anywhere inside or after the word. Times therefore come from
aligning the words of a path to its phones with the lexicon: each word takes one of its pronunciations, with optional
silence before and after.

Shapes: A arcs, K LM scales, N arcs with a word, P phones, R runs of equal labels, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asr_am.decode.ctm import CtmWord
from asr_am.decode.lattice import Lattice, LmScale, arc_posteriors, best_paths
from asr_am.hmm.alignments import runs_of
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang

PhoneSpan = tuple[int, int]  # first phone, phone after the last, as positions in a path


@dataclass(frozen=True)
class TimedWord:
    """A word id with its first frame and number of frames."""

    word: int
    start: int
    frames: int


def time_words(words: Sequence[int], labels_T: np.ndarray, states: StateTable, lang: Lang) -> list[TimedWord]:
    """Returns the words of a path with their times.

    If the utterance ended inside a word, that word may have the first part of its phones or none (0 frames), and words
    after it are dropped. If words and phones do not match at all, the words share the frames evenly.

    Args:
        words: word ids of the path, in order.
        labels_T: graph label of each frame.
    """
    if len(words) == 0 or len(labels_T) == 0:
        return []
    runs = runs_of(labels_T, np.array([0, len(labels_T)]), states)
    first_R = runs.state_R == 0
    phones = runs.windows_R3[first_R, 1].tolist()
    bounds = np.append(runs.start_R[first_R], len(labels_T))
    spans = align_to_phones(words, phones, lang)
    if spans is None:
        bounds = np.linspace(0, len(labels_T), len(words) + 1).astype(int)
        spans = [(i, i + 1) for i in range(len(words))]
    return [
        TimedWord(word, int(bounds[first]), int(bounds[last] - bounds[first]))
        for word, (first, last) in zip(words, spans, strict=False)
    ]


def align_to_phones(words: Sequence[int], phones: list[int], lang: Lang) -> list[PhoneSpan] | None:
    """Aligns words to the phones of a path.

    Dynamic programming over words: `ends[i]` maps each phone position where word i can end to the span of the word and
    the end of the previous word.

    Returns:
        The span of each word, fewer spans than words if the phones end before the words, None if they do not match.
    """
    ends: list[dict[int, tuple[PhoneSpan, int]]] = []
    reached: dict[int, tuple[PhoneSpan, int]] = {0: ((0, 0), 0)}
    for word in words:
        following: dict[int, tuple[PhoneSpan, int]] = {}
        for end in sorted(reached):
            for span in _word_spans(word, end, phones, lang, truncated=False):
                following.setdefault(span[1], (span, end))
        if not following:
            return _align_truncated(word, reached, ends, phones, lang)
        ends.append(following)
        reached = following
    complete = [end for end in reached if all(phone == lang.optional_silence for phone in phones[end:])]
    return _trace(ends, complete[0] if complete else max(reached))


def _align_truncated(
    word: int, reached: dict[int, tuple[PhoneSpan, int]], ends: list[dict[int, tuple[PhoneSpan, int]]],
    phones: list[int], lang: Lang,
) -> list[PhoneSpan] | None:  # fmt: skip
    """Returns the spans up to `word`, of which only the first phones are left."""
    for end in sorted(reached):
        for span in _word_spans(word, end, phones, lang, truncated=True):
            return [*_trace(ends, end), span]
    return None


def _word_spans(word: int, end: int, phones: list[int], lang: Lang, *, truncated: bool) -> list[PhoneSpan]:
    """Returns the spans that `word` can have if the previous word ended at phone `end`.

    With `truncated`, a span may hold the first phones of a pronunciation only.
    """
    spans = []
    pronunciations = lang.pronunciations.get(lang.word_names[word], [])
    begin = end
    while True:
        if word == lang.unk:
            spans += _unknown_spans(begin, phones, lang, truncated=truncated)
        for pronunciation in pronunciations:
            rest = tuple(phones[begin : begin + len(pronunciation)])
            if rest == pronunciation[: len(rest)] and (truncated or len(rest) == len(pronunciation)):
                spans.append((begin, begin + len(rest)))
        if begin >= len(phones) or phones[begin] != lang.optional_silence:
            return spans
        begin += 1


def _unknown_spans(begin: int, phones: list[int], lang: Lang, *, truncated: bool) -> list[PhoneSpan]:
    """Returns the spans that the unknown word can have from phone `begin`: any speech phones, up to the end of a word
    where these have position markers.
    """
    spans = []
    for end in range(begin, len(phones)):
        if phones[end] in lang.silence_phones or (lang.is_word_begin(phones[end]) and end > begin):
            break
        if lang.is_word_end(phones[end]) or not lang.position_dependent or (truncated and end + 1 == len(phones)):
            spans.append((begin, end + 1))
    return spans


def _trace(ends: list[dict[int, tuple[PhoneSpan, int]]], end: int) -> list[PhoneSpan]:
    spans = []
    for step in reversed(ends):
        span, end = step[end]
        spans.append(span)
    return spans[::-1]


def hypotheses(lattice: Lattice, scales: Sequence[LmScale], states: StateTable, lang: Lang) -> list[list[CtmWord]]:
    """Returns the words of the best path under each LM scale, without nonspeech words.

    Confidences are posteriors at the LM weight of the scale, without insertion penalty.
    """
    nonspeech, rate = nonspeech_words(lang), states.subsampling
    lm_weights = sorted({w.lm for w in scales})
    posterior_AK = arc_posteriors(lattice, [LmScale(lm) for lm in lm_weights])
    confidence_of = {
        lm: WordConfidence(lattice, states, posterior_A)
        for lm, posterior_A in zip(lm_weights, posterior_AK.T, strict=True)
    }
    done: dict[tuple[float, bytes], list[CtmWord]] = {}  # many scales share a path
    result = []
    for scale, path in zip(scales, best_paths(lattice, scales), strict=True):
        key = scale.lm, path.tobytes()
        if key not in done:
            words, labels = lattice.word_A[path], lattice.label_A[path]
            labels_T = labels[labels > 0]
            timed = time_words(words[words > 0].tolist(), labels_T, states, lang)
            emit_frames = lattice.frame_S[lattice.source_A[path[words > 0]]].tolist()
            scores = confidence_of[scale.lm].of_words(timed, emit_frames, states.labels_L3[labels_T - 1, 0])
            done[key] = [
                CtmWord(word.start * rate, word.frames * rate, lang.word_names[word.word], confidence)
                for word, confidence in zip(timed, scores, strict=True)
                if word.frames > 0 and word.word not in nonspeech
            ]
        result.append(done[key])
    return result


class WordConfidence:
    """Confidences of the words of a path, from the arc posteriors of its whole lattice."""

    def __init__(self, lattice: Lattice, states: StateTable, posterior_A: np.ndarray) -> None:
        frame_A = lattice.frame_S[lattice.source_A]
        emitting = np.flatnonzero(lattice.label_A)
        phone = states.labels_L3[lattice.label_A[emitting] - 1, 0]
        num_phones = int(states.labels_L3[:, 0].max()) + 1
        counts = np.bincount(
            frame_A[emitting] * num_phones + phone, posterior_A[emitting], lattice.num_frames * num_phones
        )
        self.phone_TP = counts.reshape(lattice.num_frames, num_phones)
        spoken = np.flatnonzero(lattice.word_A)
        self.word_N, self.frame_N, self.posterior_N = lattice.word_A[spoken], frame_A[spoken], posterior_A[spoken]

    def of_words(self, timed: Sequence[TimedWord], emit_frames: Sequence[int], phones_T: np.ndarray) -> list[float]:
        """Returns the confidence of each word, from 0 to 1.

        It is the smaller of two numbers: the mean posterior of the word's phones, and the summed posterior of arcs that
        carry the same word label near its time. The first alone cannot tell homophones apart. The second alone does not
        drop when an uncertain path repeats a word.

        Args:
            emit_frames: frame where the path emits each word's label. With triphones this is often one phone before the
                word (whose first phone is the right context of the phone before). With homophones it may be after the
                word.
            phones_T: phone of each frame of the path.
        """
        posterior_T = self.phone_TP[np.arange(len(phones_T)), phones_T]
        confidences = []
        for i, word in enumerate(timed):
            first, last = min(word.start, emit_frames[i]), max(word.start + word.frames, emit_frames[i])
            if i > 0 and timed[i - 1].word == word.word:
                first = max(first, emit_frames[i - 1] + 1)
            if i + 1 < len(timed) and timed[i + 1].word == word.word:
                last = min(last, emit_frames[i + 1] - 1)
            near_N = (self.word_N == word.word) & (self.frame_N >= first) & (self.frame_N <= last)
            mean_posterior = float(posterior_T[word.start : word.start + word.frames].sum()) / max(1, word.frames)
            confidences.append(round(min(1.0, mean_posterior, float(self.posterior_N[near_N].sum())), 4))
        return confidences


def nonspeech_words(lang: Lang) -> frozenset[int]:
    """Returns the ids of words that are not scored: `<unk>` and words of silence phones only."""
    silence = set(lang.silence_phones)
    nonspeech = (
        lang.words[word]
        for word, pronunciations in lang.pronunciations.items()
        if all(silence.issuperset(phones) for phones in pronunciations)
    )
    return frozenset({lang.unk, *nonspeech})
