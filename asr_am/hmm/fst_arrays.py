"""FSTs as numpy arrays, converted to and from kaldifst through OpenFst's binary format.

kaldifst edits one arc at a time. A graph of a million arcs takes minutes that way, and well under a second as arrays.
The bytes pass through an in-memory file. The layout follows OpenFst's `const-fst.h` and `vector-fst.h`.

Shapes: A arcs, S states.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace

import kaldifst
import numpy as np

_MAGIC = 2125659606
_CONST_STATE = np.dtype([("final", "<f4"), ("first", "<u4"), ("arcs", "<u4"), ("in_eps", "<u4"), ("out_eps", "<u4")])
_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4"), ("target", "<i4")])
_LATTICE_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4", (2,)), ("target", "<i4")])
_LATTICE_STATE = struct.Struct("<ffq")  # final graph and acoustic cost, number of arcs
_COUNTS = struct.Struct("<QqqQ")  # properties, start, states, arcs


@dataclass(frozen=True)
class FstArrays:
    """An FST with arcs sorted by source state.

    Attributes:
        start: start state, -1 for an FST without states.
        source_A: source state, int32.
        target_A: destination state, int32.
        ilabel_A: input label, int32.
        olabel_A: output label, int32.
        weight_A: float32 costs. [A, 2] (graph, acoustic) for a lattice.
        final_S: float32 final costs, infinity for states that are not final. [S, 2] for a lattice.
    """

    start: int
    source_A: np.ndarray
    target_A: np.ndarray
    ilabel_A: np.ndarray
    olabel_A: np.ndarray
    weight_A: np.ndarray
    final_S: np.ndarray

    @property
    def num_states(self) -> int:
        return len(self.final_S)

    @classmethod
    def from_fst(cls, fst: kaldifst.StdVectorFst) -> FstArrays:
        """Converts a kaldifst FST in the tropical semiring."""
        if fst.num_states == 0:
            return cls.build(-1, np.empty((0, 4), np.int32), np.empty(0, np.float32), np.empty(0, np.float32))
        data = fst_bytes(kaldifst.StdConstFst(fst))
        (_, start, num_states, num_arcs), offset = _header(data)
        states = np.frombuffer(data, _CONST_STATE, num_states, offset)
        arcs = np.frombuffer(data, _ARC, num_arcs, offset + states.nbytes)
        return cls(
            start, np.repeat(np.arange(num_states, dtype=np.int32), states["arcs"]), arcs["target"], arcs["ilabel"],
            arcs["olabel"], arcs["weight"], states["final"],
        )  # fmt: skip

    @classmethod
    def from_lattice(cls, data: bytes, offset: int = 0) -> tuple[FstArrays, int]:
        """Reads a lattice from the bytes of its OpenFst file (see `fst_bytes`).

        Args:
            data: the bytes.
            offset: where the lattice begins.

        Returns:
            The lattice, and the offset of the first byte after it.

        Raises:
            ValueError: the bytes are not a complete lattice.
        """
        try:
            (_, start, num_states, _), position = _header(data, offset)
        except struct.error as error:
            raise ValueError("truncated or damaged header") from error
        if not 0 <= start < num_states <= len(data) // _LATTICE_STATE.size:
            raise ValueError("damaged header")
        count_S = np.empty(num_states, np.int64)
        final_S = np.empty((num_states, 2), np.float32)
        pieces = []
        for state in range(num_states):
            if position + _LATTICE_STATE.size > len(data):
                raise ValueError("truncated")
            graph, acoustic, count = _LATTICE_STATE.unpack_from(data, position)
            if not 0 <= count <= (len(data) - position) // _LATTICE_ARC.itemsize:
                raise ValueError(f"truncated, or {count} arcs at one state")
            final_S[state] = graph, acoustic
            count_S[state] = count
            position += _LATTICE_STATE.size
            pieces.append(data[position : position + _LATTICE_ARC.itemsize * count])
            position += _LATTICE_ARC.itemsize * count
        arcs = np.frombuffer(b"".join(pieces), _LATTICE_ARC)
        if len(arcs) and not (arcs["target"].min() >= 0 and arcs["target"].max() < num_states):
            raise ValueError("an arc to a state that does not exist")
        source_A = np.repeat(np.arange(num_states, dtype=np.int32), count_S)
        columns = (source_A, arcs["target"], arcs["ilabel"], arcs["olabel"], arcs["weight"])
        return cls(start, *columns, final_S=final_S), position

    @classmethod
    def build(cls, start: int, arcs_A4: np.ndarray, weight_A: np.ndarray, final_S: np.ndarray) -> FstArrays:
        """Builds an FST from int32 rows (source, target, ilabel, olabel) in any order."""
        order = np.argsort(arcs_A4[:, 0], kind="stable")
        source_A, target_A, ilabel_A, olabel_A = np.ascontiguousarray(arcs_A4[order].T.astype(np.int32))
        weight_A, final_S = weight_A[order].astype(np.float32), final_S.astype(np.float32)
        return cls(start, source_A, target_A, ilabel_A, olabel_A, weight_A, final_S)

    def relabel(self, ilabel_A: np.ndarray) -> FstArrays:
        """Returns the same FST with other input labels."""
        return replace(self, ilabel_A=ilabel_A.astype(np.int32))

    def to_fst(self) -> kaldifst.StdVectorFst:
        """Converts to a kaldifst FST (tropical semiring only)."""
        if self.num_states == 0:
            return kaldifst.StdVectorFst()
        states = np.zeros(self.num_states, _CONST_STATE)
        counts = np.bincount(self.source_A, minlength=self.num_states)
        states["final"], states["arcs"], states["first"] = self.final_S, counts, np.cumsum(counts) - counts
        states["in_eps"] = np.bincount(self.source_A[self.ilabel_A == 0], minlength=self.num_states)
        states["out_eps"] = np.bincount(self.source_A[self.olabel_A == 0], minlength=self.num_states)
        arcs = np.zeros(len(self.source_A), _ARC)
        arcs["ilabel"], arcs["olabel"], arcs["weight"] = self.ilabel_A, self.olabel_A, self.weight_A
        arcs["target"] = self.target_A
        # Version 2 is the unaligned layout. Only the property "expanded" (1) is set. OpenFst computes others on demand.
        head = struct.pack("<i", _MAGIC) + _text(b"const") + _text(b"standard") + struct.pack("<ii", 2, 0)
        counts_bytes = _COUNTS.pack(1, self.start, self.num_states, len(arcs))
        return _read_const(head + counts_bytes + states.tobytes() + arcs.tobytes())


def _text(value: bytes) -> bytes:
    return struct.pack("<i", len(value)) + value


def _header(data: bytes, offset: int = 0) -> tuple[tuple[int, int, int, int], int]:
    """Returns ((properties, start, states, arcs), offset of the first state)."""
    position = offset + 4
    if data[offset:position] != struct.pack("<i", _MAGIC):
        raise ValueError("not an OpenFst file")
    for _ in range(2):  # FST type, arc type
        (length,) = struct.unpack_from("<i", data, position)
        position += 4 + length
    position += 8  # version, flags
    properties, start, states, arcs = _COUNTS.unpack_from(data, position)
    return (properties, start, states, arcs), position + _COUNTS.size


def fst_bytes(fst: kaldifst.StdFst | kaldifst.Lattice) -> bytes:
    """Returns the bytes that `fst.write` would put into a file."""
    handle = os.memfd_create("fst")
    try:
        if not fst.write(f"/proc/self/fd/{handle}"):
            raise RuntimeError("kaldifst could not write an FST into memory")
        return os.pread(handle, os.fstat(handle).st_size, 0)
    finally:
        os.close(handle)


def _read_const(data: bytes) -> kaldifst.StdVectorFst:
    handle = os.memfd_create("fst")
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(data)
        return kaldifst.StdVectorFst(kaldifst.StdConstFst.read(f"/proc/self/fd/{handle}"))
    finally:
        os.close(handle)
