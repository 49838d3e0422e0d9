"""What decides the i-vectors of a corpus, and whether it has enough speech for their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asr_am.errors import InputError

FRAMES_PER_GAUSSIAN, UTTERANCES_PER_DIMENSION = 400, 2  # below which sizes are refused


@dataclass(frozen=True)
class IvectorOptions:
    """gaussians: of the UBM. dim: of an i-vector. period: frames of a segment. The rest: see conf/ivectors."""

    gaussians: int
    dim: int
    normalise: bool = False
    ubm_iterations: int = 12
    ubm_frames: int = 500_000
    iterations: int = 10
    posterior_scale: float = 0.1
    max_count: float = 100.0
    period: int = 300
    online: Sequence[str] = ("train",)
    online_utterances: int = 4
    seed: int = 1

    def __post_init__(self) -> None:
        """InputError where a value is out of range."""
        sizes = ("gaussians", "dim", "ubm_iterations", "ubm_frames", "iterations", "period")
        if wrong := [name for name in sizes if getattr(self, name) < 1]:
            raise InputError(f"ivectors.{wrong[0]}={getattr(self, wrong[0])}: must be at least 1")
        if not 0 < self.posterior_scale <= 1 or self.max_count < 0 or self.online_utterances < 0:
            raise InputError(
                "ivectors: posterior_scale must be above 0 and at most 1, max_count and online_utterances not negative"
            )

    def check_enough(self, frames: int, utterances: int) -> None:
        """InputError where a UBM or an extractor of this size would have next to nothing to learn from."""
        gaussians, dim = frames // FRAMES_PER_GAUSSIAN, utterances // UTTERANCES_PER_DIMENSION
        if self.gaussians > gaussians:
            raise InputError(
                f"ivectors.gaussians={self.gaussians}: {frames} frames of training speech are enough for {gaussians} "
                f"Gaussians; choose ivectors.gaussians={gaussians} or fewer, or add speech"
            )
        if self.dim > dim:
            raise InputError(
                f"ivectors.dim={self.dim}: {utterances} training utterances are enough for {dim} dimensions; choose "
                f"ivectors.dim={dim} or less, or add speech"
            )
