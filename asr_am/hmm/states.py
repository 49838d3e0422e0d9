"""Tied HMM states: the graph labels that alignments consist of and that decoding graphs have as input labels.

A *graph label* identifies one (phone, HMM state, pdf) triple and plays the role of Kaldi's transition-id. Label l is
row l - 1 of `labels_L3`, because 0 is epsilon in a graph, and kaldi_decoder's `DecodableCtc` reads column l - 1 for
input label l. Topologies are left to right without skips: every state has a self-loop and one exit.

Shapes: L graph labels, P phones, S states per phone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from asr_am.data.npz import read_npz, write_npz
from asr_am.errors import InputError
from asr_am.hmm import REMEDY


class Tree(Protocol):
    """Maps an HMM state in its phonetic context to a pdf."""

    @property
    def width(self) -> int:
        """Phones in the context: 1 (monophone) or 3 (triphone, centre in the middle)."""
        ...

    def pdf(self, window: tuple[int, ...], state: int) -> int:
        """Returns the pdf of a state of the centre phone of `window`.

        Args:
            window: phone ids, 0 beyond the utterance's edge.
            state: HMM state, from 0.
        """
        ...


@dataclass(frozen=True)
class StateTable:
    """Every graph label with its transition probabilities, and the topology.

    Attributes:
        labels_L3: int32 rows (phone id, state from 0, pdf id), unique and sorted.
        loop_L: float32 log probability of the self-loop of the label's state.
        next_L: float32 log probability of its exit. The two probabilities sum to one.
        states_P: number of HMM states of each phone id.
        num_pdfs: number of outputs of a model for these states.
        subsampling: frames of speech per step of the HMM, that is per score in decoding. Alignments in a folder are of
            all frames.
    """

    labels_L3: np.ndarray
    loop_L: np.ndarray
    next_L: np.ndarray
    states_P: Mapping[int, int]
    num_pdfs: int
    subsampling: int = 1
    _index: dict[tuple[int, int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {(int(p), int(s), int(d)): row + 1 for row, (p, s, d) in enumerate(self.labels_L3)}
        object.__setattr__(self, "_index", index)

    @property
    def pdf_L(self) -> np.ndarray:
        """The pdf of each label (index label - 1), int32."""
        return self.labels_L3[:, 2]

    def label(self, phone: int, state: int, pdf: int) -> int:
        """Returns the graph label (from 1) of a triple. Raises KeyError if the table has none."""
        return self._index[phone, state, pdf]

    def save(self, path: Path) -> None:
        """Writes .npz (plain arrays, no pickles), atomically."""
        phones = np.array(sorted(self.states_P), dtype=np.int32)
        counts = np.array([self.states_P[int(p)] for p in phones], dtype=np.int32)
        labels = {"labels": self.labels_L3, "loop": self.loop_L, "next": self.next_L}
        sizes: dict[str, np.ndarray] = {"num_pdfs": np.array(self.num_pdfs, np.int32)}
        if self.subsampling > 1:
            sizes["subsampling"] = np.array(self.subsampling, np.int32)
        write_npz(path, labels | {"phones": phones, "counts": counts} | sizes)

    @classmethod
    def load(cls, path: Path) -> StateTable:
        """Reads what `save` wrote. Raises InputError if the file is missing, damaged or inconsistent."""
        labels, loop, leave, phones, counts, num_pdfs, *subsampling = read_npz(
            path, "labels", "loop", "next", "phones", "counts", "num_pdfs", remedy=REMEDY, optional=["subsampling"]
        )
        try:
            states_P = dict(zip(phones.tolist(), counts.tolist(), strict=True))
            table = cls(labels, loop, leave, states_P, int(num_pdfs), *map(int, subsampling))
            table._validate()
        except (ValueError, TypeError, IndexError) as error:
            raise InputError(f"{path}: holds {error}; {REMEDY}") from error
        return table

    def _validate(self) -> None:
        """Raises ValueError unless the fields are consistent."""
        labels_L3 = self.labels_L3
        if labels_L3.dtype != np.int32 or labels_L3.ndim != 2 or labels_L3.shape[1] != 3 or len(labels_L3) == 0:
            raise ValueError("labels that are not (phone, state, pdf) triples")
        if len(self._index) != len(labels_L3):
            raise ValueError("a label that occurs twice")
        if labels_L3.min() < 0 or int(self.pdf_L.max()) >= self.num_pdfs:
            raise ValueError(f"a pdf beyond its {self.num_pdfs}")
        if any(state >= self.states_P.get(phone, 0) for phone, state in labels_L3[:, :2].tolist()):
            raise ValueError("a state beyond its phone's topology")
        if not np.allclose(np.exp(self.loop_L) + np.exp(self.next_L), np.ones(len(labels_L3)), atol=1e-3):
            raise ValueError("self-loop and exit probabilities that do not sum to one")
        if self.subsampling < 1:
            raise ValueError(f"{self.subsampling} frames per step")
