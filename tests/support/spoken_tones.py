"""Generated telephone speech that can be recognised: every phone is a pair of tones, every speaker has a pitch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

RATE = 8000
PHONE_SECONDS = 0.09


class Voice:
    """A speaker.

    Args:
        pronunciations: phones of each word.
        seed: of pitch and noise.
    """

    def __init__(self, pronunciations: Mapping[str, str], seed: int) -> None:
        names = sorted({phone for phones in pronunciations.values() for phone in phones.split()})
        self.words = {word: phones.split() for word, phones in pronunciations.items()}
        self.rng = np.random.default_rng(seed)
        pitch = self.rng.uniform(0.96, 1.04)
        self.tones = {p: (pitch * (260 + 110 * (i % 6)), pitch * (1100 + 330 * (i // 6))) for i, p in enumerate(names)}

    def say(self, words: Sequence[str], seconds: float | None = None) -> np.ndarray:
        """Returns int16 [N] of the words, with a short silence before and after.

        Args:
            words: what to say. Words without a pronunciation are bursts of noise.
            seconds: length, without silence before and after. None: as long as the phones take.
        """
        phones = [phone for word in words for phone in self.words.get(word, [None])]
        durations_P = PHONE_SECONDS * self.rng.uniform(0.8, 1.25, len(phones))
        if seconds is not None:
            durations_P *= seconds / durations_P.sum()
        silence = [] if seconds is not None else [np.zeros(RATE // 8)]
        parts = [self._sound(phone, duration) for phone, duration in zip(phones, durations_P, strict=True)]
        speech_N = np.concatenate([*silence, *parts, *silence])
        return (speech_N + self.rng.normal(0, 60, len(speech_N))).astype(np.int16)

    def _sound(self, phone: str | None, seconds: float) -> np.ndarray:
        t = np.arange(round(seconds * RATE)) / RATE
        if phone is None:
            wave = self.rng.normal(0, 0.5, len(t))
        else:
            low, high = self.tones[phone]
            wave = np.sin(2 * np.pi * low * t) + 0.7 * np.sin(2 * np.pi * high * t)
        return 2500 * wave * np.sin(np.pi * np.linspace(0.1, 0.9, len(t)))
