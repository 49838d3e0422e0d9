"""Features as models take them: static features from disk with per-speaker CMVN and deltas.

Shapes: T frames, D static features, F = 3 D (F = D for a kind without deltas).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asr_am.data.kaldi_archive import read_scp
from asr_am.data.textfile import read_lines
from asr_am.errors import InputError
from asr_am.features.cmvn_deltas import add_deltas, normalise
from asr_am.features.feature_archive import load_matrix
from asr_am.features.kinds import REMEDY, read_kind


class FeatureReader:
    """Features of one set by utterance id. Holds no open file, so it can be pickled and used after a fork.

    Attributes:
        deltas: deltas are appended.
        dim: F.
        variance: the variance is normalised.
        utterances: utterance ids, sorted.
    """

    def __init__(self, features_dir: Path, kind: str, subset: str, *, variance: bool | None = None) -> None:
        """Raises InputError if the files of `subset` are missing or inconsistent."""
        folder = features_dir / kind
        made = read_kind(folder)
        self.deltas, self.dim = made.deltas, made.width
        self.variance = made.normalises_variance if variance is None else variance
        self._locations = read_scp(folder / f"{subset}.scp", REMEDY)
        self._speakers = _read_utt2spk(folder / f"{subset}_utt2spk")
        cmvn_scp = folder / f"{subset}_cmvn.scp"
        self._stats = {
            speaker: load_matrix(location, REMEDY) for speaker, location in read_scp(cmvn_scp, REMEDY).items()
        }
        self.utterances = sorted(self._locations)
        if self._locations.keys() != self._speakers.keys():
            raise InputError(f"{folder}: {subset}.scp and {subset}_utt2spk list different utterances; {REMEDY}")
        if missing := set(self._speakers.values()) - self._stats.keys():
            raise InputError(f"{cmvn_scp}: no statistics for speaker {min(missing)}; {REMEDY}")

    def speaker(self, utterance: str) -> str:
        """Returns the speaker of `utterance`."""
        return self._speakers[utterance]

    @property
    def num_frames(self) -> int:
        """Frames of all utterances."""
        return int(sum(stats[0, -1] for stats in self._stats.values()))

    def __len__(self) -> int:
        return len(self.utterances)

    def __contains__(self, utterance: str) -> bool:
        return utterance in self._locations

    def __getitem__(self, utterance: str) -> np.ndarray:
        """Returns float32 [T, F]. Raises InputError for an unknown utterance or a damaged archive."""
        static_TD = self.static(utterance)
        return add_deltas(static_TD) if self.deltas else static_TD

    def static(self, utterance: str) -> np.ndarray:
        """Returns normalised features without deltas, float32 [T, D]. Raises InputError as `__getitem__` does."""
        return normalise(self.raw(utterance), self._stats[self._speakers[utterance]], variance=self.variance)

    def raw(self, utterance: str) -> np.ndarray:
        """Returns features as they are on disk, float32 [T, D]. Raises InputError as `__getitem__` does."""
        stats = self._stats[self._speakers[utterance]] if utterance in self._locations else None
        if stats is None:
            raise InputError(f"utterance {utterance}: has no features (it may be too short); {REMEDY}")
        static_TD = load_matrix(self._locations[utterance], REMEDY)
        if static_TD.shape[1] + 1 != stats.shape[1]:
            raise InputError(
                f"{self._locations[utterance]}: has {static_TD.shape[1]} values per frame, CMVN statistics "
                f"{stats.shape[1] - 1}; {REMEDY}"
            )
        return static_TD


def _read_utt2spk(path: Path) -> dict[str, str]:
    speakers = {}
    for number, line in enumerate(read_lines(path, REMEDY), start=1):
        fields = line.split(" ")
        if len(fields) != 2:
            raise InputError(f"{path}:{number}: '{line}' is not `<utterance> <speaker>`; {REMEDY}")
        speakers[fields[0]] = fields[1]
    return speakers
