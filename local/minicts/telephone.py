"""Simulates the telephone: room, background, handset and line. One `Line` per conversation side.

Shapes: T samples at 8 kHz. All signals are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import firwin2, oaconvolve

from local.minicts.conditions import SAMPLING_RATE, Condition

_TAPS = 255
_BABBLE_VOICES = 5
_PEAK = 0.9
_CROSSTALK_DELAY = 8  # samples
_HUM_HARMONICS = np.array([2, 4, 6, 8, 12, 16])


@dataclass(frozen=True)
class Line:
    """Acoustic conditions of one side of a call."""

    room: np.ndarray  # impulse response
    filter: np.ndarray  # handset and line, FIR
    background: str  # babble, pink or hum
    snr_db: float
    drive: float
    level_dbfs: float
    crosstalk_db: float
    line_noise_dbfs: float


def draw_line(condition: Condition, rng: np.random.Generator) -> Line:
    return Line(
        room=_draw_room(condition, rng),
        filter=_draw_filter(condition, rng),
        background=("babble", "pink", "hum")[rng.choice(3, p=[0.4, 0.4, 0.2])],
        snr_db=rng.uniform(*condition.snr_db),
        drive=rng.uniform(*condition.drive),
        level_dbfs=rng.uniform(*condition.level_dbfs),
        crosstalk_db=rng.uniform(*condition.crosstalk_db),
        line_noise_dbfs=rng.uniform(*condition.line_noise_dbfs),
    )


def transmit(speech_T: np.ndarray, line: Line, babble: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns one side as heard at the far end, at the line's level. `babble` is other people's speech."""
    level = _active_level(speech_T)
    signal = oaconvolve(speech_T, line.room)[: len(speech_T)]
    noise = _background(line.background, len(signal), babble, rng)
    signal = signal + noise * level * 10 ** (-line.snr_db / 20)
    signal = _handset(signal / (4 * level), line.drive)
    signal = oaconvolve(signal, line.filter, mode="same")
    signal *= 10 ** (line.level_dbfs / 20) / _active_level(signal)
    return signal + 10 ** (line.line_noise_dbfs / 20) * rng.standard_normal(len(signal))


def mix(sides_2T: np.ndarray, lines: tuple[Line, Line]) -> np.ndarray:
    """Adds cross-talk to both channels and scales them down if they would clip."""
    gain_21 = np.array([[10 ** (line.crosstalk_db / 20)] for line in lines])
    mixed_2T = sides_2T + gain_21 * np.roll(sides_2T[::-1], _CROSSTALK_DELAY, axis=1)
    return mixed_2T * np.minimum(1.0, _PEAK / np.abs(mixed_2T).max(axis=1, keepdims=True))


def babble_from(utterances: list[np.ndarray], seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Returns several voices at once, made of a call's own utterances played backwards from random places."""
    length = int(seconds * SAMPLING_RATE)
    track = np.concatenate(utterances)[::-1]
    return np.sum([np.resize(np.roll(track, rng.integers(len(track))), length) for _ in range(_BABBLE_VOICES)], axis=0)


def _active_level(signal: np.ndarray) -> float:
    """Returns the root mean square over the 20 ms blocks within 30 dB of the loudest one."""
    block = SAMPLING_RATE // 50
    power = np.square(signal[: len(signal) // block * block]).reshape(-1, block).mean(axis=1)
    return float(np.sqrt(power[power > power.max() / 1000].mean()))


def _draw_room(condition: Condition, rng: np.random.Generator) -> np.ndarray:
    """Draws a direct path and a tail of decaying noise."""
    decay = rng.uniform(*condition.reverberation_s)
    time = np.arange(int(decay * SAMPLING_RATE)) / SAMPLING_RATE
    tail = rng.standard_normal(len(time)) * 10 ** (-3 * time / decay)
    tail[: int(0.002 * SAMPLING_RATE)] = 0
    tail *= 10 ** (-rng.uniform(*condition.direct_to_reverberant_db) / 20) / np.sqrt(np.square(tail).sum())
    tail[0] = 1
    return tail


def _draw_filter(condition: Condition, rng: np.random.Generator) -> np.ndarray:
    """Draws the telephone band with a random tilt and ripple, linear phase."""
    low, high = rng.uniform(*condition.low_edge_hz), rng.uniform(*condition.high_edge_hz)
    inner = np.geomspace(low, high, 12)
    tilt_db = rng.uniform(*condition.tilt_db_per_octave) * np.log2(inner / 1000)
    gain_db = np.clip(tilt_db + condition.ripple_db * rng.uniform(-1, 1, len(inner)), -20, 12)
    hertz = np.concatenate([[0, 0.6 * low], inner, [min(1.1 * high, 3950), SAMPLING_RATE / 2]])
    gain = np.concatenate([[0, 0.03], 10 ** (gain_db / 20), [0.02, 0]])
    return firwin2(_TAPS, hertz, gain, fs=SAMPLING_RATE)


def _background(kind: str, length: int, babble: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns noise of unit power."""
    if kind == "babble":
        noise = np.resize(babble, length)
    elif kind == "pink":
        spectrum = np.fft.rfft(rng.standard_normal(1 << 16))
        spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 20))
        noise = np.resize(np.fft.irfft(spectrum), length)
    else:
        phase_T = 2 * np.pi * rng.choice([50.0, 60.0]) * np.arange(length) / SAMPLING_RATE
        noise = 0.3 * rng.standard_normal(length)
        for harmonic in _HUM_HARMONICS:
            noise += rng.uniform(0.2, 1) / harmonic * np.sin(harmonic * phase_T + rng.uniform(0, 2 * np.pi))
    return noise / np.sqrt(np.square(noise).mean())


def _handset(signal: np.ndarray, drive: float) -> np.ndarray:
    """Applies the asymmetric soft clipping of a carbon microphone, linear at drive 0, to signals of unit size."""
    if drive == 0:
        return signal
    return np.tanh(drive * signal + 0.2 * drive * np.square(np.tanh(signal))) / drive
