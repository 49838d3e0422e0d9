"""Sphere files as on LDC's discs: mu-law or 16-bit samples, as they are or compressed by shorten."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

MU_LAW, PCM = 8, 5


def sphere_header(frames: int, channels: int, coding: str, rate: int = 8000, **fields: str) -> bytes:
    """Returns a header of 1024 bytes. `coding`: pcm or ulaw, with `,embedded-shorten-v2.00` if it is compressed."""
    width = 1 if coding.startswith("ulaw") else 2
    lines = [
        "NIST_1A", "   1024", f"sample_count -i {frames}", f"sample_rate -i {rate}", f"channel_count -i {channels}",
        f"sample_n_bytes -i {width}", f"sample_coding -s{len(coding)} {coding}",
        *([] if width == 1 else ["sample_byte_format -s2 01"]),
        *(f"{name} -s{len(value)} {value}" for name, value in fields.items()), "end_head", "",
    ]  # fmt: skip
    return "\n".join(lines).encode().ljust(1024)


def mu_law(samples: np.ndarray) -> np.ndarray:
    """Returns the mu-law codes (ITU-T G.711) of 16-bit samples, uint8."""
    size = np.minimum(np.abs(samples.astype(np.int64)), 32635) + 132
    segment = np.floor(np.log2(size)).astype(int) - 7
    code = (segment << 4) | ((size >> (segment + 3)) & 15)
    return (~(code | np.where(samples < 0, 0x80, 0))).astype(np.uint8)


def write_sphere(path: Path, samples_NC: np.ndarray, *, ulaw: bool = True, shorten: bool = False) -> Path:
    """Writes int16 samples [N, C]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames, channels = samples_NC.shape
    coding = ("ulaw" if ulaw else "pcm") + (",embedded-shorten-v2.00" if shorten else "")
    if shorten:
        values = ranks(mu_law(samples_NC)) if ulaw else samples_NC.astype(np.int64)
        data = compress(values, MU_LAW if ulaw else PCM)
    else:
        data = (mu_law(samples_NC) if ulaw else samples_NC.astype("<i2")).tobytes()
    path.write_bytes(sphere_header(frames, channels, coding) + data)
    return path


def ranks(code: np.ndarray) -> np.ndarray:
    """Returns the ranks of mu-law codes in the order of their amplitudes: 0xff is 0, 0x7f (minus zero) is -1."""
    code = code.astype(np.int64)
    return np.where(code >= 128, 255 - code, code - 128)


class Bits:
    """A stream of bits, most significant first."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rice(self, value: int, bits: int) -> None:
        """Writes an unsigned Rice code."""
        low = format(value & ((1 << bits) - 1), f"0{bits}b") if bits else ""
        self.parts.append("0" * (value >> bits) + "1" + low)

    def signed(self, value: int, bits: int) -> None:
        self.rice(2 * value if value >= 0 else -2 * value - 1, bits)

    def long(self, value: int) -> None:
        bits = value.bit_length()
        self.rice(bits, 2)
        self.rice(value, bits)

    def bytes(self) -> bytes:
        text = "".join(self.parts)
        text += "0" * (-len(text) % 32)
        return int(text, 2).to_bytes(len(text) // 8, "big")


def compress(
    values_NC: np.ndarray, kind: int, *, block: int = 256, means: int = 4, functions: Sequence[int] = (1, 2, 0, 3),
    coefficients: Sequence[int] = (), shift: int = 0,
) -> bytes:  # fmt: skip
    """Compresses values, which `shift` bits are still missing from, with one function per block in turn.

    Functions are 0 to 3 (differences of that order), 7 (linear prediction) and 8 (a block of zeros).
    """
    bits = Bits()
    frames, channels = values_NC.shape
    for number in (kind, channels, block, len(coefficients), means, 0):
        bits.long(number)
    if shift:
        bits.rice(6, 2)
        bits.rice(shift, 2)
    past = max(3, len(coefficients))
    history = np.zeros((channels, past), np.int64)
    offsets = np.zeros((channels, max(means, 1)), np.int64)
    turn, size = 0, block
    for begin in range(0, frames, block):
        if frames - begin < size:
            size = frames - begin
            bits.rice(5, 2)
            bits.long(size)
        for channel in range(channels):
            samples = values_NC[begin : begin + size, channel]
            mean = _truncated(int(offsets[channel].sum()) + means // 2, means) if means else 0
            mean = (mean >> (shift - 1)) >> 1 if shift else mean
            function = functions[turn % len(functions)]
            _write_block(bits, function, samples, history[channel], mean, coefficients)
            total = _truncated(int(samples.sum()) + size // 2, size) << shift
            offsets[channel] = np.append(offsets[channel][1:], total)
            history[channel] = np.append(history[channel], samples)[-past:]
            turn += 1
    bits.rice(4, 2)
    return b"ajkg\x02" + bits.bytes()


def _truncated(a: int, b: int) -> int:
    return a // b if a >= 0 else -(-a // b)


def _write_block(
    bits: Bits, function: int, samples: np.ndarray, history: np.ndarray, mean: int, coefficients: Sequence[int]
) -> None:
    if function == 8 and not samples.any():
        bits.rice(8, 2)
        return
    function = 1 if function == 8 else function
    x = np.concatenate([history, samples])
    at = np.arange(len(history), len(x))
    predicted = {
        0: lambda: np.full(len(samples), mean),
        1: lambda: x[at - 1],
        2: lambda: 2 * x[at - 1] - x[at - 2],
        3: lambda: 3 * (x[at - 1] - x[at - 2]) + x[at - 3],
        7: lambda: ((32 + sum(c * (x[at - 1 - i] - mean) for i, c in enumerate(coefficients))) >> 5) + mean,
    }[function]()
    residuals = samples - predicted
    energy = max(0, int(np.abs(residuals).mean()).bit_length() - 1)
    bits.rice(function, 2)
    bits.rice(energy, 3)
    if function == 7:
        bits.rice(len(coefficients), 2)
        for coefficient in coefficients:
            bits.signed(coefficient, 6)
    for residual in residuals.tolist():
        bits.signed(residual, energy + 1)
