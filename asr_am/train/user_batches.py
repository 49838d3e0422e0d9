"""The batches of a user's own: a `DataLoader`, a dataset or a list, as the training loop takes them (`trainable.Data`).

Learners share them out by number. So their order follows from seed and epoch alone, the same at all learners.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from asr_am.egs.stateless_rng import seed_of
from asr_am.errors import InputError

Batches = Sequence[Any] | DataLoader[Any] | Dataset[Any]


@dataclass(frozen=True)
class OneBatch:
    """A batch of the user's (`trainable.Batch`). It counts as one example of so many frames."""

    id: int
    frames: int
    digest: int
    content: Any

    def __len__(self) -> int:
        return 1


class EpochOrder(NamedTuple):
    """The batches of one epoch (`trainable.Plan`).

    Attributes:
        epoch: number of the epoch.
        batches: what identifies each batch: its examples' indices, its place in a list, or the batch itself.
        sizes: examples of each.
    """

    epoch: int
    batches: Sequence[Any]
    sizes: Sequence[int]

    @property
    def batch_size(self) -> int:
        return 1

    @property
    def num_examples(self) -> int:
        return len(self.sizes)

    @property
    def num_frames(self) -> int:
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def frames(self, rows: slice) -> np.ndarray:
        return np.array(self.sizes[rows])

    def in_batches_of(self, batch_size: int) -> EpochOrder:
        raise ValueError("batches of a user have one size")  # so checkpoints of another number of learners are refused


class ListData:
    """A list of batches (`trainable.Data`)."""

    def __init__(self, batches: Sequence[Any], sizes: Sequence[int] | None) -> None:
        self._batches = batches
        self._sizes = list(sizes if sizes is not None else map(_size, batches))
        if not self._sizes or len(self._sizes) != len(batches):
            raise InputError(
                f"train_model: {len(batches)} batches and {len(self._sizes)} sizes; give as many of both, at least one"
            )
        if min(self._sizes) < 1:
            number = self._sizes.index(min(self._sizes))
            raise InputError(f"train_model: batch {number} has {min(self._sizes)} examples; each needs at least one")

    def plan(self, epoch: int) -> EpochOrder:
        return EpochOrder(epoch, [(number,) for number in range(len(self._sizes))], self._sizes)

    def batch(self, plan: EpochOrder, number: int) -> OneBatch:
        return OneBatch(number, self._sizes[number], _digest(plan.batches[number]), self._batches[number])

    def batches(self, plan: EpochOrder, numbers: Iterable[int]) -> Iterator[OneBatch]:
        return (self.batch(plan, number) for number in numbers)

    def digests(self, plan: EpochOrder, first: int, end: int) -> tuple[int, ...]:
        return tuple(_digest(batch) for batch in plan.batches[first:end])


class LoaderData:
    """The batches of a `DataLoader` (`trainable.Data`), in an order that follows from seed and epoch alone.

    Its workers assemble batches that are known in advance (`batches`), not single ones (`batch`).
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise InputError(
                "train_model: learners share out batches by number; give a DataLoader with a dataset that has a length "
                "and indices, and with a batch size, or a list of batches"
            )
        if isinstance(loader.sampler, DistributedSampler):
            raise InputError("train_model: divides the batches itself; give the DataLoader no DistributedSampler")
        self._loader, self._seed = loader, seed

    def plan(self, epoch: int) -> EpochOrder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed := seed_of(self._seed, epoch))
            for generator in {self._loader.generator, getattr(self._loader.sampler, "generator", None)} - {None}:
                generator.manual_seed(seed)
            assert self._loader.batch_sampler is not None
            batches = [tuple(map(int, batch)) for batch in self._loader.batch_sampler]
        if not batches:
            raise InputError("train_model: the DataLoader has no batches")
        return EpochOrder(epoch, batches, [len(batch) for batch in batches])

    def batch(self, plan: EpochOrder, number: int) -> OneBatch:
        content = self._loader.collate_fn([self._loader.dataset[index] for index in plan.batches[number]])
        return self._named(plan, number, content)

    def batches(self, plan: EpochOrder, numbers: Iterable[int]) -> Iterator[OneBatch]:
        """Assembles batches with the worker processes of the user's loader."""
        numbers, loader = list(numbers), self._loader
        ahead = DataLoader(
            loader.dataset, batch_sampler=[list(plan.batches[number]) for number in numbers],
            num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
            timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )  # fmt: skip
        return (self._named(plan, number, content) for number, content in zip(numbers, ahead, strict=True))

    def digests(self, plan: EpochOrder, first: int, end: int) -> tuple[int, ...]:
        return tuple(_digest(batch) for batch in plan.batches[first:end])

    def _named(self, plan: EpochOrder, number: int, content: Any) -> OneBatch:
        return OneBatch(number, plan.sizes[number], _digest(plan.batches[number]), content)


def make_data(batches: Batches, batch_size: int, sizes: Sequence[int] | None, seed: int) -> ListData | LoaderData:
    if isinstance(batches, DataLoader):
        return LoaderData(batches, seed)
    if isinstance(batches, IterableDataset) or not hasattr(batches, "__len__") or not hasattr(batches, "__getitem__"):
        raise InputError(
            f"train_model: batches are a {type(batches).__name__}; give a DataLoader, a dataset with a length and "
            "indices, or a list of batches"
        )
    if isinstance(batches, Dataset):
        return LoaderData(DataLoader(batches, batch_size, shuffle=True), seed)
    return ListData(batches, sizes)


def _size(batch: object) -> int:
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()))
    part = batch[0] if isinstance(batch, tuple | list) else batch
    try:
        return len(part)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(
            f"train_model: a batch that begins with a {type(part).__name__} does not say how many examples it has; "
            "give `sizes`, the examples of each batch"
        ) from error


def _digest(indices: Sequence[int]) -> int:
    return zlib.crc32(np.array(indices, dtype=np.int64).tobytes())
