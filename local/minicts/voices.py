"""Synthetic speakers and the synthesis of their words as 8 kHz waveforms."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter, resample_poly

from local.minicts.conditions import SAMPLING_RATE, Condition
from local.minicts.espeak import RATE, Espeak
from local.minicts.text import FILLERS, LAUGHTER, VOCAL_NOISES, Style, Token

_VOWELS = "aeiouAEIOUV@03"  # first letters of espeak's vowel names
_PAUSE_AFTER_FILLER = 0.3


@dataclass(frozen=True)
class Speaker:
    """One person. `tract` > 1 means a shorter vocal tract: formants (and pitch) are higher by that factor."""

    id: str
    gender: str  # "F" or "M"
    accent: str
    variant: str
    words_per_minute: float
    pitch: float
    pitch_range: float
    tract: float
    style: Style


def draw_speaker(identity: str, condition: Condition, rng: np.random.Generator) -> Speaker:
    female = rng.random() < 0.5
    variants = condition.female_voices if female else condition.male_voices
    accents, weights = zip(*condition.accents.items(), strict=True)
    return Speaker(
        id=identity,
        gender="F" if female else "M",
        accent=accents[rng.choice(len(accents), p=weights)],
        variant=variants[rng.integers(len(variants))],
        words_per_minute=rng.uniform(*condition.words_per_minute),
        pitch=rng.uniform(*condition.pitch),
        pitch_range=rng.uniform(*condition.pitch_range),
        tract=rng.uniform(*condition.tract),
        style=Style(
            filler=rng.uniform(*condition.filler),
            repeat=rng.uniform(*condition.repeat),
            fragment=rng.uniform(*condition.fragment),
            vocal_noise=condition.vocal_noise,
        ),
    )


def say(tokens: list[Token], speaker: Speaker, espeak: Espeak, rng: np.random.Generator) -> np.ndarray:
    """Returns the utterance as float64 [T] at SAMPLING_RATE, trimmed, with a peak of at most 1."""
    espeak.set_voice(speaker.accent, speaker.variant)
    spoken = [token for token in tokens if token.word not in VOCAL_NOISES]
    pieces = []
    if spoken:
        samples = espeak.speak(
            spoken_text(spoken, espeak, rng),
            words_per_minute=speaker.words_per_minute * rng.uniform(0.92, 1.08) / speaker.tract,
            pitch=np.clip(speaker.pitch + rng.uniform(-5, 5), 0, 99),
            pitch_range=speaker.pitch_range,
        )
        pieces.append(_trim(_to_telephone_rate(samples / 32768, speaker.tract)))
    if tokens[0].word in VOCAL_NOISES:
        pieces.insert(0, vocal_noise(tokens[0].word, speaker, rng))
    elif tokens[-1].word in VOCAL_NOISES:
        pieces.append(vocal_noise(tokens[-1].word, speaker, rng))
    return np.concatenate(pieces)


def spoken_text(tokens: list[Token], espeak: Espeak, rng: np.random.Generator) -> str:
    """Returns the text for espeak: lower case, a pause after some hesitations, fragments as phonemes."""
    parts = []
    for token in tokens:
        if token.cut_from:
            parts.append(f"[[{'|'.join(_first_syllable(espeak.ascii_phonemes(token.cut_from.lower())))}]]")
        else:
            parts.append(token.word.lower())
        if (token.cut_from or token.word in FILLERS) and rng.random() < _PAUSE_AFTER_FILLER:
            parts[-1] += ","
    return " ".join(parts) + rng.choice([".", ".", "?", ","])


def _first_syllable(phonemes: list[str]) -> list[str]:
    """Returns the phonemes up to the first vowel, which are heard of a word that is cut off there."""
    for count, phoneme in enumerate(phonemes, 1):
        if re.match(rf"[',%=]*[{_VOWELS}]", phoneme):
            return phonemes[:count]
    return phonemes


def _to_telephone_rate(samples: np.ndarray, tract: float) -> np.ndarray:
    """Resamples from espeak's rate and speeds up by the factor `tract`."""
    return resample_poly(samples, SAMPLING_RATE // 50, round(RATE * tract) // 50)


def _trim(samples: np.ndarray, threshold: float = 0.01, margin_s: float = 0.02) -> np.ndarray:
    """Cuts the silence at both ends. Raises ValueError if there is nothing else."""
    loud = np.flatnonzero(np.abs(samples) > threshold * max(np.abs(samples).max(initial=0.0), 1e-3))
    if not len(loud):
        raise ValueError("espeak-ng gave silence")
    margin = int(margin_s * SAMPLING_RATE)
    return samples[max(loud[0] - margin, 0) : loud[-1] + 1 + margin]


def vocal_noise(word: str, speaker: Speaker, rng: np.random.Generator) -> np.ndarray:
    """Returns laughter (breathy, half voiced pulses through two formants) or noise (a breath or a rustle)."""
    seconds = rng.uniform(0.4, 1.0) if word == LAUGHTER else rng.uniform(0.25, 0.6)
    time = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    source = rng.standard_normal(len(time))
    if word == LAUGHTER:
        pitch = (260 if speaker.gender == "F" else 150) * (1 - 0.3 * time / seconds)
        voiced = np.maximum(np.sin(2 * np.pi * np.cumsum(pitch) / SAMPLING_RATE), 0) ** 4
        source = (0.4 * source + 3 * voiced) * np.maximum(np.sin(2 * np.pi * rng.uniform(4, 5.5) * time), 0.02)
        formants = (rng.uniform(600, 800), rng.uniform(1100, 1500))
    else:
        source *= np.sin(np.pi * time / seconds) ** rng.uniform(0.5, 3)
        formants = (rng.uniform(400, 1200), rng.uniform(1500, 3000))
    sound = sum(_resonator(source, formant * speaker.tract) for formant in formants)
    return rng.uniform(0.15, 0.4) * sound / np.abs(sound).max()


def _resonator(source: np.ndarray, hertz: float, bandwidth: float = 150.0) -> np.ndarray:
    radius = np.exp(-np.pi * bandwidth / SAMPLING_RATE)
    return lfilter([1 - radius], [1, -2 * radius * np.cos(2 * np.pi * hertz / SAMPLING_RATE), radius**2], source)
