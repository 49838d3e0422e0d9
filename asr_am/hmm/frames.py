"""A memory-mapped file of all frames of a set, read once and shared by all worker processes.

Reading features costs time (CMVN, deltas), and every training pass needs all of them. They are therefore written once,
as float32. Memory stays bounded because the operating system drops pages when it needs the space. Systems with their
own features (LDA+MLLT, fMLLR) write a store of their own.

Shapes: N frames of the set, D feature dimension, U utterances.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from asr_am.data.npz import read_npz, write_npz
from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.progress import track


class FrameStore:
    """Frames of a set on disk.

    Attributes:
        folder: where the files are.
        utterances: utterance ids, in the order of the rows.
        offsets_U1: int64. The frames of utterance u are rows offsets_U1[u] to offsets_U1[u + 1].
        dim: feature dimension.
        x_ND: all frames, float32, a read-only memory map.
    """

    def __init__(self, folder: Path) -> None:
        """Opens what `write` left in `folder`. Raises InputError if it is missing or damaged."""
        self.folder = folder
        utterances, self.offsets_U1, dim = read_npz(folder / "index.npz", "utterances", "offsets", "dim", remedy=REMEDY)
        self.utterances: list[str] = utterances.tolist()
        self.dim = int(dim)
        try:
            shape = self.num_frames, self.dim
            self.x_ND: np.ndarray = np.memmap(folder / "frames.f32", dtype=np.float32, mode="r", shape=shape)
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / 'frames.f32'}: not readable ({error}); {REMEDY}") from error

    @property
    def num_frames(self) -> int:
        return int(self.offsets_U1[-1])

    def span(self, utterance: int) -> slice:
        """Returns the rows of the utterance with this index."""
        return slice(int(self.offsets_U1[utterance]), int(self.offsets_U1[utterance + 1]))

    @classmethod
    def write(
        cls, folder: Path, utterances: Sequence[str], read: Callable[[str], np.ndarray], description: str
    ) -> FrameStore:
        """Writes the frames of a set. The folder appears only when it is complete.

        Args:
            folder: the folder to write, replaced if it exists.
            utterances: utterance ids, at least one.
            read: returns the frames of an utterance, [T, D].
            description: label of the progress bar.

        Raises:
            InputError: features are not finite, or differ in dimension.
        """
        temporary = folder.with_name(f"tmp.{os.getpid()}.{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with the same id
        temporary.mkdir(parents=True)
        lengths, dims = [], set()
        with open(temporary / "frames.f32", "wb") as file:
            for utterance in track(utterances, description):
                x_TD = np.ascontiguousarray(read(utterance), dtype=np.float32)
                if not np.isfinite(x_TD).all():
                    raise InputError(f"utterance {utterance}: features are not finite; run stage 2 (features) again")
                file.write(x_TD.data)
                lengths.append(len(x_TD))
                dims.add(x_TD.shape[1])
        if len(dims) != 1:
            raise InputError(
                f"{folder.name}: utterances differ in feature dimension, {sorted(dims)}; run stage 2 (features) again"
            )
        offsets_U1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        index = {"utterances": np.array(utterances), "offsets": offsets_U1, "dim": dims.pop()}
        write_npz(temporary / "index.npz", index)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        return cls(folder)
