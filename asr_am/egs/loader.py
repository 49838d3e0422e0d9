"""Loads batches from shards, by the plan of an epoch.

Shapes: N chunks of an epoch, U utterances, B chunks of a batch, T frames of a chunk, F feature dimension, R rows of a
shard, C stored values of a frame, M distinct i-vectors of a chunk, S values of an i-vector.

Worker threads copy with numba, which releases the GIL, and mask with NumPy, in the stored precision. A thread that used
torch's arithmetic would start a thread pool of its own. Before a group of the plan is trained on, the system is asked
to read its blocks, so that chunks come from memory. Learners of a host share what was read.

Any learner can assemble any batch by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from asr_am.compiled import compiled
from asr_am.egs.augment import Masking, draw_ivector_noise, mask_chunks
from asr_am.egs.epoch_plan import BUFFER, ChunkOrder, EpochPlan, Versions
from asr_am.egs.stateless_rng import combine, string_keys, uniform_NK
from asr_am.egs.store import REMEDY, EgsSet
from asr_am.errors import InputError

IGNORE = -100  # the target of a padded frame, as in torch's cross-entropy


@dataclass(frozen=True)
class Batch:
    """Chunks padded to equal length.

    Attributes:
        id: Number of the batch in its epoch.
        x_BTF: Features, float32, padded with zeros.
        targets_BT: Pdfs, int64, padded with `IGNORE`.
        lengths_B: Frames of each chunk, int64.
        utterances: Position of each chunk's utterance in the index, [B].
        digest: Identity of the chunks that were loaded (`Loader.digests`).
    """

    id: int
    x_BTF: torch.Tensor
    targets_BT: torch.Tensor
    lengths_B: torch.Tensor
    utterances: np.ndarray
    digest: int = 0

    def __len__(self) -> int:
        """Returns the number of chunks."""
        return len(self.lengths_B)

    @property
    def frames(self) -> int:
        return int(self.lengths_B.sum())


Arrays = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]  # the fields of a Batch, before torch


def _to_torch(arrays: Arrays) -> Batch:
    number, x_BTF, y_BT, frames_B, utterance_B, digest = arrays
    lengths_B = torch.from_numpy(frames_B.astype(np.int64))
    return Batch(number, torch.from_numpy(x_BTF).float(), torch.from_numpy(y_BT), lengths_B, utterance_B, digest)


class Loader:
    """Loader of batches of one set of examples."""

    def __init__(
        self,
        egs: EgsSet,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        random_offset: bool = False,
        subset: float = 1.0,
        masking: Masking | None = None,
        mean_F: np.ndarray | None = None,
        ivector_noise: float = 0.0,
        workers: int = 1,
        buffer: int = BUFFER,
        one_speed: bool = False,
        chunk: int = 0,
    ) -> None:
        """Prepares a loader.

        Args:
            batch_size: Chunks of a batch.
            seed: Seed of order, offsets, masks and noise.
            shuffle: Shuffles chunks. False keeps the stored order, for validation.
            random_offset: Cuts utterances at other frames in each epoch.
            subset: Share of the utterances that is used.
            masking: Masks, drawn for each (seed, epoch, utterance, chunk).
            mean_F: Values under masks. None means zeros.
            ivector_noise: Noise on i-vectors, if the examples have them, in standard deviations of each dimension.
                Drawn like masks.
            workers: Threads that assemble batches ahead of time.
            buffer: Chunks that are shuffled together.
            one_speed: An epoch has each utterance at one of its speeds, in turn. False: at all of them.
            chunk: Frames of a chunk. 0: as the examples say.

        Raises:
            InputError: `masking.streams` does not fit the features, or `subset` selects no utterance.
        """
        bands = egs.info.band_columns.stop - egs.info.band_columns.start
        if masking and bands % masking.streams:
            raise InputError(
                f"train.masking.streams={masking.streams}: must divide {bands}, the number of features with bands in "
                f"{egs.directory}"
            )
        self.egs, self.batch_size, self.workers = egs, batch_size, max(1, workers)
        self.chunk = chunk or egs.info.chunk
        self.masking = masking or Masking()
        self.ivector_noise = ivector_noise
        self.mean_F = np.zeros(egs.info.dim, dtype=np.float32) if mean_F is None else mean_F
        self._key_U = string_keys(egs.index.utterances)
        used = np.flatnonzero(uniform_NK(self._key_U, 1)[:, 0] < subset)
        if not len(used):
            raise InputError(f"train.subset={subset}: selects no utterance of {egs.directory}; use a larger share")
        frames_U = egs.index.frames_U
        versions = Versions.of(egs.index.utterances) if one_speed else None
        self.order = ChunkOrder(frames_U, self._key_U, used, self.chunk, seed, shuffle, random_offset, buffer, versions)
        self._requested: tuple[int, int] = (-1, -1)  # epoch and group that the system was last asked to read
        # Plain arrays over the same memory, because slicing a `numpy.memmap` costs more than copying the chunk.
        self._dtype = egs.features[0].dtype
        self._bits = np.dtype(f"u{self._dtype.itemsize}")
        self._x = [np.asarray(shard).view(self._bits) for shard in egs.features]
        self._y = [np.asarray(shard) for shard in egs.targets]

    def plan(self, epoch: int) -> EpochPlan:
        """Returns the chunks of an epoch."""
        return EpochPlan(self.order, epoch, self.batch_size)

    def batch(self, plan: EpochPlan, number: int) -> Batch:
        """Assembles batch `number` of `plan`."""
        return _to_torch(self._assemble(plan, number))

    def _assemble(self, plan: EpochPlan, number: int) -> Arrays:
        self._request(plan, number)
        utterance_B, begin_B, frames_B = plan.part(plan.chunks(number))
        self.egs.verify(utterance_B)
        chunk, index, ivectors = self.chunk, self.egs.index, self.egs.ivectors
        at = self.egs.info.ivector_columns
        shard_B, row_B = index.shard_U[utterance_B], index.begin_U[utterance_B] + begin_B
        x_BTF = np.empty((len(row_B), chunk, self.egs.info.dim), dtype=self._dtype)
        y_BT = np.empty((len(row_B), chunk), dtype=np.int64)
        for shard in np.unique(shard_B):
            at_B = np.flatnonzero(shard_B == shard)
            gap = at.start, at.stop
            gather_frames(self._x[shard], self._y[shard], row_B[at_B], at_B, gap, x_BTF.view(self._bits), y_BT)
        if y_BT.min() < 0 or y_BT.max() >= self.egs.info.num_pdfs:
            wrong = int(np.flatnonzero((y_BT < 0).any(axis=1) | (y_BT >= self.egs.info.num_pdfs).any(axis=1))[0])
            raise InputError(
                f"{self.egs.directory}: a target near utterance {index.utterances[utterance_B[wrong]]} is outside "
                f"0..{self.egs.info.num_pdfs - 1}, the pdfs; {REMEDY}"
            )
        key_B = combine(plan.seed, plan.epoch, self._key_U[utterance_B], begin_B)
        if self.masking:
            mask_chunks(x_BTF, key_B, self.masking, self.mean_F, self.egs.info.band_columns)
        if ivectors is not None:  # after the masks, which do not apply to i-vectors
            vector_BMS, which_BT = ivectors.of_chunks(utterance_B, begin_B, chunk)
            if self.ivector_noise:
                vector_BMS += draw_ivector_noise(key_B, self.ivector_noise * ivectors.moments[1])[:, None, :]
            bits_BMS = vector_BMS.astype(self._dtype).view(self._bits)
            set_vectors(bits_BMS, which_BT, at.start, x_BTF.view(self._bits))
        short = np.flatnonzero(frames_B < chunk)
        if len(short):
            padding = np.arange(chunk) >= frames_B[short, None]
            x_BTF[short] = np.where(padding[..., None], x_BTF.dtype.type(0), x_BTF[short])
            y_BT[short] = np.where(padding, IGNORE, y_BT[short])
        return number, x_BTF, y_BT, frames_B, utterance_B, _sum_keys(self._chunk_keys(utterance_B, begin_B, frames_B))

    def _request(self, plan: EpochPlan, number: int) -> None:
        """Asks the system to read the group of a batch, and the next group from the middle of one on."""
        begun = self._requested[0] == plan.epoch
        group = plan.group_at(plan.chunks(number).start + begun * self.order.buffer // 2)
        if self._requested != (plan.epoch, group):
            self._requested = plan.epoch, group
            self.egs.read_ahead(plan.groups[group])

    def digests(self, plan: EpochPlan, first: int, end: int) -> tuple[int, ...]:
        """Returns the identities that the batches from `first` to `end` (exclusive) have if they are loaded as planned.

        An identity is a 48-bit hash of the utterances and the chunks of a batch in any order. float64 holds it exactly.
        """
        key_N = self._chunk_keys(*plan.part(slice(first * plan.batch_size, end * plan.batch_size)))
        return tuple(_sum_keys(key_N[k : k + plan.batch_size]) for k in range(0, len(key_N), plan.batch_size))

    def _chunk_keys(self, utterance_N: np.ndarray, begin_N: np.ndarray, frames_N: np.ndarray) -> np.ndarray:
        return combine(self._key_U[utterance_N], begin_N, frames_N)

    def batches(self, plan: EpochPlan, numbers: Iterable[int]) -> Iterator[Batch]:
        """Yields the batches with these numbers in this order, assembled ahead of time by worker threads.

        Takes at most 2 x workers items from `numbers` ahead of what it has yielded.
        """
        pending: deque[Future[Arrays]] = deque()
        with ThreadPoolExecutor(self.workers, thread_name_prefix="loader") as pool:
            try:
                for number in numbers:
                    pending.append(pool.submit(self._assemble, plan, number))
                    if len(pending) > 2 * self.workers:
                        yield _to_torch(pending.popleft().result())
                while pending:
                    yield _to_torch(pending.popleft().result())
            finally:
                for future in pending:
                    future.cancel()


def load_compiled() -> None:
    """Loads what numba needs for its first function, which takes .3 s."""
    one_1, rows = np.zeros(1, dtype=np.int64), np.zeros((1, 1, 1), dtype=np.uint16)
    gather_frames(rows[0], one_1, one_1, one_1, (1, 1), rows, one_1[None])


def _sum_keys(key_B: np.ndarray) -> int:
    return int(key_B.sum(dtype=np.uint64) >> np.uint64(16))


def feature_moments(egs: EgsSet, limit: int = 1_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Computes mean and standard deviation [F] of the inputs over evenly spaced utterances of about `limit` frames.

    Those of i-vectors are over the stored rows, so every speaker or segment has equal weight.
    """
    index = egs.index
    step = max(1, egs.frames // limit)
    total = np.zeros((2, egs.info.frame_dim))
    frames = 0
    egs.verify(np.arange(0, len(index.utterances), step))
    for shard, begin, count in zip(index.shard_U[::step], index.begin_U[::step], index.frames_U[::step], strict=True):
        x_TF = egs.features[shard][begin : begin + count].astype(np.float32)
        total += x_TF.sum(axis=0, dtype=np.float64), np.square(x_TF).sum(axis=0, dtype=np.float64)
        frames += int(count)
    mean_F, square_F = total / frames
    deviation_F = np.sqrt(np.maximum(square_F - mean_F**2, 1e-10))
    moments_F = mean_F.astype(np.float32), deviation_F.astype(np.float32)
    if egs.ivectors is None:
        return moments_F
    mean_V, deviation_V = (
        np.insert(frames_F, egs.info.ivector_columns.start, vector_S)  # type: ignore[call-overload]
        for frames_F, vector_S in zip(moments_F, egs.ivectors.moments, strict=True)
    )
    return mean_V, deviation_V


# Values are unsigned integers of the size of the stored floats, which numba need not know.


@compiled
def gather_frames(
    x_RC: np.ndarray, y_R: np.ndarray, row_B: np.ndarray, at_B: np.ndarray, gap: tuple[int, int], x_BTF: np.ndarray,
    y_BT: np.ndarray,
) -> None:  # fmt: skip
    """Copies chunks of one shard.

    Args:
        x_RC: features of the shard. What lies beyond its last row is a copy of that row.
        row_B: first row of each chunk.
        at_B: where each goes in the batch.
        gap: columns of the i-vector, from and to, which are left as they are.
        x_BTF: features of the batch, changed in place.
        y_BT: targets of the batch, changed in place.
    """
    begin, end = gap
    num_frames, width, last = y_BT.shape[1], x_RC.shape[1], len(y_R) - 1
    for k in range(len(row_B)):
        b = at_B[k]
        for t in range(num_frames):
            row = min(row_B[k] + t, last)
            row_C, out_F = x_RC[row], x_BTF[b, t]
            for c in range(begin):
                out_F[c] = row_C[c]
            for c in range(begin, width):
                out_F[end - begin + c] = row_C[c]
            y_BT[b, t] = y_R[row]


@compiled
def set_vectors(vector_BMS: np.ndarray, which_BT: np.ndarray, begin: int, x_BTF: np.ndarray) -> None:
    """Sets the columns from `begin` on of each frame to vector `which_BT` of its chunk."""
    size = vector_BMS.shape[2]
    for b in range(len(x_BTF)):
        for t in range(x_BTF.shape[1]):
            vector_S, out_F = vector_BMS[b, which_BT[b, t]], x_BTF[b, t]
            for s in range(size):
                out_F[begin + s] = vector_S[s]
