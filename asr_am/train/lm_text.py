"""The text of a recurrent language model: units, and batches of them in the order of training.

    read_text    a text and the words of the lexicon -> units, and rows of units
    LmData       rows -> batches. A batch of one learner is a part of a batch of all

Shapes: M units of the text, R rows (sentences, long ones in pieces), N rows of an epoch in the order of training, B
rows of a batch, T units of its longest.
"""

from __future__ import annotations

import array
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from asr_am.egs.stateless_rng import combine
from asr_am.errors import InputError
from asr_am.lang.transcripts import read_sentences
from asr_am.lang.units import BOUNDARY, Units, make_units
from asr_am.models.lstm_lm import IGNORED, BatchPart

log = logging.getLogger(__name__)
MIN_KNOWN = 0.5  # share of known words below which text and lexicon cannot belong together
REMEDY = "set lm.text to the name of a text of the corpus, or to a text file"


def read_text(
    path: Path, vocabulary: Sequence[str], longest: int, *, kind: Literal["word", "sentencepiece"], pieces: int
) -> tuple[Units, Text]:
    """Reads a training text.

    Args:
        path: the text, one sentence per line.
        longest: units after which a sentence is cut.

    Raises:
        InputError: the text is empty, or most of its words are not in the lexicon.
    """
    counts = count_words(path)
    known = sum(counts[word] for word in vocabulary)
    if known < MIN_KNOWN * counts.total():
        raise InputError(
            f"{path}: {known} of its {counts.total()} words are in the lexicon; check that it is of this language"
        )
    units = make_units(kind, vocabulary, counts, pieces)
    outside = counts.total() - known
    log.info("%s: %d words, %d outside the lexicon; %d units", path, counts.total(), outside, len(units))
    return units, encode(read_sentences(path, REMEDY), units, longest)


def count_words(path: Path) -> Counter[str]:
    """Counts the words of a text. Raises InputError if it has none."""
    counts: Counter[str] = Counter()
    for sentence in read_sentences(path, REMEDY):
        counts.update(sentence)
    if not counts:
        raise InputError(f"{path}: holds no sentence; {REMEDY}")
    return counts


def encode(sentences: Iterable[Sequence[str]], units: Units, longest: int) -> Text:
    """Converts sentences to units.

    A sentence of more than `longest` units is cut, and each piece is predicted without the ones before it.
    """
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


@dataclass(frozen=True)
class Text:
    """A text as numbers. A row is a sentence or a piece of one, and is predicted from its start.

    Attributes:
        unit_M: int32, a BOUNDARY, then the units of each sentence and the BOUNDARY that ends it.
        begin_R: first unit of each row.
        end_R: end of each row: unit_M[begin:end] predicts unit_M[begin+1:end+1].
    """

    unit_M: np.ndarray
    begin_R: np.ndarray
    end_R: np.ndarray

    def __len__(self) -> int:
        return len(self.begin_R)

    @property
    def length_R(self) -> np.ndarray:
        """Units of each row."""
        return self.end_R - self.begin_R

    def tensors(self, row_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns (input, target), both int64 [B, T]. The target is IGNORED after the end of a row."""
        unit_BT = np.arange(self.length_R[row_B].max()) + self.begin_R[row_B, None]
        inside_BT = unit_BT < self.end_R[row_B, None]
        unit_BT = np.where(inside_BT, unit_BT, 0)
        target_BT = np.where(inside_BT, self.unit_M[unit_BT + 1], IGNORED)
        return torch.from_numpy(self.unit_M[unit_BT].astype(np.int64)), torch.from_numpy(target_BT.astype(np.int64))


@dataclass(frozen=True)
class LmPlan:
    """Rows of one epoch (`trainable.Plan`).

    Attributes:
        row_N: row of the text.
        frames_N: units of each row.
        batch_size: rows of a learner's batch.
        whole: rows of a batch of all learners.
    """

    row_N: np.ndarray
    frames_N: np.ndarray
    batch_size: int
    whole: int
    epoch: int

    def __len__(self) -> int:
        return -(-len(self.row_N) // self.batch_size)

    @property
    def num_examples(self) -> int:
        return len(self.row_N)

    @property
    def num_frames(self) -> int:
        return int(self.frames_N.sum())

    def frames(self, rows: slice) -> np.ndarray:
        """Returns the units of consecutive rows."""
        return self.frames_N[rows]

    def in_batches_of(self, batch_size: int) -> LmPlan:
        """Returns the same rows in larger or smaller batches."""
        return replace(self, batch_size=batch_size)

    def rows(self, number: int) -> np.ndarray:
        """Returns the rows of a learner's batch."""
        return self.row_N[number * self.batch_size : (number + 1) * self.batch_size]

    def part(self, number: int) -> BatchPart:
        """Returns the place of a learner's batch in that of all learners."""
        first = number * self.batch_size // self.whole * self.whole
        frames_B = self.frames_N[first : first + self.whole]
        return BatchPart(number * self.batch_size - first, len(frames_B), int(frames_B.max()))


@dataclass(frozen=True)
class LmBatch:
    """Rows padded to equal length (`trainable.Batch`).

    Attributes:
        id: number of the batch of all learners in its epoch, from which dropout and samples are drawn.
        part: place in that batch.
        input_BT: units.
        target_BT: next units, IGNORED in the padding.
        frames: number of targets.
        digest: identity of the rows.
    """

    id: int
    part: BatchPart
    input_BT: Tensor
    target_BT: Tensor
    frames: int
    digest: int

    def __len__(self) -> int:
        return len(self.input_BT)


class LmData:
    """Batches of a text (`trainable.Data`).

    Args:
        batch_size: rows of a batch of all learners.
        learners: number of learners that share it.
    """

    def __init__(self, text: Text, batch_size: int, learners: int, seed: int) -> None:
        self.text, self._all, self._own, self._seed = text, batch_size, batch_size // learners, seed

    def plan(self, epoch: int) -> LmPlan:
        """Returns the rows of an epoch. Rows of a batch of all learners have about equal length.

        The order depends on (seed, epoch) and the batch of all learners only. The batch with fewer rows is the last.
        """
        rng = np.random.default_rng((self._seed, epoch))
        order_R = np.lexsort((rng.random(len(self.text)), self.text.length_R))
        whole = len(order_R) // self._all * self._all
        parts = order_R[:whole].reshape(-1, self._all)
        row_N = np.concatenate([parts[rng.permutation(len(parts))].reshape(-1), order_R[whole:]])
        return LmPlan(row_N, self.text.length_R[row_N], self._own, self._all, epoch)

    def batch(self, plan: LmPlan, number: int) -> LmBatch:
        """Assembles batch `number` of `plan`."""
        row_B, of_all = plan.rows(number), number * plan.batch_size // plan.whole
        units = int(self.text.length_R[row_B].sum())
        return LmBatch(of_all, plan.part(number), *self.text.tensors(row_B), units, self._digest(row_B))

    def batches(self, plan: LmPlan, numbers: Iterable[int]) -> Iterator[LmBatch]:
        """Yields the batches with these numbers."""
        return (self.batch(plan, number) for number in numbers)

    def digests(self, plan: LmPlan, first: int, end: int) -> tuple[int, ...]:
        """Returns the 48-bit identities of the batches from `first` to `end` (exclusive)."""
        return tuple(self._digest(plan.rows(number)) for number in range(first, end))

    def _digest(self, row_B: np.ndarray) -> int:
        key_B = combine(row_B, self.text.begin_R[row_B], self.text.end_R[row_B])
        return int(key_B.sum(dtype=np.uint64) >> np.uint64(16))
