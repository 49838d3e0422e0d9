"""Training examples on disk: complete utterances, concatenated in memory-mapped shards.

Shapes: T frames of a shard, F feature dimension, U utterances, P pdfs.

    egs.json                      format, kind of features, dim, num_pdfs, chunk, frames and utterances of each set
    pdf_counts.npy                int64 [P], frames of each pdf in the set `train` (the priors of decoding)
    <set>/features.<k>.npy        float16 or float32 [T + chunk, F]
    <set>/targets.<k>.npy         int16 or int32 [T + chunk]
    <set>/index.npz               utterance [U] text, shard [U], begin [U] (row in its shard), frames [U], crc32 [U]
    <set>/vectors.f32, .npz       i-vectors, if the inputs have them: see `ivector_store`

The last `chunk` rows of a shard are zeros, so that a chunk can be read in one piece wherever it starts. F counts frame
streams only. I-vectors are added on loading, which makes `dim` inputs. Utterances are stored complete, so that every
epoch can cut them into chunks at other frames.

An utterance's checksum covers its targets, then its features. A process verifies it the first time that it reads a
chunk of that utterance, so no batch is made of damaged examples, and training starts without reading all of them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from asr_am.data.checksums import intact
from asr_am.data.npz import write_npz
from asr_am.data.textfile import load_json
from asr_am.egs.ivector_store import REMEDY, IvectorStore
from asr_am.errors import InputError
from asr_am.features.fusion import IVECTOR, columns
from asr_am.options import check_types

FORMAT = 1
LARGEST = 2**31 - 1  # of numbers in egs.json: sums of them fit into 64 bits


@dataclass(frozen=True)
class EgsInfo:
    """Content of egs.json.

    Attributes:
        dim: Inputs of a frame, including the i-vector.
        chunk: Frames of a training chunk.
        sets: Number of utterances and frames of each set.
        streams: Width of each part of a frame, in order. Empty for the features of `kind` alone.
        period: Number of frames that a row of i-vectors is used for.
        senones: Digest of the states and the tree of the pdfs. Empty if unknown.
    """

    kind: str
    dim: int
    num_pdfs: int
    chunk: int
    sets: dict[str, dict[str, int]]
    format: int = FORMAT
    streams: dict[str, int] = field(default_factory=dict)
    period: int = 0
    senones: str = ""

    @property
    def columns(self) -> dict[str, slice]:
        """Columns of each stream in a frame of inputs."""
        return columns(self.streams or {self.kind: self.dim})

    @property
    def ivector_columns(self) -> slice:
        """Columns of the i-vector. An empty slice at the end if there is none."""
        return self.columns.get(IVECTOR, slice(self.dim, self.dim))

    @property
    def band_columns(self) -> slice:
        """Columns that frequency masks apply to: those of log-mel features, or all if there are none."""
        return self.columns.get("logmel", slice(0, self.dim))

    @property
    def frame_dim(self) -> int:
        """Values of a frame on disk, F."""
        return self.dim - (self.ivector_columns.stop - self.ivector_columns.start)

    def save(self, directory: Path) -> None:
        (directory / "egs.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> EgsInfo:
        """Reads egs.json. Raises InputError if it is missing, damaged or of another format."""
        path = directory / "egs.json"
        try:
            check_types(cls, values := load_json(path), "")
            info = cls(**values)
        except (OSError, ValueError, TypeError, AttributeError, InputError) as error:
            raise InputError(f"{path}: not a readable description of training examples ({error}); {REMEDY}") from error
        if info.format != FORMAT:
            raise InputError(f"{path}: has format {info.format}, but this program reads format {FORMAT}; {REMEDY}")
        if not all(0 < n <= LARGEST for n in (info.dim, info.num_pdfs, info.chunk)):
            raise InputError(f"{path}: dim, num_pdfs and chunk must be 1 to {LARGEST}; {REMEDY}")
        widths = info.streams.values()
        if not all(n > 0 for n in widths) or sum(widths) not in (0, info.dim):
            raise InputError(f"{path}: the widths of streams must be positive and sum to {info.dim}; {REMEDY}")
        if IVECTOR in info.streams and not 0 < info.period <= LARGEST:
            raise InputError(f"{path}: period must be 1 to {LARGEST} frames; {REMEDY}")
        return info


@dataclass(frozen=True)
class Index:
    """Location of each utterance of a set.

    Attributes:
        shard_U: Shard of each utterance.
        begin_U: Its first row in the shard.
        frames_U: Its number of frames.
        crc32_U: CRC-32 of its targets and features, uint32.
    """

    utterances: list[str]
    shard_U: np.ndarray
    begin_U: np.ndarray
    frames_U: np.ndarray
    crc32_U: np.ndarray

    def part(self, begin: int, end: int) -> Index:
        """Returns the utterances from `begin` to `end` (exclusive)."""
        rows = slice(begin, end)
        columns = (self.shard_U[rows], self.begin_U[rows], self.frames_U[rows], self.crc32_U[rows])
        return Index(self.utterances[rows], *columns)

    @classmethod
    def joined(cls, indices: Sequence[Index]) -> Index:
        """Returns the utterances of several sets, one set after the other."""
        columns = zip(*((i.shard_U, i.begin_U, i.frames_U, i.crc32_U) for i in indices), strict=True)
        return cls([name for index in indices for name in index.utterances], *map(np.concatenate, columns))

    def save(self, directory: Path) -> None:
        arrays = {"utterance": np.array(self.utterances), "shard": self.shard_U, "begin": self.begin_U}
        arrays |= {"frames": self.frames_U, "crc32": self.crc32_U}
        write_npz(directory / "index.npz", arrays)

    @classmethod
    def load(cls, path: Path) -> Index:
        """Reads an index file. Raises InputError if it is missing or damaged."""
        intact(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = (file["shard"], file["begin"], file["frames"], file["crc32"])
                index = cls([str(u) for u in file["utterance"]], *columns)
        except Exception as error:  # zipfile, zlib and numpy raise many types
            raise InputError(f"{path}: not a readable index ({error}); {REMEDY}") from error
        sizes = {len(index.utterances), *(column.size for column in columns)}
        if sizes == {0} or len(sizes) != 1:
            raise InputError(f"{path}: is empty, or its columns differ in length; {REMEDY}")
        if index.frames_U.min() < 1 or index.begin_U.min() < 0 or index.shard_U.min() < 0:
            raise InputError(f"{path}: has an utterance without frames or at a negative position; {REMEDY}")
        return index


class EgsSet:
    """One set of examples, or several as one, memory-mapped for reading.

    Attributes:
        directory: Folder of the set, for messages. Of several, their names joined by `+`.
        features: Memory map of the features of each shard.
        targets: Memory map of the targets of each shard.
        ivectors: The i-vectors, None if the inputs have none.
    """

    def __init__(self, directory: Path, *subsets: str) -> None:
        """Opens sets. Raises InputError if a file is missing, damaged, or does not match the others."""
        self.directory = directory / "+".join(subsets)
        self.info = EgsInfo.load(directory)
        self.features: list[np.ndarray[Any, Any]] = []
        self.targets: list[np.ndarray[Any, Any]] = []
        self._shards: list[tuple[Path, int]] = []  # folder and number of each
        indices, ivectors = [], []
        width = self.info.dim - self.info.frame_dim
        for subset in subsets:
            if subset not in self.info.sets:
                raise InputError(f"{directory}: has no set {subset!r}, only {sorted(self.info.sets)}; {REMEDY}")
            folder, before = directory / subset, len(self._shards)
            index = Index.load(folder / "index.npz")
            self._shards += [(folder, k) for k in range(int(index.shard_U.max()) + 1)]
            self.features += [self._map("features", k, ("float16", "float32"), 2) for k in self._shards[before:]]
            self.targets += [self._map("targets", k, ("int16", "int32"), 1) for k in self._shards[before:]]
            indices.append(replace(index, shard_U=index.shard_U + before))
            if width:
                ivectors.append(IvectorStore(folder, width, self.info.period, len(index.utterances)))
        self.index = Index.joined(indices)
        self.ivectors = IvectorStore.joined(ivectors) if width else None
        self._check()
        self._verified_U = np.zeros(len(self.index.utterances), bool)

    def verify(self, utterances: np.ndarray) -> None:
        """Compares the checksums of utterances, given by their positions in the index, unless it was done before.

        Raises:
            InputError: names an utterance whose features or targets have changed since they were written.
        """
        index = self.index
        for u in np.unique(utterances[~self._verified_U[utterances]]).tolist():
            shard, rows = index.shard_U[u], slice(int(index.begin_U[u]), int(index.begin_U[u] + index.frames_U[u]))
            if crc32_of(self.targets[shard][rows], self.features[shard][rows]) != index.crc32_U[u]:
                folder, number = self._shards[shard]
                raise InputError(
                    f"{folder}: utterance {index.utterances[u]} is damaged in features.{number}.npy or targets."
                    f"{number}.npy: its checksum is wrong; remove both and {REMEDY}"
                )
            self._verified_U[u] = True

    def read_ahead(self, utterances: np.ndarray) -> None:
        """Asks the system to read utterances, in pieces as long as they lie side by side. Does not wait for them.

        Args:
            utterances: positions in the index, rising.
        """
        index, chunk = self.index, self.info.chunk
        shard_U, begin_U = index.shard_U[utterances], index.begin_U[utterances]
        end_U = begin_U + index.frames_U[utterances]
        new_U = np.ones(len(utterances), bool)
        new_U[1:] = (shard_U[1:] != shard_U[:-1]) | (begin_U[1:] != end_U[:-1])
        first = np.flatnonzero(new_U)
        last = np.append(first[1:], len(utterances)) - 1
        pieces = zip(shard_U[first].tolist(), begin_U[first].tolist(), (end_U[last] + chunk).tolist(), strict=True)
        with ExitStack() as files:
            opened: dict[tuple[str, int], int] = {}
            for shard, begin, end in pieces:
                for name, array in (("features", self.features[shard]), ("targets", self.targets[shard])):
                    if (name, shard) not in opened:
                        folder, number = self._shards[shard]
                        file = files.enter_context((folder / f"{name}.{number}.npy").open("rb"))
                        opened[name, shard] = file.fileno()
                    size = array.strides[0]
                    where, length = getattr(array, "offset", 0) + begin * size, (end - begin) * size
                    os.posix_fadvise(opened[name, shard], where, length, os.POSIX_FADV_WILLNEED)

    @property
    def frames(self) -> int:
        return int(self.index.frames_U.sum())

    def _map(self, name: str, shard: tuple[Path, int], dtypes: tuple[str, ...], ndim: int) -> np.ndarray[Any, Any]:
        path = shard[0] / f"{name}.{shard[1]}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python, which can raise any type
            raise InputError(f"{path}: not a readable shard ({error}); {REMEDY}") from error
        width = array.shape[1] if array.ndim == 2 else self.info.frame_dim
        if array.dtype.name not in dtypes or array.ndim != ndim or width != self.info.frame_dim:
            raise InputError(f"{path}: holds {array.dtype} {array.shape}, not what egs.json says; {REMEDY}")
        return array

    def _check(self) -> None:
        rows_K = np.array([len(x) for x in self.features])
        if any(len(t) != n for t, n in zip(self.targets, rows_K, strict=True)):
            raise InputError(f"{self.directory}: a shard has different numbers of features and targets; {REMEDY}")
        end_U = self.index.begin_U + self.index.frames_U + self.info.chunk
        outside = np.flatnonzero(end_U > rows_K[self.index.shard_U])
        if len(outside):
            utterance = self.index.utterances[int(outside[0])]
            raise InputError(f"{self.directory}: utterance {utterance} lies beyond the end of its shard; {REMEDY}")


def crc32_of(targets_T: np.ndarray, features_TF: np.ndarray) -> int:
    """Returns the checksum of an utterance of T frames as the index has it."""
    return zlib.crc32(np.ascontiguousarray(features_TF).data, zlib.crc32(np.ascontiguousarray(targets_T).data))


def load_pdf_counts(directory: Path) -> np.ndarray:
    """Reads the number of frames of each pdf in the training set, int64 [P]."""
    path = directory / "pdf_counts.npy"
    intact(path)
    try:
        counts_P = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy can raise any type, see above
        raise InputError(f"{path}: not readable ({error}); {REMEDY}") from error
    num_pdfs = EgsInfo.load(directory).num_pdfs
    if counts_P.shape != (num_pdfs,) or counts_P.dtype != np.int64 or counts_P.min() < 0 or not counts_P.any():
        raise InputError(f"{path}: does not hold the counts of {num_pdfs} pdfs; {REMEDY}")
    return counts_P


def log_priors(counts_P: np.ndarray, floor: float = 0.1) -> np.ndarray:
    """Returns float32 [P]: log-priors of the pdfs from their frame counts in the training alignments.

    Args:
        floor: lowest prior as a share of the mean prior. Without it rare pdfs, whose posteriors are unreliable, would
            win.
    """
    shares_P = np.maximum(counts_P / counts_P.sum(), floor / len(counts_P))
    return np.log(shares_P / shares_P.sum()).astype(np.float32)
