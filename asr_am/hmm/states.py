"""Tied HMM states: the graph labels that alignments consist of and that decoding graphs have as input labels.

A *graph label* identifies one (phone, HMM state, pdf) triple and plays the role of Kaldi's transition-id. Label l is
row l - 1 of `labels_L3`, because 0 is epsilon in a graph, and kaldi_decoder's `DecodableCtc` reads column l - 1 for
input label l. Topologies are left to right without skips: every state has a self-loop and one exit.

In chain models (`train_chain`) a phone is one state whose first step has a pdf of its own. Its label is that of state
0, and the label of its self-loop that of a state 1.

Shapes: L graph labels, P phones, S states per phone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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

    def pdfs(self, windows_MC: np.ndarray, state_M: np.ndarray) -> np.ndarray:
        """Returns the pdf of a state of the centre phone of each window, int32 [M]. See `pdf`."""
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
        first_steps: whether the first step of a phone has its own pdf. Each label of state 0 has then one of state 1
            with the pdf that is num_pdfs / 2 higher.
    """

    labels_L3: np.ndarray
    loop_L: np.ndarray
    next_L: np.ndarray
    states_P: Mapping[int, int]
    num_pdfs: int
    subsampling: int = 1
    first_steps: bool = False
    _index: dict[tuple[int, int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {(int(p), int(s), int(d)): row + 1 for row, (p, s, d) in enumerate(self.labels_L3)}
        object.__setattr__(self, "_index", index)

    @property
    def pdf_L(self) -> np.ndarray:
        """The pdf of each label (index label - 1), int32."""
        return self.labels_L3[:, 2]

    @cached_property
    def loop_label_L(self) -> np.ndarray:
        """The label of the self-loop after each label, int32. Without `first_steps` it is the same."""
        own_L = np.arange(1, len(self.labels_L3) + 1, dtype=np.int32)
        if not self.first_steps:
            return own_L
        first_L = self.labels_L3[:, 1] == 0
        later = self.labels_L3[first_L] + np.array([0, 1, self.num_pdfs // 2])
        own_L[first_L] = [self.label(*triple) for triple in later.tolist()]
        return own_L

    @cached_property
    def first_label_L(self) -> np.ndarray:
        """The label of state 0 for each label of state 1, the inverse of `loop_label_L`, int32."""
        first_L = np.arange(1, len(self.labels_L3) + 1, dtype=np.int32)
        loop_L = self.loop_label_L
        changed_L = loop_L != first_L
        first_L[loop_L[changed_L] - 1] = np.flatnonzero(changed_L) + 1
        return first_L

    def label(self, phone: int, state: int, pdf: int) -> int:
        """Returns the graph label (from 1) of a triple. Raises KeyError if the table has none."""
        return self._index[phone, state, pdf]

    def save(self, path: Path) -> None:
        """Writes .npz (plain arrays, no pickles), atomically."""
        phones = np.array(sorted(self.states_P), dtype=np.int32)
        counts = np.array([self.states_P[int(p)] for p in phones], dtype=np.int32)
        labels = {"labels": self.labels_L3, "loop": self.loop_L, "next": self.next_L}
        sizes: dict[str, np.ndarray] = {"num_pdfs": np.array(self.num_pdfs, np.int32)}
        if self.first_steps:
            sizes["subsampling"] = np.array(self.subsampling, np.int32)
        write_npz(path, labels | {"phones": phones, "counts": counts} | sizes)

    @classmethod
    def load(cls, path: Path) -> StateTable:
        """Reads what `save` wrote. Raises InputError if the file is missing, damaged or inconsistent."""
        labels, loop, leave, phones, counts, num_pdfs, *chain = read_npz(
            path, "labels", "loop", "next", "phones", "counts", "num_pdfs", remedy=REMEDY, optional=["subsampling"]
        )
        try:
            states_P = dict(zip(phones.tolist(), counts.tolist(), strict=True))
            subsampling = int(chain[0]) if chain else 1
            table = cls(labels, loop, leave, states_P, int(num_pdfs), subsampling, bool(chain))
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
        beyond = int(self.first_steps)
        if any(state >= self.states_P.get(phone, 0) + beyond for phone, state in labels_L3[:, :2].tolist()):
            raise ValueError("a state beyond its phone's topology")
        try:
            self.loop_label_L  # noqa: B018
        except KeyError as error:
            raise ValueError("a first step without a self-loop") from error
        if not np.allclose(np.exp(self.loop_L) + np.exp(self.next_L), np.ones(len(labels_L3)), atol=1e-3):
            raise ValueError("self-loop and exit probabilities that do not sum to one")
        if self.subsampling < 1:
            raise ValueError(f"{self.subsampling} frames per step")
