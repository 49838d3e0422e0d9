"""Files of OpenFst's vector FSTs as flat arrays, without an FST object. The layout is that of OpenFst's `vector-fst.h`.

Shapes: A arcs, S states, W float32 numbers of a weight (1 in the tropical semiring, 2 in Kaldi's lattices).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from asr_am.compiled import compiled

MAGIC = 2125659606
WEIGHT_SIZE = {b"standard": 1, b"lattice4": 2}  # W of each arc type
COUNTS = struct.Struct("<QqqQ")  # properties, start, states, arcs
_EXPANDED_MUTABLE = 3  # properties of a vector FST. OpenFst computes others on demand.


@dataclass(frozen=True)
class VectorFst:
    """An FST with arcs sorted by source state.

    Attributes:
        start: start state.
        first_S: int64 [S + 1]. First arc of each state, and the number of arcs.
        arc_AC: int32 rows (input label, output label, W numbers as float32 bits, target state).
        final_SW: float32 final costs, infinity for states that are not final.
    """

    start: int
    first_S: np.ndarray
    arc_AC: np.ndarray
    final_SW: np.ndarray

    @property
    def num_states(self) -> int:
        return len(self.final_SW)

    def to_bytes(self) -> bytes:
        """Returns the bytes of the FST's file."""
        num_states, size = self.final_SW.shape
        state_words, arc_words = size + 2, size + 3  # of 4 bytes: costs and the number of arcs, an arc
        words = np.zeros(state_words * num_states + arc_words * len(self.arc_AC), np.int32)
        state_S = state_words * np.arange(num_states) + arc_words * self.first_S[:-1]
        words[state_S[:, None] + np.arange(size)] = self.final_SW.view(np.int32)
        count_S = np.diff(self.first_S)
        words[state_S + size] = count_S  # the lower half of 64 bits
        source_A = np.repeat(np.arange(num_states), count_S)
        arc_A = state_words * (source_A + 1) + arc_words * np.arange(len(self.arc_AC))
        words[arc_A[:, None] + np.arange(arc_words)] = self.arc_AC
        arc_type = next(name for name, number in WEIGHT_SIZE.items() if number == size)
        head = struct.pack("<i", MAGIC) + text_bytes(b"vector") + text_bytes(arc_type) + struct.pack("<ii", 2, 0)
        return head + COUNTS.pack(_EXPANDED_MUTABLE, self.start, num_states, len(self.arc_AC)) + words.tobytes()


def text_bytes(value: bytes) -> bytes:
    """Returns the bytes of a text in a header."""
    return struct.pack("<i", len(value)) + value


def read_header(data: bytes | np.ndarray, offset: int = 0) -> tuple[bytes, tuple[int, int, int, int], int]:
    """Reads a header. Returns the arc type, (properties, start, states, arcs) and the offset of the first state.

    Raises ValueError if the bytes are not those of a vector or const FST.
    """
    head = bytes(data[offset : offset + 128])
    if head[:4] != struct.pack("<i", MAGIC):
        raise ValueError("not an OpenFst file")
    position = 4
    try:
        for _ in range(2):  # FST type, arc type
            (length,) = struct.unpack_from("<i", head, position)
            arc_type = head[position + 4 : position + 4 + length]
            position += 4 + length
        counts = COUNTS.unpack_from(head, position + 8)  # after version and flags
    except struct.error as error:
        raise ValueError("truncated or damaged header") from error
    return arc_type, counts, offset + position + 8 + COUNTS.size


def read_vector_fst(data: np.ndarray, offset: int, arc_type: bytes) -> tuple[VectorFst, int]:
    """Reads an FST from the bytes of its file.

    Args:
        data: uint8, contiguous.
        arc_type: the type that it must have.

    Returns:
        The FST, and the offset of the first byte after it.

    Raises:
        ValueError: the bytes are not a complete FST of that type with a start state, or an arc leads out of it.
    """
    found, (_, start, num_states, _), position = read_header(data, offset)
    if found != arc_type:
        raise ValueError(f"arcs of type {found!r}, not {arc_type!r}")
    size = WEIGHT_SIZE[arc_type]
    if not 0 <= start < num_states <= len(data) // (4 * size + 8):
        raise ValueError("damaged header")
    first_S, final = np.empty(num_states + 1, np.int64), np.empty(4 * size * num_states, np.uint8)
    end = _scan_states(data, position, size, first_S, final)
    if end < 0:
        raise ValueError("truncated, or a damaged number of arcs")
    arcs = np.empty((4 * size + 12) * first_S[-1], np.uint8)
    _copy_arcs(data, position, size, first_S, arcs)
    arc_AC = arcs.view(np.int32).reshape(-1, size + 3)
    if len(arc_AC) and not (arc_AC[:, -1].min() >= 0 and arc_AC[:, -1].max() < num_states):
        raise ValueError("an arc to a state that does not exist")
    return VectorFst(start, first_S, arc_AC, final.view(np.float32).reshape(-1, size)), end


# Bytes, because FSTs begin anywhere in an archive.


@compiled
def _scan_states(data: np.ndarray, position: int, size: int, first_S: np.ndarray, final: np.ndarray) -> int:
    """Fills `first_S` and `final`. Returns the position after the last arc, -1 if the bytes end before it."""
    first_S[0] = 0
    for s in range(len(first_S) - 1):
        if position + 4 * size + 8 > len(data):
            return -1
        for byte in range(4 * size):
            final[4 * size * s + byte] = data[position + byte]
        position += 4 * size
        count = np.int64(0)
        for byte in range(8):
            count |= np.int64(data[position + byte]) << (8 * byte)
        position += 8
        if not 0 <= count <= (len(data) - position) // (4 * size + 12):
            return -1
        first_S[s + 1] = first_S[s] + count
        position += (4 * size + 12) * (first_S[s + 1] - first_S[s])
    return position


@compiled
def _copy_arcs(data: np.ndarray, position: int, size: int, first_S: np.ndarray, arcs: np.ndarray) -> None:
    arc_bytes = 4 * size + 12
    for s in range(len(first_S) - 1):
        position += 4 * size + 8
        begin, end = first_S[s] * arc_bytes, first_S[s + 1] * arc_bytes
        for byte in range(end - begin):
            arcs[begin + byte] = data[position + byte]
        position += end - begin
