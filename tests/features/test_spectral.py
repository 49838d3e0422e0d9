"""Log-mel and MFCC compared with torchaudio.compliance.kaldi, and with the definitions in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchaudio.compliance.kaldi as torchaudio_kaldi
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_am.errors import InputError
from asr_am.features.spectral import SpectralExtractor, SpectralOptions

TOLERANCE = 1e-3
KINDS = [(40, None), (23, 13), (80, None), (40, 40)]


def speech(num_samples: int, rate: int, seed: int, level: float = 3000.0) -> np.ndarray:
    """Synthesises gliding harmonics with slow amplitude modulation over weak noise, rounded to 16-bit integers."""
    random = np.random.default_rng(seed)
    time = np.arange(num_samples) / rate
    pitch = random.uniform(90, 250) * (1 + 0.1 * np.sin(2 * np.pi * time))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(k * phase) / k for k in range(1, 20)) * np.sin(np.pi * time * 3) ** 2
    return np.rint(level * voice + 20 * random.standard_normal(num_samples)).clip(-32768, 32767).astype(np.float32)


def by_torchaudio(
    samples: np.ndarray, rate: int, num_bins: int, num_ceps: int | None, low: float, high: float
) -> np.ndarray:
    options: dict[str, Any] = {
        "sample_frequency": rate,
        "dither": 0.0,
        "num_mel_bins": num_bins,
        "low_freq": low,
        "high_freq": high,
    }
    waveform = torch.from_numpy(samples)[None]
    if num_ceps is None:
        return torchaudio_kaldi.fbank(waveform, **options).numpy()
    return torchaudio_kaldi.mfcc(waveform, num_ceps=num_ceps, **options).numpy()


def by_definition(samples: np.ndarray, rate: int, num_bins: int, num_ceps: int | None) -> np.ndarray:
    """Computes features bin by bin as the HTK book and Kaldi's feature-window.cc, mel-computations.cc define them."""
    width, shift = rate // 40, rate // 100
    fft_size = 2 ** math.ceil(math.log2(width))
    rows = []
    for begin in range(0, len(samples) - width + 1, shift):
        frame = samples[begin : begin + width].astype(np.float64)
        frame = frame - frame.sum() / width
        emphasised = [frame[0] - 0.97 * frame[0]] + [frame[i] - 0.97 * frame[i - 1] for i in range(1, width)]
        window = [(0.5 - 0.5 * math.cos(2 * math.pi * i / (width - 1))) ** 0.85 for i in range(width)]
        power = np.abs(np.fft.fft(np.multiply(emphasised, window), fft_size)) ** 2
        energies = [mel_energy(power, rate, fft_size, num_bins, index) for index in range(num_bins)]
        log_mel = [math.log(max(energy, 2.0**-23)) for energy in energies]
        rows.append(log_mel if num_ceps is None else [cepstrum(log_mel, index) for index in range(num_ceps)])
    return np.array(rows)


def mel(frequency: float) -> float:
    return 1127.0 * math.log(1.0 + frequency / 700.0)


def mel_energy(power: np.ndarray, rate: int, fft_size: int, num_bins: int, index: int) -> float:
    step = (mel(rate / 2) - mel(20.0)) / (num_bins + 1)
    left, centre, right = (mel(20.0) + (index + offset) * step for offset in range(3))
    total = 0.0
    for k in range(fft_size // 2):
        position = mel(k * rate / fft_size)
        if left < position < right:
            total += power[k] * (
                (position - left) / (centre - left) if position <= centre else (right - position) / (right - centre)
            )
    return total


def cepstrum(log_mel: list[float], index: int) -> float:
    size = len(log_mel)
    norm = math.sqrt((1.0 if index == 0 else 2.0) / size)
    value = norm * sum(log_mel[m] * math.cos(math.pi * index * (m + 0.5) / size) for m in range(size))
    return value * (1.0 + 11.0 * math.sin(math.pi * index / 22.0))


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize(("num_bins", "num_ceps"), KINDS)
def test_equals_torchaudio(rate: int, num_bins: int, num_ceps: int | None) -> None:
    samples = speech(rate * 3, rate, seed=rate + num_bins)
    ours = SpectralExtractor(SpectralOptions(rate, num_bins, num_ceps))(samples)
    np.testing.assert_allclose(
        ours, by_torchaudio(samples, rate, num_bins, num_ceps, 20.0, 0.0), rtol=0, atol=TOLERANCE
    )
    assert ours.dtype == np.float32


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize(("num_bins", "num_ceps"), KINDS[:2])
def test_equals_the_definition(rate: int, num_bins: int, num_ceps: int | None) -> None:
    samples = speech(rate // 4, rate, seed=1)
    ours = SpectralExtractor(SpectralOptions(rate, num_bins, num_ceps))(samples)
    np.testing.assert_allclose(ours, by_definition(samples, rate, num_bins, num_ceps), rtol=0, atol=TOLERANCE)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    num_samples=st.integers(0, 30000),
    rate=st.sampled_from([8000, 11025, 16000, 44100]),
    level=st.floats(0.0, 30000.0),
    kind=st.sampled_from(KINDS[:2]),
    band=st.sampled_from([(20.0, 0.0), (100.0, 3700.0), (0.0, -300.0)]),
)
def test_equals_torchaudio_for_any_length_rate_level_and_band(
    seed: int, num_samples: int, rate: int, level: float, kind: tuple[int, int | None], band: tuple[float, float]
) -> None:
    samples = speech(num_samples, rate, seed, level)
    extractor = SpectralExtractor(SpectralOptions(rate, *kind, *band))
    ours = extractor(samples)
    if num_samples < extractor.width:
        assert ours.shape == (0, extractor.options.dim)
    else:
        np.testing.assert_allclose(ours, by_torchaudio(samples, rate, *kind, *band), rtol=0, atol=TOLERANCE)


def test_constant_samples_give_the_energy_floor() -> None:
    extractor = SpectralExtractor(SpectralOptions(8000, 40))
    np.testing.assert_allclose(extractor(np.full(8000, 1234.0, np.float32)), math.log(2.0**-23), rtol=1e-6)


@pytest.mark.parametrize(("num_samples", "frames"), [(0, 0), (199, 0), (200, 1), (279, 1), (280, 2), (8000, 98)])
def test_only_whole_frames_are_used(num_samples: int, frames: int) -> None:
    extractor = SpectralExtractor(SpectralOptions(8000, 40))
    assert extractor(np.ones(num_samples, np.float32)).shape == (frames, 40)


@pytest.mark.parametrize(
    "options",
    [
        {"num_bins": 40, "high_freq": 5000.0},
        {"num_bins": 40, "frame_shift": 0.02},
        {"num_bins": 40, "low_freq": -1.0},
        {"num_bins": 40, "low_freq": 4000.0},
        {"num_bins": 13, "num_ceps": 14},
        {"num_bins": 2},
        {"num_bins": 200},
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="features: "):
        SpectralExtractor(SpectralOptions(8000, **options))
