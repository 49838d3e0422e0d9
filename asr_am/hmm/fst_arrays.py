"""FSTs as numpy arrays, converted to and from kaldifst through OpenFst's binary format.

kaldifst edits one arc at a time. A graph of a million arcs takes minutes that way, and well under a second as arrays.
The bytes pass through an in-memory file. See also `asr_am.hmm.vector_fst`, for vector
FSTs without kaldifst. The layout of const FSTs follows OpenFst's `const-fst.h`.

Shapes: A arcs, S states.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace

import kaldifst
import numpy as np

from asr_am.hmm.vector_fst import COUNTS, MAGIC, VectorFst, read_vector_fst, text_bytes

_CONST_STATE = np.dtype([("final", "<f4"), ("first", "<u4"), ("arcs", "<u4"), ("in_eps", "<u4"), ("out_eps", "<u4")])
_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4"), ("target", "<i4")])


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
        data = np.frombuffer(fst_bytes(fst), np.uint8)
        vector, _ = read_vector_fst(data, 0, b"standard")
        source_A = np.repeat(np.arange(vector.num_states, dtype=np.int32), np.diff(vector.first_S))
        ilabel_A, olabel_A, weight_A, target_A = np.ascontiguousarray(vector.arc_AC.T)
        weight_A, final_S = weight_A.view(np.float32), np.ascontiguousarray(vector.final_SW[:, 0])
        return cls(vector.start, source_A, target_A, ilabel_A, olabel_A, weight_A, final_S)

    @classmethod
    def from_lattice(cls, data: bytes, offset: int = 0) -> tuple[FstArrays, int]:
        """Reads a lattice from the bytes of its OpenFst file.

        Returns:
            The lattice, and the offset of the first byte after it.

        Raises:
            ValueError: the bytes are not a complete lattice.
        """
        fst, end = read_vector_fst(np.frombuffer(data, np.uint8), offset, b"lattice4")
        source_A = np.repeat(np.arange(fst.num_states, dtype=np.int32), np.diff(fst.first_S))
        ilabel_A, olabel_A, _, _, target_A = np.ascontiguousarray(fst.arc_AC.T)
        weight_A2 = fst.arc_AC.view(np.float32)[:, 2:4].copy()
        return cls(fst.start, source_A, target_A, ilabel_A, olabel_A, weight_A2, fst.final_SW), end

    def to_lattice_bytes(self) -> bytes:
        """Returns the bytes of a lattice's OpenFst file, which Kaldi's tools read."""
        arc_A5 = np.empty((len(self.source_A), 5), np.int32)
        arc_A5[:, 0], arc_A5[:, 1], arc_A5[:, 4] = self.ilabel_A, self.olabel_A, self.target_A
        arc_A5[:, 2:4] = self.weight_A.view(np.int32)
        first_S = np.searchsorted(self.source_A, np.arange(self.num_states + 1))
        return VectorFst(self.start, first_S, arc_A5, self.final_S).to_bytes()

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
        head = struct.pack("<i", MAGIC) + text_bytes(b"const") + text_bytes(b"standard") + struct.pack("<ii", 2, 0)
        counts_bytes = COUNTS.pack(1, self.start, self.num_states, len(arcs))
        return _read_const(head + counts_bytes + states.tobytes() + arcs.tobytes())


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
