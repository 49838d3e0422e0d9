"""Choosing LM weight and insertion penalty on a dev set.

The score here is plain word errors against the transcripts; stage score has the field's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import kaldialign

from asr_am.decode.paths import Weights
from asr_am.decode.shards import Decoded


def word_errors(references: Mapping[str, Sequence[str]], decoded: Sequence[Decoded]) -> list[int]:
    """Word errors of a set for each weighting of the grid; `references` holds the words of every utterance."""
    grid = range(len(decoded[0].words))
    return [
        sum(kaldialign.edit_distance(references[d.utterance], [w.word for w in d.words[k]])["total"] for d in decoded)
        for k in grid
    ]


def choose(grid: Sequence[Weights], errors: Sequence[int]) -> int:
    """The index of the weighting with the fewest errors.

    Of equals, the smallest insertion penalty in size, and then the middle LM weight, which is the least fragile.
    """
    fewest = [k for k, count in enumerate(errors) if count == min(errors)]
    smallest = min(abs(grid[k].insertion) for k in fewest)
    candidates = sorted((k for k in fewest if abs(grid[k].insertion) == smallest), key=lambda k: grid[k].lm)
    return candidates[(len(candidates) - 1) // 2]


def reference_words(text: str, dropped: frozenset[str]) -> list[str]:
    """The words of a transcript that count: CTM files leave out the same ones."""
    return [word for word in text.split() if word not in dropped]
