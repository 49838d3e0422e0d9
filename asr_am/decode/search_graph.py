"""The decoding graph as the search reads it: flat arrays that threads and forked processes share.

Shapes: A arcs, S states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asr_am.compiled import compiled
from asr_am.hmm.vector_fst import read_vector_fst

LABEL, WORD, WEIGHT, TARGET = 0, 1, 2, 3  # columns of an arc, as in OpenFst's files


@dataclass(frozen=True)
class SearchGraph:
    """A graph of 16 bytes per arc and 12 per state.

    Attributes:
        start: start state.
        first_S2: int32 [S + 1, 2]. First arc of each state, and its first arc with a graph label: those without come
            first.
        arc_A4: int32 rows (graph label, word, weight as float32 bits, target state). A target that has arcs without
            labels is given as its complement, which is negative.
        final_S: float32 final costs, infinity for states that are not final.
    """

    start: int
    first_S2: np.ndarray
    arc_A4: np.ndarray
    final_S: np.ndarray

    @property
    def num_states(self) -> int:
        return len(self.final_S)

    @property
    def num_arcs(self) -> int:
        return len(self.arc_A4)

    @property
    def weight_A(self) -> np.ndarray:
        """Graph costs, float32."""
        return self.arc_A4.view(np.float32)[:, WEIGHT]

    @cached_property
    def num_labels(self) -> int:
        """Highest graph label."""
        return int(self.arc_A4[:, LABEL].max(initial=0))

    @classmethod
    def from_bytes(cls, data: np.ndarray) -> SearchGraph:
        """Converts the bytes (uint8) of an OpenFst vector FST. Raises ValueError if they are none, or empty."""
        fst, _ = read_vector_fst(data, 0, b"standard")
        arc_A4 = fst.arc_AC
        if len(arc_A4) and arc_A4[:, LABEL].min() < 0:
            raise ValueError("an arc with a negative label")
        first_S2 = _sort_arcs(fst.first_S, arc_A4)
        return cls(fst.start, first_S2, arc_A4, np.ascontiguousarray(fst.final_SW[:, 0]))


@compiled
def _sort_arcs(first_S: np.ndarray, arc_A4: np.ndarray) -> np.ndarray:
    """Moves each state's arcs without labels before the others, marks targets that have any, and returns first_S2."""
    num_states = len(first_S) - 1
    first_S2 = np.empty((num_states + 1, 2), np.int32)
    largest = 0
    for s in range(num_states):
        largest = max(largest, first_S[s + 1] - first_S[s])
    labelled = np.empty((largest, 4), np.int32)
    for s in range(num_states):
        first, count = first_S[s], 0
        for a in range(first_S[s], first_S[s + 1]):
            if arc_A4[a, LABEL] == 0:
                for column in range(4):
                    arc_A4[first, column] = arc_A4[a, column]
                first += 1
            else:
                for column in range(4):
                    labelled[count, column] = arc_A4[a, column]
                count += 1
        for k in range(count):
            for column in range(4):
                arc_A4[first + k, column] = labelled[k, column]
        first_S2[s, 0], first_S2[s, 1] = first_S[s], first
    first_S2[num_states, 0] = first_S2[num_states, 1] = first_S[num_states]
    for a in range(len(arc_A4)):
        target = arc_A4[a, TARGET]
        if first_S2[target, 1] > first_S2[target, 0]:
            arc_A4[a, TARGET] = ~target
    return first_S2
