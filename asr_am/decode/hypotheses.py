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
    result = []
    for weight, path in zip(weights, paths, strict=True):
        key = path.tobytes()
        if key not in timed:
            words, labels = lattice.word_A[path], lattice.label_A[path]
            timed[key] = time_words(words[words > 0].tolist(), labels[labels > 0], states, lang)
        spoken = [word for word in timed[key] if word.word not in silent]
        posterior_A = posterior_KA[weight.lm]
        result.append(
            [CtmWord(w.start, w.frames, lang.word_names[w.word], confidence(lattice, posterior_A, w)) for w in spoken]
        )
    return result


def confidence(lattice: Lattice, posterior_A: np.ndarray, word: TimedWord) -> float:
    """The posterior that this word was said at this time: of all arcs that put it out within its frames."""
    frame_A = lattice.frame_S[lattice.source_A]
    near_A = (frame_A >= word.start) & (frame_A <= word.start + word.frames + SLACK)
    return float(min(1.0, posterior_A[near_A & (lattice.word_A == word.word)].sum()))


def nonspeech_words(lang: Lang) -> frozenset[int]:
    """Ids of the words that are not scored: `<unk>` and those with nothing but silence phones."""
    silence = set(lang.silence_phones)
    silent = (
        lang.words[word]
        for word, pronunciations in lang.pronunciations.items()
        if all(silence.issuperset(phones) for phones in pronunciations)
    )
    return frozenset({lang.unk, *silent})
