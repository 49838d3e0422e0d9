"""The frames of one set, all utterances in a row, in a memory-mapped file: read once, shared by every worker process.

Shapes: N frames of the set, D feature dimension, U utterances.

Features cost time to read (normalisation, deltas) and every training pass needs them all, so they are written once as
float32; memory stays flat because the operating system drops pages it needs elsewhere. Whoever trains on other features
(LDA+MLLT, fMLLR) writes another store.
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
from asr_am.parallel import track


class FrameStore:
    """Frames on disk. utterances: ids; offsets_U1: int64, utterance u is rows offsets_U1[u] to offsets_U1[u + 1].
    x_ND: all frames, float32, a read-only memory map.
    """

    def __init__(self, folder: Path) -> None:
        """Open what `write` left in `folder`; InputError where it is missing or damaged."""
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
        """The rows of the utterance with this index."""
        return slice(int(self.offsets_U1[utterance]), int(self.offsets_U1[utterance + 1]))

    @classmethod
    def write(
        cls, folder: Path, utterances: Sequence[str], read: Callable[[str], np.ndarray], description: str
    ) -> FrameStore:
        """Store `read(utterance)`, float32 [T, D], of all `utterances` (one or more); the folder appears when whole."""
        temporary = folder.with_name(f"tmp.{os.getpid()}.{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had the same id
        temporary.mkdir(parents=True)
        lengths, dims = [], set()
        with open(temporary / "frames.f32", "wb") as file:
            for utterance in track(utterances, description):
                x_TD = np.ascontiguousarray(read(utterance), dtype=np.float32)
                if not np.isfinite(x_TD).all():
                    raise InputError(
                        f"utterance {utterance}: has features that are not finite; run stage 2 (features) again"
                    )
                file.write(x_TD.data)
                lengths.append(len(x_TD))
                dims.add(x_TD.shape[1])
        if len(dims) != 1:
            raise InputError(f"{folder.name}: features of {sorted(dims)} dimensions; run stage 2 (features) again")
        offsets_U1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        index = {"utterances": np.array(utterances), "offsets": offsets_U1, "dim": dims.pop()}
        write_npz(temporary / "index.npz", index)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        return cls(folder)
