"""Sphere files compressed by shorten, as on LDC's discs of telephone speech: coding `...,embedded-shorten-v2.00`.

The format is version 2 of T. Robinson, "SHORTEN: Simple lossless and near-lossless waveform compression", CUED report
156, 1994: blocks of one channel after the other, residuals of a polynomial or linear prediction in Rice codes. Samples
of 16 bits are coded as they are, mu-law samples as their rank in the order of their amplitudes.

Shapes: N samples, C channels, B bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from asr_am.compiled import compiled
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
    """Decompresses a sphere file. Returns samples, int16 [N, C], and the sampling rate.

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


@compiled
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


@compiled
def _long(stream_B: np.ndarray, position: int) -> tuple[int, int]:
    """Returns a number of the header, whose code is preceded by its bits."""
    bits, position = _unsigned(stream_B, position, LONG_BITS)
    if bits < 0 or bits > 32:
        return (bits if bits < 0 else -2), position
    return _unsigned(stream_B, position, bits)


@compiled
def _divide(a: int, b: int) -> int:
    """Divides towards zero."""
    return a // b if a >= 0 else -(-a // b)


@compiled
def _signed(code: int) -> int:
    """Returns the number of a signed Rice code: 0, -1, 1, -2, 2, ..."""
    return -(code >> 1) - 1 if code & 1 else code >> 1


@compiled
def _problem(value: int) -> int:
    """Returns what is wrong, given a value that is none."""
    return TRUNCATED if value == -1 else DAMAGED


@compiled
def _read_header(stream_B: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Returns type, channels, block size, order of prediction, number of means and bytes to skip, int64 [6].

    And the position after the header and what is wrong.
    """
    position = 40  # after the magic number and the version
    header = np.zeros(6, np.int64)
    for i in range(6):
        header[i], position = _long(stream_B, position)
        if header[i] < 0 or header[i] > MAX_FIELD:
            return header, position, _problem(header[i])
    if header[0] != PCM_HIGH_FIRST and header[0] != PCM_LOW_FIRST and header[0] != MU_LAW:
        return header, position, UNKNOWN_TYPE
    for _ in range(header[5]):
        value, position = _unsigned(stream_B, position, SKIP_BITS)
        if value < 0:
            return header, position, TRUNCATED
    return header, position, COMPLETE


@compiled
def _mean_of_blocks(means_M: np.ndarray, shift: int) -> int:
    """Returns the mean of the last blocks' means."""
    if len(means_M) == 0:
        return 0
    mean = _divide(len(means_M) // 2 + means_M.sum(), len(means_M))
    return (mean >> (shift - 1)) >> 1 if shift else mean


@compiled
def _read_coefficients(stream_B: np.ndarray, position: int, coefficient_O: np.ndarray) -> tuple[int, int, int]:
    """Fills in the coefficients of a linear prediction. Returns its order, the next position and what is wrong."""
    order, position = _unsigned(stream_B, position, ORDER_BITS)
    if order < 0 or order > len(coefficient_O):
        return 0, position, _problem(order)
    for i in range(order):
        code, position = _unsigned(stream_B, position, COEFFICIENT_BITS + 1)
        coefficient_O[i] = _signed(code)
    return order, position, COMPLETE


@compiled
def _read_block(
    stream_B: np.ndarray, position: int, function: int, mean: int, samples_S: np.ndarray, past: int,
    coefficient_O: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Reads the residuals of a block and adds the prediction to them. Returns the next position and what is wrong.

    Args:
        position: of the block, in bits.
        function: prediction, one of DIFF0 to DIFF3, QLPC and ZERO.
        samples_S: `past` samples of the blocks before, then those of this one, which are filled in.
        past: number of samples before the block.
    """
    if function == ZERO:
        samples_S[past:] = 0
        return position, COMPLETE
    energy, position = _unsigned(stream_B, position, ENERGY_BITS)
    order, problem = 0, COMPLETE
    if function == QLPC:
        order, position, problem = _read_coefficients(stream_B, position, coefficient_O)
    if energy < 0 or energy > 30:
        return position, _problem(energy)
    if problem != COMPLETE:
        return position, problem
    for n in range(past, len(samples_S)):
        code, position = _unsigned(stream_B, position, energy + 1)
        if code < 0:
            return position, _problem(code)
        value = _signed(code)
        if function == DIFF0:
            value += mean
        elif function == DIFF1:
            value += samples_S[n - 1]
        elif function == DIFF2:
            value += 2 * samples_S[n - 1] - samples_S[n - 2]
        elif function == DIFF3:
            value += 3 * (samples_S[n - 1] - samples_S[n - 2]) + samples_S[n - 3]
        else:
            predicted = 1 << COEFFICIENT_BITS
            for i in range(order):
                predicted += coefficient_O[i] * (samples_S[n - 1 - i] - mean)
            value += (predicted >> COEFFICIENT_BITS) + mean
        if value < -(1 << 20) or value > 1 << 20:
            return position, DAMAGED
        samples_S[n] = value
    return position, COMPLETE


@compiled
def _read_verbatim(stream_B: np.ndarray, position: int) -> tuple[int, int]:
    """Skips bytes that belong to no sample. Returns the next position and what is wrong."""
    count, position = _unsigned(stream_B, position, VERBATIM_SIZE_BITS)
    for _ in range(count):
        _, position = _unsigned(stream_B, position, VERBATIM_BITS)
    return position, TRUNCATED if count < 0 else COMPLETE


@compiled
def _decode(stream_B: np.ndarray, values_NC: np.ndarray, shift_NC: np.ndarray) -> tuple[int, int]:
    """Fills in the values before their shift, and their shifts. Returns the type of samples and what is wrong."""
    header, position, problem = _read_header(stream_B)
    kind, block, max_order, num_means = header[0], header[2], header[3], header[4]
    frames, channels = values_NC.shape
    if problem != COMPLETE or header[1] != channels:
        return kind, problem if problem != COMPLETE else OTHER_SIZE
    largest = max(MAX_FIELD, block)
    past = max(max_order, NUM_DIFFS)
    samples_CS = np.zeros((channels, past + largest), np.int64)  # before a block: the last samples of the one before
    means_CM = np.zeros((channels, num_means), np.int64)
    coefficient_O = np.zeros(max_order, np.int64)
    done_C = np.zeros(channels, np.int64)
    channel, shift = 0, 0
    while True:
        function, position = _unsigned(stream_B, position, FUNCTION_BITS)
        if function < 0:
            return kind, TRUNCATED
        if function == QUIT:
            return kind, COMPLETE if np.all(done_C == frames) else OTHER_SIZE
        if function == BLOCK_SIZE:
            block, position = _long(stream_B, position)
            if block < 1 or block > largest:
                return kind, _problem(block)
        elif function == BIT_SHIFT:
            shift, position = _unsigned(stream_B, position, SHIFT_BITS)
            if shift < 0 or shift > MAX_SHIFT:
                return kind, _problem(shift)
        elif function == VERBATIM:
            position, problem = _read_verbatim(stream_B, position)
            if problem != COMPLETE:
                return kind, problem
        elif function > ZERO:
            return kind, DAMAGED
        else:
            samples_S, means_M = samples_CS[channel, : past + block], means_CM[channel]
            mean = _mean_of_blocks(means_M, shift)
            position, problem = _read_block(stream_B, position, function, mean, samples_S, past, coefficient_O)
            begin = done_C[channel]
            if problem != COMPLETE or begin + block > frames:
                return kind, problem if problem != COMPLETE else OTHER_SIZE
            values_NC[begin : begin + block, channel] = samples_S[past:]
            shift_NC[begin : begin + block, channel] = shift
            done_C[channel] += block
            if num_means:
                means_M[:-1] = means_M[1:]
                means_M[-1] = _divide(block // 2 + samples_S[past:].sum(), block) << shift
            samples_S[:past] = samples_S[block:]
            channel = (channel + 1) % channels
