"""Masking of bands and of stretches of time in a chunk (SpecAugment: Park et al., Interspeech 2019, without warping),
and noise on i-vectors.

Shapes: B chunks, T frames, F features, of which streams x bins are bands (static, delta, double delta of the same
bins), S dimensions of the i-vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from asr_am.egs.stateless_rng import combine, uniform_NK

NOISE = 1  # the draws for noise are not those for masks


@dataclass(frozen=True)
class Masking:
    """How much is masked: `count` masks, each of 0 to `width` bins or frames. No masks by default.

    streams: how often the bins repeat along a frame (static + delta + double delta = 3); a band is masked in all.
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
    """Put `fill_F` (the mean of the features) under masks drawn from `key_B`, in place.

    bands: the columns that bands are masked in, a multiple of streams. Stretches of time are masked in all columns.
    """
    _, frames, dim = x_BTF.shape
    bins = len(fill_F[bands]) // masking.streams
    draws = uniform_NK(key_B, 2 * (masking.bands + masking.spans))
    split = 2 * masking.bands
    band_BF = np.zeros((len(x_BTF), dim), dtype=bool)
    band_BF[:, bands] = np.tile(_mask(draws[:, :split], masking.band_width, bins), masking.streams)
    span_BT = _mask(draws[:, split:], masking.span_width, frames)
    np.copyto(x_BTF, fill_F, where=band_BF[:, None, :] | span_BT[:, :, None])


def vector_noise(key_B: np.ndarray, deviation_S: np.ndarray) -> np.ndarray:
    """float32 [B, S]: Gaussian noise of these standard deviations, drawn from `key_B`: one vector for each chunk."""
    uniform_BS = uniform_NK(combine(key_B, NOISE), len(deviation_S)) + 2.0**-54  # inside (0, 1)
    return (ndtri(uniform_BS) * deviation_S).astype(np.float32)


def _mask(draws_BK: np.ndarray, width: int, size: int) -> np.ndarray:
    """bool [B, size]: the union of K/2 intervals, each of a uniform width up to `width` at a uniform place."""
    length_BM = np.floor(draws_BK[:, 0::2] * (min(width, size) + 1))
    start_BM = np.floor(draws_BK[:, 1::2] * (size - length_BM + 1))
    place = np.arange(size)
    inside_BMS = (place >= start_BM[..., None]) & (place < (start_BM + length_BM)[..., None])
    return inside_BMS.any(axis=1)
