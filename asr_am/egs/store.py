"""Training examples on disk: whole utterances end to end in memory-mapped shards.

Shapes: T frames of a shard, F feature dimension, U utterances, P pdfs.

    egs.json                      format, kind of features, dim, num_pdfs, chunk, frames and utterances of each set
    pdf_counts.npy                int64 [P], frames of each pdf in the set `train` (the priors of decoding)
    <set>/features.<k>.npy        float16 or float32 [T + chunk, F]; the last `chunk` rows are zeros, so that a chunk
    <set>/targets.<k>.npy         int16 or int32 [T + chunk]         may be read in one piece wherever it starts
    <set>/index.npz               utterance [U] text, shard [U], begin [U] (row in its shard), frames [U]
    <set>/vectors.f32, .npz       i-vectors, where the inputs have them: see `vectors`

F counts the frame streams only; an i-vector joins them when they are read, which makes `dim` inputs. Utterances are
stored whole, so that every epoch may cut them into chunks at other places.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asr_am.egs.ivector_store import REMEDY, Vectors
from asr_am.errors import InputError
from asr_am.features.fusion import IVECTOR, columns

FORMAT = 1


@dataclass(frozen=True)
class EgsInfo:
    """What egs.json says. dim: inputs of a frame, i-vector included.

    streams: the width of each part of a frame, in order (none: the features of `kind` alone). period: frames that a row
    of i-vectors is for. senones: digest of the states and the tree that the pdfs are from, empty where unknown.
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
        """The columns of each stream in a frame of inputs."""
        return columns(self.streams or {self.kind: self.dim})

    @property
    def vector(self) -> slice:
        """The columns of the i-vector, empty (at the end) where there is none."""
        return self.columns.get(IVECTOR, slice(self.dim, self.dim))

    @property
    def bands(self) -> slice:
        """The columns that frequency bands can be masked in: those of log-mel features, or else of all frames."""
        return self.columns.get("logmel", slice(0, self.dim))

    @property
    def frame_dim(self) -> int:
        """Values of a frame on disk, F."""
        return self.dim - (self.vector.stop - self.vector.start)

    def save(self, directory: Path) -> None:
        (directory / "egs.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> EgsInfo:
        """InputError where the file is missing, damaged or of another format."""
        path = directory / "egs.json"
        try:
            info = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path}: not a readable description of training examples ({error}); {REMEDY}") from error
        if info.format != FORMAT:
            raise InputError(f"{path}: format {info.format}, this program reads {FORMAT}; {REMEDY}")
        if not all(isinstance(n, int) and n > 0 for n in (info.dim, info.num_pdfs, info.chunk)):
            raise InputError(f"{path}: dim, num_pdfs and chunk must be positive numbers; {REMEDY}")
        widths = info.streams.values() if isinstance(info.streams, dict) else [0]
        if not all(isinstance(n, int) and n > 0 for n in widths) or sum(widths) not in (0, info.dim):
            raise InputError(f"{path}: the widths of streams are not positive or not {info.dim} in all; {REMEDY}")
        if IVECTOR in info.streams and not (isinstance(info.period, int) and info.period > 0):
            raise InputError(f"{path}: period must be a positive number of frames; {REMEDY}")
        return info


@dataclass(frozen=True)
class Index:
    """Where each utterance of a set lies."""

    utterances: list[str]
    shard_U: np.ndarray
    begin_U: np.ndarray
    frames_U: np.ndarray

    def part(self, begin: int, end: int) -> Index:
        """The utterances begin..end."""
        rows = slice(begin, end)
        return Index(self.utterances[rows], self.shard_U[rows], self.begin_U[rows], self.frames_U[rows])

    def save(self, directory: Path) -> None:
        np.savez(
            directory / "index.npz", utterance=np.array(self.utterances), shard=self.shard_U, begin=self.begin_U,
            frames=self.frames_U,
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Index:
        """InputError where the file is missing or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                index = cls([str(u) for u in file["utterance"]], file["shard"], file["begin"], file["frames"])
        except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds
            raise InputError(f"{path}: not a readable index ({error}); {REMEDY}") from error
        sizes = {len(index.utterances), len(index.shard_U), len(index.begin_U), len(index.frames_U)}
        if sizes == {0} or len(sizes) != 1:
            raise InputError(f"{path}: is empty, or its columns differ in length; {REMEDY}")
        if index.frames_U.min() < 1 or index.begin_U.min() < 0 or index.shard_U.min() < 0:
            raise InputError(f"{path}: has an utterance without frames or at a negative place; {REMEDY}")
        return index


class EgsSet:
    """One set of examples, opened for reading; nothing is read before it is asked for.

    `features[k]` and `targets[k]` are memory maps of shard k. vectors: the i-vectors, None without.
    """

    def __init__(self, directory: Path, subset: str) -> None:
        """InputError where a file is missing, damaged, or does not fit the others."""
        self.directory = directory / subset
        self.info = EgsInfo.load(directory)
        if subset not in self.info.sets:
            raise InputError(f"{directory}: has no set {subset!r}, only {sorted(self.info.sets)}; {REMEDY}")
        self.index = Index.load(self.directory / "index.npz")
        shards = range(int(self.index.shard_U.max()) + 1)
        self.features = [self._map("features", k, ("float16", "float32"), 2) for k in shards]
        self.targets = [self._map("targets", k, ("int16", "int32"), 1) for k in shards]
        self._check()
        self.vectors = self._open_vectors()

    @property
    def frames(self) -> int:
        return int(self.index.frames_U.sum())

    def _open_vectors(self) -> Vectors | None:
        width = self.info.dim - self.info.frame_dim
        return Vectors(self.directory, width, self.info.period, len(self.index.utterances)) if width else None

    def _map(self, name: str, shard: int, dtypes: tuple[str, ...], ndim: int) -> np.ndarray[Any, Any]:
        path = self.directory / f"{name}.{shard}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python and raises whatever that leads to
            raise InputError(f"{path}: not a readable shard ({error}); {REMEDY}") from error
        width = array.shape[1] if array.ndim == 2 else self.info.frame_dim
        if array.dtype.name not in dtypes or array.ndim != ndim or width != self.info.frame_dim:
            raise InputError(f"{path}: holds {array.dtype} {array.shape}, not what egs.json says; {REMEDY}")
        return array

    def _check(self) -> None:
        rows_K = np.array([len(x) for x in self.features])
        if any(len(t) != n for t, n in zip(self.targets, rows_K, strict=True)):
            raise InputError(f"{self.directory}: a shard has more features than targets or fewer; {REMEDY}")
        end_U = self.index.begin_U + self.index.frames_U + self.info.chunk
        late = np.flatnonzero(end_U > rows_K[self.index.shard_U])
        if len(late):
            utterance = self.index.utterances[int(late[0])]
            raise InputError(f"{self.directory}: utterance {utterance} lies beyond the end of its shard; {REMEDY}")


def load_pdf_counts(directory: Path) -> np.ndarray:
    """int64 [P]: frames of each pdf in the training set."""
    path = directory / "pdf_counts.npy"
    try:
        counts_P = np.load(path, allow_pickle=False)
    except Exception as error:  # as above
        raise InputError(f"{path}: not readable ({error}); {REMEDY}") from error
    num_pdfs = EgsInfo.load(directory).num_pdfs
    if counts_P.shape != (num_pdfs,) or counts_P.dtype != np.int64 or counts_P.min() < 0 or not counts_P.any():
        raise InputError(f"{path}: does not hold the counts of {num_pdfs} pdfs; {REMEDY}")
    return counts_P
