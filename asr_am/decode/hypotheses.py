"""Timed words with confidences from a lattice, for every LM weight and insertion penalty of a grid.

Shapes: A arcs, K weightings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asr_am.decode.ctm import CtmWord
from asr_am.decode.lattice import Lattice
from asr_am.decode.paths import Weights, arc_posteriors, best_paths
from asr_am.decode.word_times import TimedWord, time_words
from asr_am.hmm.states import StateTable
from asr_am.lang.lang import Lang


def hypotheses(lattice: Lattice, weights: Sequence[Weights], states: StateTable, lang: Lang) -> list[list[CtmWord]]:
    """The words of the best path under each weighting, words that are no speech left out.

    Confidences are posteriors at the weighting's LM weight without insertion penalty.
    """
    silent = nonspeech_words(lang)
    lm_weights = sorted({w.lm for w in weights})
    posterior_AK = arc_posteriors(lattice, [Weights(lm) for lm in lm_weights])
    beliefs = {
        lm: Belief(lattice, states, posterior_A) for lm, posterior_A in zip(lm_weights, posterior_AK.T, strict=True)
    }
    done: dict[tuple[float, bytes], list[CtmWord]] = {}  # many weightings share a path
    result = []
    for weight, path in zip(weights, best_paths(lattice, weights), strict=True):
        key = weight.lm, path.tobytes()
        if key not in done:
            words, labels = lattice.word_A[path], lattice.label_A[path]
            labels_T = labels[labels > 0]
            timed = time_words(words[words > 0].tolist(), labels_T, states, lang)
            put_out = lattice.frame_S[lattice.source_A[path[words > 0]]].tolist()
            sure = beliefs[weight.lm].in_words(timed, put_out, states.labels_L3[labels_T - 1, 0])
            done[key] = [
                CtmWord(word.start, word.frames, lang.word_names[word.word], confidence)
                for word, confidence in zip(timed, sure, strict=True)
                if word.frames > 0 and word.word not in silent
            ]
        result.append(done[key])
    return result


class Belief:
    """What the lattice as a whole holds of the words of one path."""

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

    def in_words(self, timed: Sequence[TimedWord], put_out: Sequence[int], phones_T: np.ndarray) -> list[float]:
        """From 0 to 1: the lesser of how much its phones are believed, and its label among all labels at its time.

        The first alone could not tell homophones apart, nor the second how often an unsure path repeats a word.
        put_out: the frame where the path has each word's label. With triphones that is often a phone before the word
        (its first phone is the right context of the phone before), with homophones it can be after the word.
        """
        believed_T = self.phone_TP[np.arange(len(phones_T)), phones_T]
        confidences = []
        for i, word in enumerate(timed):
            first, last = min(word.start, put_out[i]), max(word.start + word.frames, put_out[i])
            if i > 0 and timed[i - 1].word == word.word:
                first = max(first, put_out[i - 1] + 1)
            if i + 1 < len(timed) and timed[i + 1].word == word.word:
                last = min(last, put_out[i + 1] - 1)
            near_N = (self.word_N == word.word) & (self.frame_N >= first) & (self.frame_N <= last)
            believed = float(believed_T[word.start : word.start + word.frames].sum()) / max(1, word.frames)
            confidences.append(round(min(1.0, believed, float(self.posterior_N[near_N].sum())), 4))
        return confidences


def nonspeech_words(lang: Lang) -> frozenset[int]:
    """Ids of the words that are not scored: `<unk>` and those with nothing but silence phones."""
    silence = set(lang.silence_phones)
    silent = (
        lang.words[word]
        for word, pronunciations in lang.pronunciations.items()
        if all(silence.issuperset(phones) for phones in pronunciations)
    )
    return frozenset({lang.unk, *silent})
