"""i-vectors on disk, one for each speaker or each few seconds of an utterance: never one per frame.

    <set>_ivectors.<n>.ark, <set>_ivectors.scp    float32 [K, S] by speaker (K = 1) or by utterance (a row per segment)
    ivectors.json                                 dim S, period in frames, and for each set what its keys are

Shapes: K segments, S dimensions of the i-vector, T frames.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.features.feature_archive import load_matrix, read_scp

REMEDY = "run stage 4 (speaker) again"
INFO = "ivectors.json"


@dataclass(frozen=True)
class IvectorInfo:
    """period: frames of a segment. keys: "speaker" or "utterance", by set."""

    dim: int
    period: int
    keys: dict[str, str]

    def save(self, folder: Path) -> None:
        (folder / INFO).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> IvectorInfo:
        """InputError where the file is missing or damaged."""
        path = folder / INFO
        try:
            info = cls(**json.loads(path.read_text(encoding="utf-8")))
            if not (info.dim > 0 and info.period > 0 and set(info.keys.values()) <= {"speaker", "utterance"}):
                raise ValueError("values out of range")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: missing or damaged ({error}); {REMEDY}") from error
        return info


class IvectorReader:
    """The i-vectors of one set. Holds no open file."""

    def __init__(self, folder: Path, subset: str, speaker: Callable[[str], str]) -> None:
        """speaker: of an utterance. InputError where files are missing or damaged."""
        info = IvectorInfo.load(folder)
        if subset not in info.keys:
            raise InputError(f"{folder / INFO}: has no set {subset!r}, only {sorted(info.keys)}; {REMEDY}")
        self.dim, self.period, self._speaker, self._by = info.dim, info.period, speaker, info.keys[subset]
        self._scp = folder / f"{subset}_ivectors.scp"
        self._locations = read_scp(self._scp, REMEDY)

    def key(self, utterance: str) -> str:
        """What the i-vectors of an utterance are stored under: its own id, or its speaker's."""
        return self._speaker(utterance) if self._by == "speaker" else utterance

    def __getitem__(self, utterance: str) -> np.ndarray:
        """float32 [K, S], a row for each `period` frames. InputError, naming the speaker, where there is none."""
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
        """float32 [T, S]: the i-vector of each frame's segment."""
        rows_KS = self[utterance]
        return rows_KS[segment(np.arange(num_frames), self.period, len(rows_KS))]


def segment(frame: np.ndarray, period: int, count: np.ndarray | int) -> np.ndarray:
    """Which of an utterance's `count` rows is for a frame; the last is for all that follow."""
    return np.minimum(frame // period, count - 1)
