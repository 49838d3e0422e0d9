"""Sphere files compressed by shorten, as on LDC's discs of telephone speech: coding `...,embedded-shorten-v2.00`.

The format is version 2 of T. Robinson, "SHORTEN: Simple lossless and near-lossless waveform compression", CUED report
156, 1994: blocks of one channel after the other, residuals of a polynomial or linear prediction in Rice codes. Samples
of 16 bits are coded as they are, mu-law samples as their rank in the order of their amplitudes.

Shapes: N samples, C channels, B bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

import numba
import numpy as np

from asr_am.errors import InputError

MAGIC, VERSION = b"ajkg", 2
PCM_HIGH_FIRST, PCM_LOW_FIRST, MU_LAW = 3, 5, 8  # types of samples
REMEDY = "get a complete copy, or convert it with `sph2pipe -f wav -p FILE NEW.wav`"

DIFF0, DIFF1, DIFF2, DIFF3, QUIT, BLOCK_SIZE, BIT_SHIFT, QLPC, ZERO, VERBATIM = range(10)  # what a block is
# Bits of the Rice codes of each field.
FUNCTION_BITS, LONG_BITS, ENERGY_BITS, SHIFT_BITS, ORDER_BITS, COEFFICIENT_BITS = 2, 2, 3, 2, 2, 5
SKIP_BITS, VERBATIM_SIZE_BITS, VERBATIM_BITS = 1, 5, 8
NUM_DIFFS = 3  # samples that the polynomial predictions look back
MAX_FIELD = 1 << 16  # of a number in the header, and of a unary part; more is damage
MAX_SHIFT = 12

COMPLETE, TRUNCATED, DAMAGED, UNKNOWN_TYPE, OTHER_SIZE = range(5)
PROBLEMS = {
    TRUNCATED: "its compressed samples end too early",
    DAMAGED: "its compressed samples are damaged",
    UNKNOWN_TYPE: "its compressed samples are neither mu-law nor of 16 bits",
    OTHER_SIZE: "its header promises another number of channels or samples than it has",
}
FIELD = re.compile(rb"^(\w+) -(?:i|r|s\d+) (.*?)\s*$", re.MULTILINE)
_compiled = numba.njit(nogil=True, cache=True)


def sphere_header(path: Path) -> tuple[dict[str, str], int]:
    """Returns the fields of a sphere file's header and its size in bytes, ({}, 0) for a file of another format."""
    with path.open("rb") as file:
        head = file.read(16)
        if not head.startswith(b"NIST_1A\n") or not head[8:].strip().isdigit():
            return {}, 0
        size = int(head[8:])
        header = head + file.read(max(0, size - len(head)))
    fields = FIELD.findall(header.partition(b"end_head")[0])
    return {name.decode(): value.decode("latin-1") for name, value in fields}, size


def is_shortened(path: Path) -> bool:
    """True for a sphere file compressed by shorten. Raises OSError if it cannot be read."""
    return "shorten" in sphere_header(path)[0].get("sample_coding", "")


def read_shortened(path: Path) -> tuple[np.ndarray, int]:
    """Decompresses a sphere file.

    Returns:
        Samples, int16 [N, C], and the sampling rate.

    Raises:
        InputError: the file is damaged or of a kind that LDC's discs do not have.
        OSError: it cannot be read.
    """
    fields, size = sphere_header(path)
    try:
        rate, frames, channels = (int(fields[name]) for name in ("sample_rate", "sample_count", "channel_count"))
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: no sample_rate, sample_count or channel_count in its header; {REMEDY}") from error
    stream_B = np.fromfile(path, dtype=np.uint8, offset=size)
    if bytes(stream_B[:4]) != MAGIC or len(stream_B) < 5 or stream_B[4] != VERSION:
        raise InputError(f"{path}: not of version {VERSION} of shorten; {REMEDY}")
    if rate <= 0 or frames < 0 or channels <= 0 or frames * channels > MAX_FIELD * len(stream_B):
        raise InputError(f"{path}: {PROBLEMS[OTHER_SIZE]}; {REMEDY}")
    values_NC = np.zeros((frames, channels), np.int32)
    shift_NC = np.zeros((frames, channels), np.uint8)
    kind, problem = _decode(stream_B, values_NC, shift_NC)
    if problem != COMPLETE:
        raise InputError(f"{path}: {PROBLEMS[problem]}; {REMEDY}")
    return (_expand(values_NC, shift_NC) if kind == MU_LAW else values_NC << shift_NC).astype(np.int16), rate


def _expand(rank_NC: np.ndarray, shift_NC: np.ndarray) -> np.ndarray:
    """Returns the 16-bit values of mu-law samples (ITU-T G.711) from their ranks: ..., -2, -1 (minus zero), 0, 1, ...

    A shift says that only every 2^shift-th code of the first segment occurs, every 2^(shift-1)-th of the second, ...
    """
    code_SR = np.arange(128) + np.zeros((MAX_SHIFT + 1, 1), int)
    for shift in range(MAX_SHIFT + 1):
        starts = [16 * (segment - 1) + (16 >> segment) if segment else 0 for segment in range(shift + 1)]
        lines = [(np.arange(128) << (shift - segment)) + start for segment, start in enumerate(starts)]
        code_SR[shift] = np.minimum(np.min(lines, axis=0), 127)
    magnitude_R = (((2 * (np.arange(128) % 16) + 33) << np.arange(128) // 16) - 33) * 4
    negative_NC = rank_NC < 0
    size_NC = np.minimum(np.where(negative_NC, -1 - rank_NC, rank_NC), 127)
    value_NC = magnitude_R[code_SR[shift_NC, size_NC]]
    return np.where(negative_NC, -value_NC, value_NC)


@_compiled
def _unsigned(stream_B: np.ndarray, position: int, bits: int) -> tuple[int, int]:
    """Returns a Rice code: zeros up to a one count 2^bits each, then come the low `bits`. And the next position.

    The value is -1 past the end of the stream, -2 if it is too large.
    """
    end = 8 * len(stream_B)
    high = 0
    while True:
        if position >= end:
            return -1, position
        one = (stream_B[position >> 3] >> (7 - (position & 7))) & 1
        position += 1
        if one:
            break
        high += 1
        if high > MAX_FIELD:
            return -2, position
    if position + bits > end:
        return -1, position
    value = high
    for _ in range(bits):
        value = 2 * value + ((stream_B[position >> 3] >> (7 - (position & 7))) & 1)
        position += 1
    return value, position


@_compiled
def _long(stream_B: np.ndarray, position: int) -> tuple[int, int]:
    """Returns a number of the header, whose code is preceded by its bits."""
    bits, position = _unsigned(stream_B, position, LONG_BITS)
    if bits < 0 or bits > 32:
        return (bits if bits < 0 else -2), position
    return _unsigned(stream_B, position, bits)


@_compiled
def _divide(a: int, b: int) -> int:
    """Divides towards zero."""
    return a // b if a >= 0 else -(-a // b)


@_compiled
def _decode(stream_B: np.ndarray, values_NC: np.ndarray, shift_NC: np.ndarray) -> tuple[int, int]:
    """Fills in the values before their shift, and their shifts. Returns the type of samples and what is wrong."""
    frames, channels = values_NC.shape
    position = 40  # after the magic number and the version
    header = np.zeros(6, np.int64)  # type, channels, block, order of prediction, means, bytes to skip
    for i in range(6):
        header[i], position = _long(stream_B, position)
        if header[i] < 0 or header[i] > MAX_FIELD:
            return 0, TRUNCATED if header[i] == -1 else DAMAGED
    kind, block, max_order, num_means = header[0], header[2], header[3], header[4]
    if kind != PCM_HIGH_FIRST and kind != PCM_LOW_FIRST and kind != MU_LAW:
        return kind, UNKNOWN_TYPE
    if header[1] != channels:
        return kind, OTHER_SIZE
    for _ in range(header[5]):
        value, position = _unsigned(stream_B, position, SKIP_BITS)
        if value < 0:
            return kind, TRUNCATED
    largest = max(MAX_FIELD, block)
    past = max(max_order, NUM_DIFFS)
    samples_CN = np.zeros((channels, past + largest), np.int64)  # before a block: the last samples of the one before
    means_CM = np.zeros((channels, max(num_means, 1)), np.int64)
    coefficient = np.zeros(max_order + 1, np.int64)
    done_C = np.zeros(channels, np.int64)
    channel, shift = 0, 0
    while True:
        function, position = _unsigned(stream_B, position, FUNCTION_BITS)
        if function < 0:
            return kind, TRUNCATED
        if function == QUIT:
            for c in range(channels):
                if done_C[c] != frames:
                    return kind, OTHER_SIZE
            return kind, COMPLETE
        if function == BLOCK_SIZE:
            block, position = _long(stream_B, position)
            if block < 1 or block > largest:
                return kind, TRUNCATED if block == -1 else DAMAGED
            continue
        if function == BIT_SHIFT:
            shift, position = _unsigned(stream_B, position, SHIFT_BITS)
            if shift < 0 or shift > MAX_SHIFT:
                return kind, TRUNCATED if shift == -1 else DAMAGED
            continue
        if function == VERBATIM:
            count, position = _unsigned(stream_B, position, VERBATIM_SIZE_BITS)
            for _ in range(count):
                value, position = _unsigned(stream_B, position, VERBATIM_BITS)
            if count < 0:
                return kind, TRUNCATED
            continue
        if function > ZERO:
            return kind, DAMAGED
        mean = 0
        if num_means:
            total = num_means // 2
            for i in range(num_means):
                total += means_CM[channel, i]
            mean = _divide(total, num_means)
            if shift:
                mean = (mean >> (shift - 1)) >> 1
        samples = samples_CN[channel]
        end = past + block
        if function == ZERO:
            samples[past:end] = 0
        else:
            energy, position = _unsigned(stream_B, position, ENERGY_BITS)
            order = 0
            if function == QLPC:
                order, position = _unsigned(stream_B, position, ORDER_BITS)
                if order > max_order:
                    return kind, DAMAGED
                for i in range(order):
                    code, position = _unsigned(stream_B, position, COEFFICIENT_BITS + 1)
                    coefficient[i] = -(code >> 1) - 1 if code & 1 else code >> 1
            if energy < 0 or order < 0 or energy > 30:
                return kind, TRUNCATED if min(energy, order) == -1 else DAMAGED
            for n in range(past, end):
                code, position = _unsigned(stream_B, position, energy + 1)
                if code < 0:
                    return kind, TRUNCATED if code == -1 else DAMAGED
                value = -(code >> 1) - 1 if code & 1 else code >> 1
                if function == DIFF0:
                    value += mean
                elif function == DIFF1:
                    value += samples[n - 1]
                elif function == DIFF2:
                    value += 2 * samples[n - 1] - samples[n - 2]
                elif function == DIFF3:
                    value += 3 * (samples[n - 1] - samples[n - 2]) + samples[n - 3]
                else:
                    predicted = 1 << COEFFICIENT_BITS
                    for i in range(order):
                        predicted += coefficient[i] * (samples[n - 1 - i] - mean)
                    value += (predicted >> COEFFICIENT_BITS) + mean
                if value < -(1 << 20) or value > 1 << 20:
                    return kind, DAMAGED
                samples[n] = value
        if num_means:
            total = block // 2
            for n in range(past, end):
                total += samples[n]
            for i in range(num_means - 1):
                means_CM[channel, i] = means_CM[channel, i + 1]
            means_CM[channel, num_means - 1] = _divide(total, block) << shift
        begin = done_C[channel]
        if begin + block > frames:
            return kind, OTHER_SIZE
        for n in range(block):
            values_NC[begin + n, channel] = samples[past + n]
            shift_NC[begin + n, channel] = shift
        done_C[channel] += block
        for i in range(past):
            samples[i] = samples[block + i]
        channel = (channel + 1) % channels
