"""A file of all frames of a set, shared by all workers.

Reading features costs time (CMVN, deltas), and every training pass needs all of them. They are therefore written once,
as float32, and passes read them in order, a range of utterances at a time. Systems with their own features (LDA+MLLT,
fMLLR) write a store of their own.

Shapes: N frames of the set, D feature dimension, U utterances.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asr_am.data.npz import read_npz, write_npz
from asr_am.data.temporary import replacing
from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.progress import track

FRAMES = "frames.f32"
RANGE = 2**19  # frames of a range. Statistics of up to 200,000 Gaussians are added up once per range
MIN_RANGES = 16  # of small sets, so that all workers have some, as long as ranges have SMALL_RANGE frames
SMALL_RANGE = 8192


@dataclass(eq=False)
class FrameStore:
    """Frames of a set on disk: what `write` left in a folder. Raises InputError if it is missing or damaged.

    Attributes:
        folder: where the files are.
        inode: of the file of frames. Given on another host, where it must be the same file.
        utterances: utterance ids, in the order of the rows.
        offsets_U1: int64. The frames of utterance u are rows offsets_U1[u] to offsets_U1[u + 1].
        dim: feature dimension.
        x_ND: all frames, float32, a read-only memory map. Passes over a set use `read`, since pages of a map count as
            memory of the process once they were touched.
    """

    folder: Path
    inode: int | None = None

    def __post_init__(self) -> None:
        folder = self.folder
        utterances, self.offsets_U1, dim = read_npz(folder / "index.npz", "utterances", "offsets", "dim", remedy=REMEDY)
        self.utterances: list[str] = utterances.tolist()
        self.dim = int(dim)
        try:
            shape = self.num_frames, self.dim
            self._file = open(folder / FRAMES, "rb", buffering=0)  # noqa: SIM115 # the folder may be replaced
            inode, self.inode = self.inode, os.fstat(self._file.fileno()).st_ino
            self.x_ND: np.ndarray = np.memmap(self._file, dtype=np.float32, mode="r", shape=shape)
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / 'frames.f32'}: not readable ({error}); {REMEDY}") from error
        if inode not in (None, self.inode):
            raise InputError(f"{folder}: was replaced while it was used; {REMEDY}")

    @property
    def num_frames(self) -> int:
        return int(self.offsets_U1[-1])

    def span(self, utterance: int) -> slice:
        """Returns the rows of the utterance with this index."""
        return slice(int(self.offsets_U1[utterance]), int(self.offsets_U1[utterance + 1]))

    def read(self, rows: slice) -> np.ndarray:
        """Reads consecutive frames, [rows, D]."""
        x_TD = np.empty((rows.stop - rows.start, self.dim), np.float32)
        data, offset = x_TD.reshape(-1).view(np.uint8).data, rows.start * self.dim * x_TD.itemsize
        while len(data):
            count = os.preadv(self._file.fileno(), [data], offset)
            if count == 0:
                raise InputError(f"{self.folder / FRAMES}: shorter than it was; {REMEDY}")
            data, offset = data[count:], offset + count
        return x_TD

    def ranges(self) -> list[tuple[int, int]]:
        """Splits the set into ranges of utterances with up to about RANGE frames, each (first utterance, end).

        They depend on the set only, so that sums over ranges do not depend on the number of workers.
        """
        parts = max(-(-self.num_frames // RANGE), min(MIN_RANGES, self.num_frames // SMALL_RANGE), 1)
        inner = np.searchsorted(self.offsets_U1, np.linspace(0, self.num_frames, parts + 1)[1:-1])
        return list(itertools.pairwise(np.unique([0, *inner, len(self.utterances)]).tolist()))

    def rows(self, first: int, end: int) -> slice:
        """Returns the rows of the utterances from `first` up to `end`."""
        return slice(int(self.offsets_U1[first]), int(self.offsets_U1[end]))

    @classmethod
    def write(
        cls, folder: Path, utterances: Sequence[str], read: Callable[[str], np.ndarray], description: str
    ) -> FrameStore:
        """Writes the frames of a set. The folder appears only when it is complete.

        Args:
            folder: the folder to write, replaced if it exists.
            utterances: utterance ids, at least one.
            read: returns the frames of an utterance, [T, D].

        Raises:
            InputError: features are not finite, or differ in dimension.
        """
        lengths, dims = [], set()
        with replacing(folder) as temporary:
            temporary.mkdir(parents=True)
            with (temporary / FRAMES).open("wb") as file:
                for utterance in track(utterances, description):
                    x_TD = np.ascontiguousarray(read(utterance), dtype=np.float32)
                    if not np.isfinite(x_TD).all():
                        raise InputError(
                            f"utterance {utterance}: features are not finite; run stage 2 (features) again"
                        )
                    file.write(x_TD.data)
                    lengths.append(len(x_TD))
                    dims.add(x_TD.shape[1])
            if len(dims) != 1:
                raise InputError(
                    f"{folder.name}: utterances differ in feature dimension, {sorted(dims)}; run stage 2 (features) "
                    "again"
                )
            offsets_U1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            index = {"utterances": np.array(utterances), "offsets": offsets_U1, "dim": dims.pop()}
            write_npz(temporary / "index.npz", index)
        return cls(folder)
