"""A backoff n-gram model as a deterministic automaton in flat arrays, for rescoring lattices.

A state is a history. Its arcs are the words that the model lists after this history. Any other word is scored from the
state of the next shorter history, after adding the backoff weight (as SRILM and KenLM do). Words are Kaldi symbol ids,
costs are -ln p.

Shapes: A arcs (n-grams), S states (histories).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asr_am.data.npz import read_npz, write_npz
from asr_am.lang.arpa import Arpa

EMPTY = 0  # the state of the empty history


class NgramAutomaton(NamedTuple):
    """An n-gram model as flat arrays.

    Attributes:
        first_S: int64 [S + 1], first arc of each state. The arcs of a state are sorted by word.
        word_A: int32 word of each arc, `</s>` included.
        cost_A: float32 cost of the word, infinity for probability 0.
        target_A: int32 state after the word.
        backoff_S: int32 state of the next shorter history, -1 for the empty history.
        backoff_cost_S: float32 cost of going there.
        start: state after `<s>`.
        end: word id of `</s>`.
    """

    first_S: np.ndarray
    word_A: np.ndarray
    cost_A: np.ndarray
    target_A: np.ndarray
    backoff_S: np.ndarray
    backoff_cost_S: np.ndarray
    start: int
    end: int

    @classmethod
    def from_arpa(cls, arpa: Arpa, words: Mapping[str, int]) -> NgramAutomaton:
        """Converts a model. `words` maps every word of it, `<s>` and `</s>` to an id."""
        levels = list(_trie(arpa, words))
        # A state for each n-gram below the highest order, level by level, after that of the empty history.
        offsets = np.cumsum([1, *(len(level.key_N) for level in levels[:-1])]).tolist()
        backoff_S = np.concatenate([[-1], *(level.suffix_N for level in levels[:-1])]).astype(np.int32)
        backoff_cost_S = np.concatenate([[0.0], *(level.backoff_N for level in levels[:-1])]).astype(np.float32)
        own = [offset + np.arange(len(level.key_N)) for offset, level in zip(offsets, levels[:-1], strict=False)]
        count_S = np.bincount(np.concatenate([level.parent_N for level in levels]), minlength=len(backoff_S))
        return cls(
            first_S=np.concatenate([[0], np.cumsum(count_S)]),
            word_A=np.concatenate([level.word_N for level in levels]).astype(np.int32),
            cost_A=np.concatenate([level.cost_N for level in levels]).astype(np.float32),
            target_A=np.concatenate([*own, levels[-1].suffix_N]).astype(np.int32),
            backoff_S=backoff_S, backoff_cost_S=backoff_cost_S,
            start=1 + int(np.searchsorted(levels[0].key_N, words["<s>"])) if arpa.order > 1 else EMPTY,
            end=words["</s>"],
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Writes the arrays as an .npz file."""
        write_npz(path, self._asdict())

    @classmethod
    def load(cls, path: Path) -> NgramAutomaton:
        """Reads what `save` wrote. Raises InputError if it is missing or damaged."""
        arrays = read_npz(path, *cls._fields, remedy="run stage 1 (lang) again")
        return cls._make([*arrays[:-2], int(arrays[-2]), int(arrays[-1])])  # start and end are the last fields


class LmPair(NamedTuple):
    """The model of a decoding graph, and the model that lattices are rescored with. They have the same words."""

    small: NgramAutomaton
    large: NgramAutomaton

    def save(self, folder: Path) -> None:
        """Writes small.npz and large.npz."""
        self.small.save(folder / "small.npz")
        self.large.save(folder / "large.npz")

    @classmethod
    def load(cls, folder: Path) -> LmPair:
        """Reads what `save` wrote. Raises InputError if a file is missing or damaged."""
        return cls(NgramAutomaton.load(folder / "small.npz"), NgramAutomaton.load(folder / "large.npz"))


class _Level(NamedTuple):
    """The N n-grams of one order, sorted by (parent, word).

    Attributes:
        key_N: parent * number of words + word.
        parent_N: state of the n-gram without its last word.
        word_N: last word.
        cost_N: cost of the last word.
        backoff_N: backoff cost.
        suffix_N: state of the longest proper suffix that is a state.
    """

    key_N: np.ndarray
    parent_N: np.ndarray
    word_N: np.ndarray
    cost_N: np.ndarray
    backoff_N: np.ndarray
    suffix_N: np.ndarray


def _trie(arpa: Arpa, words: Mapping[str, int]) -> Iterator[_Level]:
    """Yields the levels of the trie, the unigrams first."""
    num_words = max(words.values()) + 1
    finder = _StateFinder(num_words, [], [])
    for order, ngrams in enumerate(arpa.logprobs, start=1):
        count = len(ngrams)
        ids_NK = np.fromiter((words[word] for ngram in ngrams for word in ngram), np.int64, count * order)
        ids_NK = ids_NK.reshape(count, order)
        # Every history is an n-gram of the level below, see `restrict`.
        parent_N = finder.state(ids_NK[:, :-1])
        key_N = parent_N * num_words + ids_NK[:, -1]
        rank_N = np.argsort(key_N)
        ids_NK, parent_N, key_N = ids_NK[rank_N], parent_N[rank_N], key_N[rank_N]
        logprob_N = np.fromiter(ngrams.values(), np.float64, count)[rank_N]
        backoff_N = np.fromiter((arpa.backoffs.get(ngram, 0.0) for ngram in ngrams), np.float64, count)[rank_N]
        cost_N = np.where(logprob_N > arpa.ZERO, -math.log(10) * logprob_N, np.inf)
        suffix_N = finder.longest_suffix(ids_NK)
        finder.keys.append(key_N)
        finder.offsets.append(1 + sum(len(keys) for keys in finder.keys[:-1]))
        yield _Level(key_N, parent_N, ids_NK[:, -1], cost_N, -math.log(10) * backoff_N, suffix_N)


class _StateFinder(NamedTuple):
    """Finds the states of histories in the finished levels of the trie."""

    num_words: int
    keys: list[np.ndarray]
    offsets: list[int]

    def state(self, ids_NK: np.ndarray) -> np.ndarray:
        """Returns int64 [N]: the state of each row of word ids, -1 where there is none."""
        state_N = np.zeros(len(ids_NK), dtype=np.int64)
        for column, (keys, offset) in enumerate(zip(self.keys[: ids_NK.shape[1]], self.offsets, strict=False)):
            key_N = state_N * self.num_words + ids_NK[:, column]
            place_N = np.minimum(np.searchsorted(keys, key_N), len(keys) - 1)
            state_N = np.where((state_N >= 0) & (keys[place_N] == key_N), offset + place_N, -1)
        return state_N

    def longest_suffix(self, ids_NK: np.ndarray) -> np.ndarray:
        """Returns int64 [N]: the state of the longest proper suffix of each row that is a state."""
        state_N = np.zeros(len(ids_NK), dtype=np.int64)
        for begin in range(ids_NK.shape[1] - 1, 0, -1):
            found_N = self.state(ids_NK[:, begin:])
            state_N = np.where(found_N >= 0, found_N, state_N)
        return state_N
