"""The phonetic decision tree, which maps an HMM state in its phonetic context to a pdf.

Each root has one tree per HMM state. A root is a set of phones that may share pdfs, such as the position variants of
one phone. An inner node asks whether the phone at one position of the window is in a set. A leaf is a pdf. A monophone
system is the special case of a window of one phone and no questions.

Shapes: M windows of C phones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from asr_am.data.temporary import replacing
from asr_am.data.textfile import load_json
from asr_am.errors import InputError
from asr_am.hmm import REMEDY


@dataclass(frozen=True)
class Split:
    """The question whether the phone at `position` of the window (from 0, left to right) is in `phones`."""

    position: int
    phones: frozenset[int]
    yes: Node
    no: Node


Node = int | Split


@dataclass(frozen=True)
class Root:
    """Phones that share trees, one tree per HMM state."""

    phones: tuple[int, ...]
    states: tuple[Node, ...]


@dataclass(frozen=True)
class DecisionTree:
    """The trees of all roots. Implements the `Tree` protocol of `asr_am.hmm.states`.

    Attributes:
        width: phones of a window, 1 or 3.
        roots: all roots. Each phone has one.
        num_pdfs: number of leaves, numbered from 0.
    """

    width: int
    roots: tuple[Root, ...]
    num_pdfs: int = field(init=False)
    _root_of: dict[int, Root] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        leaves = {pdf for root in self.roots for node in root.states for pdf in _leaves(node)}
        root_of = {phone: root for root in self.roots for phone in root.phones}
        if leaves != set(range(len(leaves))):
            raise ValueError("leaves are not numbered from 0 without gaps")
        if len(root_of) != sum(len(root.phones) for root in self.roots):
            raise ValueError("a phone has two roots")
        object.__setattr__(self, "num_pdfs", len(leaves))
        object.__setattr__(self, "_root_of", root_of)

    def pdf(self, window: tuple[int, ...], state: int) -> int:
        """Returns the pdf of `state` (from 0) of the window's centre phone. Raises KeyError if it has no root."""
        node = self._root_of[window[self.width // 2]].states[state]
        while isinstance(node, Split):
            node = node.yes if window[node.position] in node.phones else node.no
        return node

    def pdfs(self, windows_MC: np.ndarray, state_M: np.ndarray) -> np.ndarray:
        """Returns the pdf of a state (from 0) of each window's centre phone, int32 [M].

        Raises KeyError if a phone of a window is above those of all roots, or the centre phone has no root.
        """
        flat = self._flat
        centre_M = windows_MC[:, self.width // 2]
        unknown_M = (windows_MC >= len(flat.first_PK)).any(axis=1)
        node_M = flat.first_PK[np.where(unknown_M, 0, centre_M), state_M]
        unknown_M |= node_M == NO_NODE
        if unknown_M.any():
            raise KeyError(f"window {windows_MC[unknown_M][0].tolist()}")
        rows = np.flatnonzero(node_M >= 0)
        while rows.size:
            node = node_M[rows]
            yes = flat.yes_NP[node, windows_MC[rows, flat.position_N[node]]]
            node_M[rows] = np.where(yes, flat.yes_N[node], flat.no_N[node])
            rows = rows[node_M[rows] >= 0]
        return ~node_M

    @cached_property
    def _flat(self) -> FlatTrees:
        return FlatTrees.of(self.roots)

    def leaves(self, phone: int, state: int) -> list[int]:
        """Returns every pdf that `state` of `phone` has in some context, sorted."""
        root = self._root_of[phone]
        return sorted(set(_leaves(root.states[state], self.width // 2, phone)))

    def save(self, path: Path) -> None:
        """Writes JSON, atomically."""
        roots = [{"phones": root.phones, "states": [_to_json(node) for node in root.states]} for root in self.roots]
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"width": self.width, "roots": roots}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DecisionTree:
        """Reads what `save` wrote. Raises InputError if the file is missing, damaged or inconsistent."""
        try:
            content = load_json(path)
            width = content["width"]
            if width not in (1, 3):
                raise ValueError(f"width {width!r}")
            roots = tuple(
                Root(tuple(map(int, root["phones"])), tuple(_from_json(node, width) for node in root["states"]))
                for root in content["roots"]
            )
            return cls(width, roots)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(f"{path}: not a readable decision tree ({error}); {REMEDY}") from error


NO_NODE = np.iinfo(np.int32).min


@dataclass(frozen=True)
class FlatTrees:
    """All trees as arrays, to look up many windows at once. A node is the number of a question, or ~pdf for a leaf.

    Shapes: P phones, K states, N questions.

    Attributes:
        first_PK: the first node of the tree of each phone's state, NO_NODE where there is none.
        position_N: the position in the window that a question is about.
        yes_NP: whether the answer is yes for a phone at that position.
        yes_N, no_N: the node after that answer.
    """

    first_PK: np.ndarray
    position_N: np.ndarray
    yes_NP: np.ndarray
    yes_N: np.ndarray
    no_N: np.ndarray

    @classmethod
    def of(cls, roots: Sequence[Root]) -> FlatTrees:
        questions: list[tuple[Split, int, int]] = []

        def number(node: Node) -> int:
            if not isinstance(node, Split):
                return ~node
            questions.append((node, number(node.yes), number(node.no)))
            return len(questions) - 1

        num_phones = 1 + max(phone for root in roots for phone in root.phones)
        first_PK = np.full((num_phones, max(len(root.states) for root in roots)), NO_NODE, np.int32)
        for root in roots:
            first_PK[list(root.phones), : len(root.states)] = [number(node) for node in root.states]
        yes_NP = np.zeros((len(questions), num_phones), bool)
        for (question, _, _), yes_P in zip(questions, yes_NP, strict=True):
            yes_P[[phone for phone in question.phones if phone < num_phones]] = True
        rows_N3 = np.array([(question.position, yes, no) for question, yes, no in questions], np.int32).reshape(-1, 3)
        position_N, yes_N, no_N = rows_N3.T
        return cls(first_PK, position_N, yes_NP, yes_N, no_N)


def monophone_tree(roots: Sequence[Sequence[int]], states_P: Mapping[int, int]) -> DecisionTree:
    """Returns a tree with one pdf per state of each root. Phones of one root have equally many states."""
    pdf = 0
    built = []
    for phones in roots:
        count = states_P[phones[0]]
        built.append(Root(tuple(phones), tuple(range(pdf, pdf + count))))
        pdf += count
    return DecisionTree(1, tuple(built))


def _leaves(node: Node, centre: int = -1, phone: int = -1) -> Iterator[int]:
    """Yields the leaves below `node`. With `phone`, only those it can reach as the phone at position `centre`."""
    if not isinstance(node, Split):
        yield node
    elif node.position != centre:
        yield from _leaves(node.yes, centre, phone)
        yield from _leaves(node.no, centre, phone)
    else:
        yield from _leaves(node.yes if phone in node.phones else node.no, centre, phone)


def _to_json(node: Node) -> Any:
    if not isinstance(node, Split):
        return node
    return {
        "position": node.position, "phones": sorted(node.phones),
        "yes": _to_json(node.yes), "no": _to_json(node.no),
    }  # fmt: skip


def _from_json(node: Any, width: int) -> Node:
    if isinstance(node, int) and not isinstance(node, bool):
        return node
    position = node["position"]
    if position not in range(width):
        raise ValueError(f"question about position {position!r} of {width}")
    phones = frozenset(int(phone) for phone in node["phones"])
    return Split(position, phones, _from_json(node["yes"], width), _from_json(node["no"], width))
