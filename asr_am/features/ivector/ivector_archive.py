"""i-vectors on disk: one per speaker, or one per segment of a few seconds. Never one per frame.

    <set>_ivectors.<n>.ark, <set>_ivectors.scp    float32 [K, S] by speaker (K = 1) or by utterance (a row per segment)
    ivectors.json                                 dimension S, frames per segment, and the type of keys of each set

Shapes: K segments, S dimensions of the i-vector, T frames.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from asr_am.data.kaldi_archive import read_scp
from asr_am.data.textfile import load_json
from asr_am.errors import InputError
from asr_am.features.feature_archive import load_matrix

REMEDY = "run stage 4 (speaker) again"
INFO = "ivectors.json"


@dataclass(frozen=True)
class IvectorInfo:
    """Contents of ivectors.json.

    Attributes:
        dim: S.
        period: frames per segment.
        keys: "speaker" or "utterance", by set.
    """

    dim: int
    period: int
    keys: dict[str, str]

    def save(self, folder: Path) -> None:
        (folder / INFO).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> IvectorInfo:
        """Reads the file in `folder`. Raises InputError if it is missing or damaged."""
        path = folder / INFO
        try:
            info = cls(**load_json(path))
            if not (info.dim > 0 and info.period > 0 and set(info.keys.values()) <= {"speaker", "utterance"}):
                raise ValueError("values out of range")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: missing or damaged ({error}); {REMEDY}") from error
        return info


class IvectorReader:
    """The i-vectors of one set. Holds no open file."""

    def __init__(self, folder: Path, subset: str, speaker: Callable[[str], str]) -> None:
        """Opens the index. Raises InputError if a file is missing or damaged."""
        info = IvectorInfo.load(folder)
        if subset not in info.keys:
            raise InputError(f"{folder / INFO}: has no set {subset!r}, only {sorted(info.keys)}; {REMEDY}")
        self.dim, self.period, self._speaker, self._by = info.dim, info.period, speaker, info.keys[subset]
        self._scp = folder / f"{subset}_ivectors.scp"
        self._locations = read_scp(self._scp, REMEDY)

    def key(self, utterance: str) -> str:
        """Returns the key of an utterance's i-vectors in the archive: its own id, or its speaker's."""
        return self._speaker(utterance) if self._by == "speaker" else utterance

    def __getitem__(self, utterance: str) -> np.ndarray:
        """Returns a row per `period` frames, float32 [K, S]. Raises InputError, with the speaker, if there is none."""
        key, speaker = self.key(utterance), self._speaker(utterance)
        if key not in self._locations:
            raise InputError(f"{self._scp}: no i-vector for speaker {speaker} (utterance {utterance}); {REMEDY}")
        rows_KS = load_matrix(self._locations[key], REMEDY)
        if rows_KS.shape[1] != self.dim or len(rows_KS) == 0 or not np.isfinite(rows_KS).all():
            raise InputError(
                f"{self._locations[key]}: no i-vector of {self.dim} numbers for speaker {speaker}; {REMEDY}"
            )
        return rows_KS

    def per_frame(self, utterance: str, num_frames: int) -> np.ndarray:
        """Returns the i-vector of each frame's segment, float32 [T, S]."""
        rows_KS = self[utterance]
        return rows_KS[segment(np.arange(num_frames), self.period, len(rows_KS))]


def segment(frame: np.ndarray, period: int, count: np.ndarray | int) -> np.ndarray:
    """Returns the row of a frame's i-vector among `count` rows. The last row covers later frames too."""
    return np.minimum(frame // period, count - 1)
