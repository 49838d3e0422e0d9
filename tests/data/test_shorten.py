"""Shorten-compressed sphere files: every kind of block, mu-law and 16 bits, and damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_am.data.shorten import is_shortened, read_shortened
from asr_am.errors import InputError
from tests.support.sphere_files import MU_LAW, PCM, compress, mu_law, ranks, sphere_header, write_sphere

FUNCTIONS = {
    "differences": {},
    "prediction": {"functions": (7, 0, 1), "coefficients": (40, -12, 3)},
    "silence": {"functions": (8, 1)},
    "no means": {"means": 0, "block": 100},
}


def speech(frames: int, channels: int) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal((frames, channels))
    wave = np.sin(np.arange(frames) / 9)[:, None] * 6000 + 700 * noise + 150
    wave[300:1400] = 0
    return wave.astype(np.int16)


def write(path: Path, coding: str, values: np.ndarray, **options: object) -> Path:
    kind = MU_LAW if coding == "ulaw" else PCM
    header = sphere_header(*values.shape, f"{coding},embedded-shorten-v2.00")
    path.write_bytes(header + compress(values, kind, **options))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_those_that_were_compressed(tmp_path: Path, name: str, channels: int) -> None:
    x_NC = speech(3001, channels)
    found, rate = read_shortened(write(tmp_path / "a.sph", "pcm", x_NC.astype(np.int64), **FUNCTIONS[name]))
    assert rate == 8000 and np.array_equal(found, x_NC)
    plain, _ = soundfile.read(write_sphere(tmp_path / "plain.sph", x_NC), dtype="int16", always_2d=True)
    found, _ = read_shortened(write(tmp_path / "b.sph", "ulaw", ranks(mu_law(x_NC)), **FUNCTIONS[name]))
    assert np.array_equal(found, plain)


def test_missing_low_bits(tmp_path: Path) -> None:
    """A shift drops low bits of 16-bit samples, and codes of the first segments of mu-law."""
    x_NC = speech(900, 2).astype(np.int64) >> 3
    options = {"shift": 3, "functions": (0, 7, 2), "coefficients": (20, -5)}
    assert np.array_equal(read_shortened(write(tmp_path / "a.sph", "pcm", x_NC, **options))[0], x_NC << 3)
    ranks_NC = np.array([[0], [1], [2], [3], [4], [5], [-1], [-2], [9]])
    found, _ = read_shortened(write(tmp_path / "b.sph", "ulaw", ranks_NC, shift=5))
    codes = [255, 231, 219, 211, 205, 201, 255, 231 - 128, 188]  # both zeros are 255
    assert mu_law(found[:, 0]).tolist() == codes


def test_only_shortened_files_are(tmp_path: Path) -> None:
    assert is_shortened(write_sphere(tmp_path / "a.sph", speech(500, 1), shorten=True))
    assert not is_shortened(write_sphere(tmp_path / "b.sph", speech(500, 1)))
    (tmp_path / "c.sph").write_bytes(b"RIFF")
    assert not is_shortened(tmp_path / "c.sph")


def test_damage_is_one_line(tmp_path: Path) -> None:
    path = write_sphere(tmp_path / "a.sph", speech(2000, 2), shorten=True)
    whole = path.read_bytes()

    def refused(content: bytes, message: str) -> None:
        path.write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            read_shortened(path)
        assert "\n" not in str(caught.value) and "sph2pipe" in str(caught.value)

    refused(whole[:1500], "end too early")
    refused(whole.replace(b"count -i 2000", b"count -i 1999"), "another number of channels or samples")
    refused(whole.replace(b"channel_count -i 2", b"channel_count -i 1"), "another number of channels or samples")
    refused(whole.replace(b"sample_rate", b"simple_rate"), "no sample_rate")
    refused(whole.replace(b"ajkg\x02", b"ajkg\x01"), "not of version 2")
    refused(whole[:1029] + b"\xff" * 900, "neither mu-law|damaged|too early")


def test_any_damage_ends_in_an_error_or_samples(tmp_path: Path) -> None:
    path = write_sphere(tmp_path / "a.sph", speech(2000, 1), shorten=True)
    whole, rng = path.read_bytes(), np.random.default_rng(1)
    refused = 0
    for _ in range(100):
        content = bytearray(whole)
        content[int(rng.integers(1024, len(whole)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
        try:
            read_shortened(path)
        except InputError:
            refused += 1
    assert refused > 10
