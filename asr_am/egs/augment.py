"""Data augmentation: masks in frequency and time (SpecAugment, Park et al., Interspeech 2019, without warping), and
noise on i-vectors.

Shapes: B chunks, T frames, F features, S dimensions of the i-vector, K draws of a chunk, M masks of a chunk. Features
with frequency bands are streams x bins, for example static, delta and double delta of the same bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from asr_am.egs.stateless_rng import combine, uniform_NK

NOISE = 1  # added to keys, so that noise and masks use different random numbers


@dataclass(frozen=True)
class Masking:
    """Amount of masking. The default masks nothing.

    Attributes:
        bands: Number of frequency masks of a chunk.
        band_width: Maximal width of a frequency mask, in bins.
        spans: Number of time masks of a chunk.
        span_width: Maximal width of a time mask, in frames.
        streams: Number of times that the bins repeat along a frame (static, delta and double delta: 3). A frequency
            mask covers the same bins in all of them.
    """

    bands: int = 0
    band_width: int = 0
    spans: int = 0
    span_width: int = 0
    streams: int = 3

    def __bool__(self) -> bool:
        return bool((self.bands and self.band_width) or (self.spans and self.span_width))


def mask_chunks(
    x_BTF: np.ndarray, key_B: np.ndarray, masking: Masking, fill_F: np.ndarray, bands: slice = slice(None)
) -> None:
    """Masks chunks in place.

    Args:
        key_B: Keys of the random numbers.
        fill_F: Values under masks, the mean of the features.
        bands: Columns of the frequency masks, a multiple of `masking.streams`. Time masks cover all columns.
    """
    _, frames, dim = x_BTF.shape
    bins = len(fill_F[bands]) // masking.streams
    draws = uniform_NK(key_B, 2 * (masking.bands + masking.spans))
    split = 2 * masking.bands
    band_BF = np.zeros((len(x_BTF), dim), dtype=bool)
    band_BF[:, bands] = np.tile(_mask(draws[:, :split], masking.band_width, bins), masking.streams)
    span_BT = _mask(draws[:, split:], masking.span_width, frames)
    np.copyto(x_BTF, fill_F, where=band_BF[:, None, :] | span_BT[:, :, None])


def draw_ivector_noise(key_B: np.ndarray, deviation_S: np.ndarray) -> np.ndarray:
    """Draws Gaussian noise with these standard deviations, float32 [B, S], one vector per chunk."""
    uniform_BS = uniform_NK(combine(key_B, NOISE), len(deviation_S)) + 2.0**-54  # inside (0, 1)
    return (ndtri(uniform_BS) * deviation_S).astype(np.float32)


def _mask(draws_BK: np.ndarray, width: int, size: int) -> np.ndarray:
    """Returns the union of M = K/2 intervals, bool [B, size]. Widths up to `width` and positions are uniform."""
    length_BM = np.floor(draws_BK[:, 0::2] * (min(width, size) + 1))
    start_BM = np.floor(draws_BK[:, 1::2] * (size - length_BM + 1))
    position = np.arange(size)
    inside_BMS = (position >= start_BM[..., None]) & (position < (start_BM + length_BM)[..., None])
    return inside_BMS.any(axis=1)
