"""Plans the chunks of an epoch and their order. Only the part that is being trained on is in memory.

Small sets are shuffled as a whole. Of larger ones, blocks of neighbouring utterances are shuffled and put into groups
of about `buffer` chunks, and the chunks of a group are shuffled together. This is a shuffle buffer, but any batch is
found by its number. While a group is trained on, its blocks can be read in long pieces.

The plan of an epoch depends only on the examples, the seed, the epoch and `buffer`, not on the number of learners or
workers.

Shapes: N chunks of an epoch, U utterances, K blocks, G groups.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asr_am.data.speed import originals
from asr_am.egs.stateless_rng import combine, seed_of, string_keys

BUFFER = 1 << 18  # chunks that are shuffled together: 15 hours, 2.9 GB of 260-dimensional float16 examples
BLOCK = 1024  # chunks of a block, some 11 MB of such examples
CACHED = 2  # groups whose chunks are kept, as batches may be at the edge of two


class Chunks(NamedTuple):
    """Some chunks in the order of training: position of the utterance in the index, first frame, and frames."""

    utterance_N: np.ndarray
    begin_N: np.ndarray
    frames_N: np.ndarray


def cut(frames_U: np.ndarray, chunk: int, offset_U: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts every utterance into adjacent chunks that cover all of its frames.

    Args:
        chunk: Frames of a chunk. The first and the last one of an utterance may be shorter.
        offset_U: End of the first chunk of each utterance. 0 means a full first chunk.

    Returns:
        Utterance, first frame and number of frames of each chunk, [N] each.
    """
    offset_U, count_U = _first_cut(frames_U, chunk, offset_U)
    first_U = (offset_U > 0).astype(np.int64)
    utterance_N = np.repeat(np.arange(len(frames_U)), count_U)
    rank_N = np.arange(len(utterance_N)) - np.repeat(np.cumsum(count_U) - count_U, count_U)
    grid_N = (rank_N - first_U[utterance_N]) * chunk + offset_U[utterance_N]
    begin_N = np.maximum(grid_N, 0)
    end_N = np.minimum(grid_N + chunk, frames_U[utterance_N])
    return utterance_N, begin_N, end_N - begin_N


def _first_cut(frames_U: np.ndarray, chunk: int, offset_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the first chunk of each utterance ends, 0 for a full one, and the number of its chunks."""
    offset_U = np.where(offset_U < frames_U, offset_U, 0)
    return offset_U, (offset_U > 0) + -(-(frames_U - offset_U) // chunk)


@dataclass(frozen=True)
class Versions:
    """The speeds at which a set has its utterances.

    Attributes:
        key_U: Key of the original of each utterance, for random numbers.
        number_U: Number of each utterance among the versions of its original.
        count_U: How many versions its original has.
    """

    key_U: np.ndarray
    number_U: np.ndarray
    count_U: np.ndarray

    @classmethod
    def of(cls, names: Sequence[str]) -> Versions:
        """Finds the speed-perturbed copies of a set by the names of the utterances."""
        _, source_U, count_S = np.unique(sources := originals(names), return_inverse=True, return_counts=True)
        order = np.argsort(source_U, kind="stable")
        number_U = np.empty(len(order), np.int64)
        number_U[order] = np.arange(len(order)) - np.repeat(np.cumsum(count_S) - count_S, count_S)
        return cls(string_keys(sources), number_U, count_S[source_U])

    def chosen(self, seed: int, epoch: int) -> np.ndarray:
        """Returns bool [U]: True for one version of each original. Versions take turns, in an order by `seed`."""
        first_U = combine(seed, self.key_U) % self.count_U.astype(np.uint64)
        return (first_U.astype(np.int64) + epoch) % self.count_U == self.number_U


@dataclass(frozen=True)
class ChunkOrder:
    """What the plans of all epochs have in common.

    Attributes:
        key_U: Key of each utterance, for random numbers.
        used: Positions of the utterances that are trained on.
        seed: Seed of order and offsets.
        shuffle: Shuffles chunks. False keeps the stored order.
        random_offset: Cuts utterances at other frames in each epoch.
        versions: The speeds of the utterances, if an epoch has each utterance at one of them. None: at all of them.
    """

    frames_U: np.ndarray
    key_U: np.ndarray
    used: np.ndarray
    chunk: int
    seed: int
    shuffle: bool
    random_offset: bool
    buffer: int = BUFFER
    versions: Versions | None = None

    @property
    def num_groups(self) -> int:
        """The number of groups, the same in all epochs."""
        chunks_U = -(-self.frames_U[self.used] // self.chunk)
        share_U = 1 if self.versions is None else 1 / self.versions.count_U[self.used]
        return max(1, -(-int((chunks_U * share_U).sum()) // self.buffer))

    def used_in(self, epoch: int) -> np.ndarray:
        """Returns the positions of the utterances of an epoch."""
        if self.versions is None:
            return self.used
        return self.used[self.versions.chosen(self.seed, epoch)[self.used]]

    def offsets(self, epoch: int, utterances: np.ndarray) -> np.ndarray:
        """Returns where the first chunks of some utterances end, int64."""
        if not self.random_offset:
            return np.zeros(len(utterances), np.int64)
        return (combine(self.seed, epoch, self.key_U[utterances]) % np.uint64(self.chunk)).astype(np.int64)

    def groups(self, epoch: int) -> list[np.ndarray]:
        """Returns the utterances of each group, in the order of the index."""
        used = self.used_in(epoch)
        if self.num_groups == 1:
            return [used]
        chunks_U = -(-self.frames_U[used] // self.chunk)
        block_U = (np.cumsum(chunks_U) - chunks_U) // BLOCK
        edges = np.flatnonzero(np.diff(block_U, prepend=-1))
        blocks = np.split(used, edges[1:])
        order_K = np.arange(len(blocks))
        if self.shuffle:
            order_K = np.random.default_rng(seed_of(self.seed, epoch)).permutation(len(blocks))
        parts = np.array_split(order_K, min(self.num_groups, len(blocks)))
        return [np.concatenate([blocks[k] for k in np.sort(part)]) for part in parts]


class EpochPlan:
    """Chunks of one epoch in the order of training, of which a group at a time is in memory.

    Attributes:
        groups: Utterances of each group.
    """

    def __init__(self, order: ChunkOrder, epoch: int, batch_size: int) -> None:
        """Prepares the plan of an epoch."""
        self._order, self.epoch, self.batch_size, self.seed = order, epoch, batch_size, order.seed
        self.groups = order.groups(epoch)
        counts_G = [_first_cut(*self._cut_of(utterances))[1].sum() for utterances in self.groups]
        self._bounds_G1 = np.concatenate([[0], np.cumsum(counts_G)])
        self.num_examples = int(self._bounds_G1[-1])
        self._chunks: dict[int, Chunks] = {}  # by group, the newest last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of batches. The last one may be smaller."""
        return -(-self.num_examples // self.batch_size)

    def in_batches_of(self, batch_size: int) -> EpochPlan:
        """Returns the plan of the same chunks in larger or smaller batches."""
        return EpochPlan(self._order, self.epoch, batch_size)

    @property
    def num_frames(self) -> int:
        """The number of frames of all chunks."""
        return sum(int(self._order.frames_U[utterances].sum()) for utterances in self.groups)

    @property
    def utterance_N(self) -> np.ndarray:
        """Utterances of all chunks, which a large set has no memory for."""
        return self.part(slice(0, self.num_examples)).utterance_N

    @property
    def begin_N(self) -> np.ndarray:
        """First frames of all chunks."""
        return self.part(slice(0, self.num_examples)).begin_N

    @property
    def frames_N(self) -> np.ndarray:
        """Frames of all chunks."""
        return self.part(slice(0, self.num_examples)).frames_N

    def frames(self, rows: slice) -> np.ndarray:
        """Returns the frames of consecutive chunks."""
        return self.part(rows).frames_N

    def chunks(self, batch: int) -> slice:
        """Returns the chunks of a batch."""
        return slice(batch * self.batch_size, (batch + 1) * self.batch_size)

    def group_at(self, chunk: int) -> int:
        """Returns the group of a chunk, by its number in the epoch. The last group for numbers past the end."""
        return min(int(np.searchsorted(self._bounds_G1, chunk, side="right")), len(self.groups)) - 1

    def part(self, rows: slice) -> Chunks:
        """Returns consecutive chunks of the epoch, int32 each. Loader threads call it, too."""
        first, last = self.group_at(rows.start), self.group_at(max(rows.stop - 1, rows.start))
        parts = []
        for group in range(first, last + 1):
            begin = int(self._bounds_G1[group])
            inside = slice(max(rows.start - begin, 0), max(rows.stop - begin, 0))
            parts.append([column_N[inside] for column_N in self._group(group)])
        return Chunks(*parts[0]) if len(parts) == 1 else Chunks(*map(np.concatenate, zip(*parts, strict=True)))

    def _cut_of(self, utterances: np.ndarray) -> tuple[np.ndarray, int, np.ndarray]:
        """Returns the arguments of `cut` for some utterances."""
        return self._order.frames_U[utterances], self._order.chunk, self._order.offsets(self.epoch, utterances)

    def _group(self, group: int) -> Chunks:
        """Returns the chunks of a group."""
        with self._lock:
            if group not in self._chunks:
                while len(self._chunks) >= CACHED:
                    del self._chunks[next(iter(self._chunks))]
                self._chunks[group] = self._make_group(group)
            return self._chunks[group]

    def _make_group(self, group: int) -> Chunks:
        utterances = self.groups[group]
        local_N, begin_N, frames_N = cut(*self._cut_of(utterances))
        columns = np.stack([utterances[local_N], begin_N, frames_N]).astype(np.int32)
        if self._order.shuffle:
            seed = seed_of(self.seed, self.epoch, *([group] if len(self.groups) > 1 else []))
            columns = columns[:, np.random.default_rng(seed).permutation(columns.shape[1])]
        return Chunks(*columns)
