"""espeak-ng (speech synthesis, GPL 3) through the shared library of the `espeakng-loader` wheel.

espeak keeps oscillator phases and its random state in static variables, so its output depends on what it spoke before.
An `Espeak` therefore loads a fresh copy of the library and unloads it at the end: the same calls on a new `Espeak` give
the same samples in any process. One may be open per process at a time.
"""

from __future__ import annotations

import _ctypes
import ctypes
import re
from typing import ClassVar

import numpy as np

from asr_am.errors import InputError

RATE = 22050  # Hz, of all formant voices

_SYNCHRONOUS, _NO_EXIT = 2, 0x8000  # espeak_AUDIO_OUTPUT, espeakINITIALIZE_DONT_EXIT
_UTF8, _PHONEMES = 1, 0x100  # espeakCHARS_UTF8, espeakPHONEMES: [[...]] in a text is spoken as phonemes
_SPEED, _PITCH, _PITCH_RANGE = 1, 3, 4  # espeak_PARAMETER
_IPA = 2  # bit of the phoneme mode; bits 8-23 are the separator
_SEPARATOR = "_"
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def require_espeak() -> None:
    """Raises InputError unless the wheel with espeak-ng is installed."""
    try:
        import espeakng_loader  # noqa: F401
    except ImportError as error:
        raise InputError(
            "minicts: needs espeak-ng, whose wheel espeakng-loader (GPL 3, hence optional) is not "
            "installed; run: pip install '.[minicts]'"
        ) from error


class Espeak:
    """A loaded espeak-ng. Use as a context manager. Raises InputError if the wheel is missing or does not start."""

    _open: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        require_espeak()
        import espeakng_loader

        if Espeak._open:
            raise RuntimeError("another Espeak is open in this process")
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._declare()
        voices = str(espeakng_loader.get_data_path())
        rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, voices.encode(), _NO_EXIT)
        if rate != RATE:
            raise InputError(f"{voices}: espeak-ng does not start with it (code {rate}); reinstall espeakng-loader")
        Espeak._open = True
        self._chunks: list[bytes] = []
        self._callback = _Callback(self._receive)  # keep a reference, or it is garbage collected
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_ng_SetRandSeed(seed & 0x7FFFFFFF)
        ctypes.CDLL(None).srand(seed & 0x7FFFFFFF)  # breath noise and flutter come from rand()

    def __enter__(self) -> Espeak:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._library.espeak_Terminate()
        _ctypes.dlclose(self._library._handle)
        Espeak._open = False

    def set_voice(self, accent: str, variant: str = "") -> None:
        """Chooses an accent (file of espeak's lang/gmw, e.g. "en-US") and a voice variant (file of voices/!v)."""
        name = f"gmw/{accent}+{variant}" if variant else f"gmw/{accent}"
        if self._library.espeak_SetVoiceByName(name.encode()) != 0:
            raise InputError(f"espeak-ng has no voice {name!r}; install the pinned version of espeakng-loader")

    def speak(self, text: str, *, words_per_minute: float, pitch: float, pitch_range: float) -> np.ndarray:
        """Returns int16 samples [T] at RATE. `text` may contain phonemes in espeak's ASCII names as [[w'ED@]]."""
        for parameter, value in ((_SPEED, words_per_minute), (_PITCH, pitch), (_PITCH_RANGE, pitch_range)):
            self._library.espeak_SetParameter(parameter, round(value), 0)
        self._chunks.clear()
        encoded = text.encode()
        self._library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _UTF8 | _PHONEMES, None, None)
        return np.frombuffer(b"".join(self._chunks), np.int16)

    def ipa(self, text: str) -> list[list[str]]:
        """Returns the phonemes of `text` in IPA without stress marks, one list per spoken group (usually a word)."""
        groups = [re.sub("[ˈˌ]", "", group) for group in self._phonemes(text, _IPA).split()]
        return [[phone for phone in group.split(_SEPARATOR) if phone] for group in groups]

    def ascii_phonemes(self, word: str) -> list[str]:
        """Returns the phonemes of one word in espeak's ASCII names with stress. They can be spoken as [[a|b|c]]."""
        return [phone for phone in self._phonemes(word, 0).split(_SEPARATOR) if phone]

    def _phonemes(self, text: str, mode: int) -> str:
        rest = ctypes.c_char_p(text.encode())
        mode |= ord(_SEPARATOR) << 8
        clauses = []
        while rest.value:  # one clause per call
            clauses.append(self._library.espeak_TextToPhonemes(ctypes.byref(rest), _UTF8, mode).decode())
        return " ".join(clauses)

    def _receive(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _events: object) -> int:
        if samples and count:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0

    def _declare(self) -> None:
        text, number = ctypes.c_char_p, ctypes.c_uint
        self._library.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, text, ctypes.c_int]
        self._library.espeak_Synth.argtypes = [
            text, ctypes.c_size_t, number, ctypes.c_int, number, number, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._library.espeak_SetVoiceByName.argtypes = [text]
        self._library.espeak_ng_SetRandSeed.argtypes = [ctypes.c_long]
        self._library.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(text), ctypes.c_int, ctypes.c_int]
        self._library.espeak_TextToPhonemes.restype = text
