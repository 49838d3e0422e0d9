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

SLACK = 2  # frames that a word's output label may come after its last frame: it can wait for the next word


def hypotheses(lattice: Lattice, weights: Sequence[Weights], states: StateTable, lang: Lang) -> list[list[CtmWord]]:
    """The words of the best path under each weighting, words that are no speech left out."""
    silent = nonspeech_words(lang)
    paths = best_paths(lattice, weights)
    lm_weights = sorted({w.lm for w in weights})
    posterior_KA = dict(zip(lm_weights, arc_posteriors(lattice, [Weights(w) for w in lm_weights]), strict=True))
    timed: dict[bytes, list[TimedWord]] = {}
    words_of: dict[tuple[bytes, float], list[CtmWord]] = {}
    confidence = Confidence(lattice)
    for weight, path in zip(weights, paths, strict=True):
        key = path.tobytes()
        if key not in timed:
            words, labels = lattice.word_A[path], lattice.label_A[path]
            timed[key] = time_words(words[words > 0].tolist(), labels[labels > 0], states, lang)
        if (key, weight.lm) not in words_of:
            posterior_A = posterior_KA[weight.lm]
            words_of[key, weight.lm] = [
                CtmWord(w.start, w.frames, lang.word_names[w.word], confidence(posterior_A, w))
                for w in timed[key]
                if w.word not in silent
            ]
    return [words_of[path.tobytes(), weight.lm] for weight, path in zip(weights, paths, strict=True)]


class Confidence:
    """The posterior that a word was said at its time: of all arcs that put it out within its frames."""

    def __init__(self, lattice: Lattice) -> None:
        self.arcs_of: dict[int, np.ndarray] = {}
        arcs = np.flatnonzero(lattice.word_A)
        for word in np.unique(lattice.word_A[arcs]).tolist():
            self.arcs_of[word] = arcs[lattice.word_A[arcs] == word]
        self.frame_A = lattice.frame_S[lattice.source_A]

    def __call__(self, posterior_A: np.ndarray, word: TimedWord) -> float:
        """From 0 to 1, rounded to 1e-4."""
        arcs = self.arcs_of[word.word]
        frame = self.frame_A[arcs]
        near = (frame >= word.start) & (frame <= word.start + word.frames + SLACK)
        return round(float(min(1.0, posterior_A[arcs[near]].sum())), 4)


def nonspeech_words(lang: Lang) -> frozenset[int]:
    """Ids of the words that are not scored: `<unk>` and those with nothing but silence phones."""
    silence = set(lang.silence_phones)
    silent = (
        lang.words[word]
        for word, pronunciations in lang.pronunciations.items()
        if all(silence.issuperset(phones) for phones in pronunciations)
    )
    return frozenset({lang.unk, *silent})
