"""A text as numbers, and its batches: sentences of about equal length, each predicted from its start.

Shapes: N units of the text, R rows (sentences, long ones in pieces), B rows of a batch, T units of its longest.
"""

from __future__ import annotations

import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr_am.errors import InputError
from asr_am.lang.sentences import read_sentences
from asr_am.lang.units import BOUNDARY, Units
from asr_am.model.lstm_lm import IGNORED

REMEDY = "set lm.text to the name of a text of the corpus, or to a text file"


@dataclass(frozen=True)
class Text:
    """unit_N int32: a BOUNDARY, then the units of each sentence with the BOUNDARY that ends it. begin_R, end_R: the
    rows; unit_N[begin:end] predicts unit_N[begin+1:end+1].
    """

    unit_N: np.ndarray
    begin_R: np.ndarray
    end_R: np.ndarray

    def batches(self, size: int, seed: int, epoch: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch, in an order that depends on (seed, epoch) alone."""
        rng = np.random.default_rng((seed, epoch))
        order_R = np.lexsort((rng.random(len(self.begin_R)), self.end_R - self.begin_R))
        cuts = np.arange(size, len(order_R), size)
        parts = np.split(order_R, cuts)
        return [parts[number] for number in rng.permutation(len(parts))]

    def batch(self, row_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """(input, target), both int64 [B, T]; IGNORED where a row has ended."""
        place_BT = np.arange((self.end_R - self.begin_R)[row_B].max()) + self.begin_R[row_B, None]
        inside_BT = place_BT < self.end_R[row_B, None]
        place_BT = np.where(inside_BT, place_BT, 0)
        target_BT = np.where(inside_BT, self.unit_N[place_BT + 1], IGNORED)
        return torch.from_numpy(self.unit_N[place_BT].astype(np.int64)), torch.from_numpy(target_BT.astype(np.int64))


def count_words(path: Path) -> Counter[str]:
    """How often each word occurs in a text. InputError for a text without a word."""
    counts: Counter[str] = Counter()
    for sentence in read_sentences(path, REMEDY):
        counts.update(sentence)
    if not counts:
        raise InputError(f"{path}: holds no sentence; {REMEDY}")
    return counts


def encode(sentences: Iterable[Sequence[str]], units: Units, longest: int) -> Text:
    """A text in units; a sentence of more than `longest` units is cut, and each piece but the first starts anew."""
    unit, begins, ends = array.array("i", [BOUNDARY]), array.array("q"), array.array("q")
    for sentence in sentences:
        begin = len(unit) - 1
        for word in sentence:
            unit.extend(units.of(word))
        unit.append(BOUNDARY)
        starts = range(begin, len(unit) - 1, longest)
        begins.extend(starts)
        ends.extend(min(start + longest, len(unit) - 1) for start in starts)
    return Text(np.array(unit, dtype=np.int32), np.array(begins), np.array(ends))
