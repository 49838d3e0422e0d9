"""From shards to batches: which chunks make up an epoch, in which order, and their assembly.

Shapes: N chunks of an epoch, U utterances, B chunks of a batch, T frames of a chunk, F feature dimension.

Worker threads copy and mask with NumPy, in the stored precision; a thread that calls torch's arithmetic would grow a
pool of threads of its own.

The plan of an epoch depends on (seed, epoch) and the examples only, never on the number of learners or workers: any
batch can be made by anybody, by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from asr_am.egs.augment import Masking, mask_chunks, vector_noise
from asr_am.egs.stateless_rng import combine, seed_of, string_keys, uniform_NK
from asr_am.egs.store import REMEDY, EgsSet
from asr_am.errors import InputError

IGNORE = -100  # the target of a padded frame, as in torch's cross-entropy


@dataclass(frozen=True)
class Batch:
    """Chunks of equal length, padded with zeros and `IGNORE`.

    x_BTF float32; targets_BT int64; lengths_B int64; utterances: position of each chunk's utterance in the index.
    """

    id: int
    x_BTF: torch.Tensor
    targets_BT: torch.Tensor
    lengths_B: torch.Tensor
    utterances: np.ndarray

    @property
    def frames(self) -> int:
        return int(self.lengths_B.sum())


@dataclass(frozen=True)
class Plan:
    """The chunks of one epoch, in the order of training: utterance, first frame in it, and frames of each."""

    utterance_N: np.ndarray
    begin_N: np.ndarray
    frames_N: np.ndarray
    batch_size: int
    seed: int
    epoch: int

    def __len__(self) -> int:
        """The number of batches; the last may be smaller."""
        return -(-len(self.utterance_N) // self.batch_size)

    def chunks(self, batch: int) -> slice:
        return slice(batch * self.batch_size, (batch + 1) * self.batch_size)


Arrays = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # the fields of a Batch, before torch


def _to_torch(arrays: Arrays) -> Batch:
    number, x_BTF, y_BT, frames_B, utterance_B = arrays
    lengths_B = torch.from_numpy(frames_B.astype(np.int64))
    return Batch(number, torch.from_numpy(x_BTF).float(), torch.from_numpy(y_BT), lengths_B, utterance_B)


def cut(frames_U: np.ndarray, chunk: int, offset_U: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut every utterance into chunks that do not overlap and leave nothing out; the first one ends at `offset_U`.

    An offset of 0 means that the first chunk is a whole one. Returns utterance, begin and frames of each chunk; the
    first and the last chunk of an utterance may be shorter than `chunk`.
    """
    offset_U = np.where(offset_U < frames_U, offset_U, 0)
    first_U = (offset_U > 0).astype(np.int64)
    count_U = first_U + -(-(frames_U - offset_U) // chunk)
    utterance_N = np.repeat(np.arange(len(frames_U)), count_U)
    rank_N = np.arange(len(utterance_N)) - np.repeat(np.cumsum(count_U) - count_U, count_U)
    grid_N = (rank_N - first_U[utterance_N]) * chunk + offset_U[utterance_N]
    begin_N = np.maximum(grid_N, 0)
    end_N = np.minimum(grid_N + chunk, frames_U[utterance_N])
    return utterance_N, begin_N, end_N - begin_N


class Loader:
    """Batches of one set of examples.

    batch_size: chunks of a batch. shuffle: False keeps the stored order (validation). random_offset: cut utterances
    at another place in each epoch. subset: share of the utterances that is used. masking: drawn anew for each (seed,
    epoch, utterance, chunk). mean_F: what is put under a mask. ivector_noise: on examples with i-vectors, in standard
    deviations of each dimension, drawn anew like masks. workers: threads that assemble batches ahead of time.
    """

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
    ) -> None:
        bands = egs.info.bands.stop - egs.info.bands.start
        if masking and bands % masking.streams:
            raise InputError(
                f"train.masking.streams={masking.streams}: the {bands} features of {egs.directory} are not "
                "so many times the same bins"
            )
        self.egs, self.batch_size, self.seed, self.workers = egs, batch_size, seed, max(1, workers)
        self.shuffle, self.random_offset, self.masking = shuffle, random_offset, masking or Masking()
        self.ivector_noise = ivector_noise
        self.mean_F = np.zeros(egs.info.dim, dtype=np.float32) if mean_F is None else mean_F
        self._key_U = string_keys(egs.index.utterances)
        self._used_U = uniform_NK(self._key_U, 1)[:, 0] < subset
        if not self._used_U.any():
            raise InputError(f"train.subset={subset}: is none of the utterances of {egs.directory}; use a larger share")
        # Plain views of the same memory: slicing a `numpy.memmap` costs more than copying the chunk.
        self._x, self._y = ([np.asarray(shard) for shard in shards] for shards in (egs.features, egs.targets))

    def plan(self, epoch: int) -> Plan:
        """The chunks of `epoch`, shuffled."""
        chunk, index = self.egs.info.chunk, self.egs.index
        offset_U = np.zeros(len(self._key_U), dtype=np.int64)
        if self.random_offset:
            offset_U = (combine(self.seed, epoch, self._key_U) % np.uint64(chunk)).astype(np.int64)
        columns = np.stack(cut(index.frames_U, chunk, offset_U)).astype(np.int32)
        columns = columns[:, self._used_U[columns[0]]]
        if self.shuffle:
            columns = columns[:, np.random.default_rng(seed_of(self.seed, epoch)).permutation(columns.shape[1])]
        utterance_N, begin_N, frames_N = columns
        return Plan(utterance_N, begin_N, frames_N, self.batch_size, self.seed, epoch)

    def batch(self, plan: Plan, number: int) -> Batch:
        """Batch `number` of `plan`."""
        return _to_torch(self._assemble(plan, number))

    def _assemble(self, plan: Plan, number: int) -> Arrays:
        part = plan.chunks(number)
        utterance_B, begin_B, frames_B = plan.utterance_N[part], plan.begin_N[part], plan.frames_N[part]
        chunk, index, vectors, at = self.egs.info.chunk, self.egs.index, self.egs.vectors, self.egs.info.vector
        shard_B, row_B = index.shard_U[utterance_B].tolist(), (index.begin_U[utterance_B] + begin_B).tolist()
        x_BTF = np.empty((len(row_B), chunk, self.egs.info.dim), dtype=self._x[0].dtype)
        y_BT = np.empty((len(row_B), chunk), dtype=np.int64)
        for b, (shard, row) in enumerate(zip(shard_B, row_B, strict=True)):
            frames_TF = self._x[shard][row : row + chunk]
            if vectors is None:
                x_BTF[b] = frames_TF
            else:
                x_BTF[b, :, : at.start], x_BTF[b, :, at.stop :] = frames_TF[:, : at.start], frames_TF[:, at.start :]
            y_BT[b] = self._y[shard][row : row + chunk]
        if y_BT.min() < 0 or y_BT.max() >= self.egs.info.num_pdfs:
            wrong = int(np.flatnonzero((y_BT < 0).any(axis=1) | (y_BT >= self.egs.info.num_pdfs).any(axis=1))[0])
            raise InputError(
                f"{self.egs.directory}: a target near utterance {index.utterances[utterance_B[wrong]]} is not one "
                f"of the {self.egs.info.num_pdfs} pdfs; {REMEDY}"
            )
        key_B = combine(plan.seed, plan.epoch, self._key_U[utterance_B], begin_B)
        if self.masking:
            mask_chunks(x_BTF, key_B, self.masking, self.mean_F, self.egs.info.bands)
        if vectors is not None:  # after the masks, which leave i-vectors alone
            vectors_BTS = vectors.of_chunks(utterance_B, begin_B, chunk)
            if self.ivector_noise:
                vectors_BTS += vector_noise(key_B, self.ivector_noise * vectors.moments[1])[:, None, :]
            x_BTF[:, :, at] = vectors_BTS
        short = np.flatnonzero(frames_B < chunk)
        if len(short):
            padding = np.arange(chunk) >= frames_B[short, None]
            x_BTF[short] = np.where(padding[..., None], x_BTF.dtype.type(0), x_BTF[short])
            y_BT[short] = np.where(padding, IGNORE, y_BT[short])
        return number, x_BTF, y_BT, frames_B, utterance_B

    def batches(self, plan: Plan, numbers: Iterable[int]) -> Iterator[Batch]:
        """The batches of `plan` with these numbers, in this order, assembled ahead of time.

        `numbers` is drawn from at most 2 x workers items ahead of what has been yielded.
        """
        waiting: deque[Future[Arrays]] = deque()
        with ThreadPoolExecutor(self.workers, thread_name_prefix="loader") as pool:
            try:
                for number in numbers:
                    waiting.append(pool.submit(self._assemble, plan, number))
                    if len(waiting) > 2 * self.workers:
                        yield _to_torch(waiting.popleft().result())
                while waiting:
                    yield _to_torch(waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()


def feature_moments(egs: EgsSet, limit: int = 1_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [F] of the inputs, over evenly spaced utterances of about `limit` frames.

    Those of the i-vector are over what is stored: every speaker or segment counts alike.
    """
    index = egs.index
    step = max(1, egs.frames // limit)
    total = np.zeros((2, egs.info.frame_dim))
    frames = 0
    for shard, begin, count in zip(index.shard_U[::step], index.begin_U[::step], index.frames_U[::step], strict=True):
        x_TF = egs.features[shard][begin : begin + count].astype(np.float32)
        total += x_TF.sum(axis=0, dtype=np.float64), np.square(x_TF).sum(axis=0, dtype=np.float64)
        frames += int(count)
    mean_F, square_F = total / frames
    deviation_F = np.sqrt(np.maximum(square_F - mean_F**2, 1e-10))
    moments_F = mean_F.astype(np.float32), deviation_F.astype(np.float32)
    if egs.vectors is None:
        return moments_F
    mean_V, deviation_V = (
        np.insert(frames_F, egs.info.vector.start, vector_S)  # type: ignore[call-overload]
        for frames_F, vector_S in zip(moments_F, egs.vectors.moments, strict=True)
    )
    return mean_V, deviation_V
