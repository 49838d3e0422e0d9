"""Feature kinds: how samples become static features, and how these are normalised and extended when they are read.

A kind is a dataclass of options, which compute the features. A configuration has one for each name in features.kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asr_am.data.textfile import load_json
from asr_am.errors import InputError
from asr_am.extensions import find_class
from asr_am.options import build

DEFAULT = "asr_am.features.spectral.SpectralOptions"
FRAME_LENGTH = 0.025  # seconds
FRAME_SHIFT = 0.01
REMEDY = "run stage 2 (features) again"


@dataclass(frozen=True)
class FeatureKind(ABC):
    """Base class of the options of a kind. A subclass is a frozen dataclass of plain values.

    Attributes:
        sampling_rate: in Hz.
        resample: resample audio of another rate, instead of raising an error.
        deltas: models take deltas and double deltas, too.
    """

    sampling_rate: int
    resample: bool = field(default=False, kw_only=True)
    deltas: bool = field(default=True, kw_only=True)

    @property
    @abstractmethod
    def dim(self) -> int:
        """Features per frame, D."""

    @abstractmethod
    def extractor(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns what computes features, float32 [T, D], of float32 samples [N] on a 16-bit scale.

        T is the number of `whole_frames`.
        """

    @property
    def normalises_variance(self) -> bool:
        """The variance of each feature of a speaker is normalised, and not only the mean."""
        return True

    @property
    def width(self) -> int:
        """Features per frame as models take them, F."""
        return 3 * self.dim if self.deltas else self.dim


def whole_frames(samples_N: np.ndarray, sampling_rate: int) -> np.ndarray:
    """Returns the frames of 25 ms every 10 ms that are whole (Kaldi's snip-edges), a view [T, W] of the samples."""
    width, shift = int(sampling_rate * FRAME_LENGTH), int(sampling_rate * FRAME_SHIFT)
    if len(samples_N) < width:
        return samples_N[:0].reshape(0, width)
    return np.lib.stride_tricks.sliding_window_view(samples_N, width)[::shift]


def feature_kind(where: str, _target_: str = DEFAULT, **options: Any) -> FeatureKind:
    """Returns the options of a kind, given the values of a configuration.

    Args:
        where: name of the section, for messages.
        _target_: full name of their class, in this package or an entry point `asr_am.features`.

    Raises:
        InputError: the class is no feature kind, or an option is unknown, of another type or out of range.
    """
    found = find_class(_target_, f"{where}._target_", "asr_am.features", FeatureKind, "asr_am.features")
    kind: FeatureKind = build(found, options, where)
    return kind


def read_kind(folder: Path) -> FeatureKind:
    """Returns how the features in `folder` (of one kind) were computed. Raises InputError if that is damaged."""
    path = folder / "options.json"
    try:
        values = load_json(path)
        values.pop("kind")
        return feature_kind("features", **values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InputError) as error:
        raise InputError(f"{path}: missing or damaged ({error}); {REMEDY}") from error
