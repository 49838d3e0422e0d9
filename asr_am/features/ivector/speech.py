"""The frames that i-vectors are estimated from: MFCCs with deltas and double deltas of one set.

Shapes: N or T frames, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from asr_am.features.cmvn_deltas import add_deltas
from asr_am.features.reader import FeatureReader

BASE = "mfcc"


@dataclass(frozen=True)
class Speech:
    """Frames of one set. Holds plain values only, so that it can be sent to a worker process.

    Attributes:
        normalise: subtract the cepstral mean of each speaker. The mean distinguishes speakers and channels, which the
            other inputs of a network do not.
        device: torch device of the frames.
    """

    features_dir: Path
    subset: str
    normalise: bool
    device: str = "cpu"

    @cached_property
    def reader(self) -> FeatureReader:
        return FeatureReader(self.features_dir, BASE, self.subset)

    def frames(self, utterance: str) -> Tensor:
        """Returns the frames of an utterance, float32 [T, D]."""
        static = self.reader.static(utterance) if self.normalise else self.reader.raw(utterance)
        return torch.from_numpy(add_deltas(static)).to(self.device)

    def by_speaker(self) -> dict[str, list[str]]:
        """Returns the utterances of each speaker, both sorted."""
        speakers: dict[str, list[str]] = {}
        for utterance in self.reader.utterances:
            speakers.setdefault(self.reader.speaker(utterance), []).append(utterance)
        return dict(sorted(speakers.items()))

    def sample(self, limit: int) -> Tensor:
        """Returns at most `limit` evenly spaced frames of the whole set, [N, D]."""
        step, first, taken = -(-self.reader.num_frames // limit), 0, []
        for utterance in self.reader.utterances:
            x_TD = self.frames(utterance)
            taken.append(x_TD[first::step].clone())
            first = (first - len(x_TD)) % step
        return torch.cat(taken)
