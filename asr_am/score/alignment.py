"""Minimum cost alignment of two word networks with the costs and tie-breaking of sclite.

Costs: 0 for a match, 4 for a substitution, 3 for an insertion or deletion, 2 for skipping an `(optional)` word, 0.001
for `@`, and 1 for `@` against `@`, added up as C floats. Source: wwd_WORD in word.c and net_dp.c of SCTK.
Legend: a, b = arcs of reference and hypothesis, D = distances, one row per reference arc.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, MutableSequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from asr_am.errors import InputError
from asr_am.score.files import float32
from asr_am.score.word_network import Network, NetworkWord

CORRECT, SUBSTITUTION, DELETION, INSERTION = "C", "S", "D", "I"
MAX_CELLS = 300_000_000  # 1.2 GB
SMALL_CELLS = 1_000_000  # below, use lists of Python floats: faster than arrays, but eight times larger
LONG_ROW = 60  # hypothesis words above which rows are computed with NumPy
NULL_COST = float32(0.001)

Row = MutableSequence[float]
Rows = list[Row]


@dataclass(frozen=True, slots=True)
class Pair:
    """One column of an alignment. `reference` or `hypothesis` is None for an insertion or deletion."""

    operation: str
    reference: NetworkWord | None
    hypothesis: NetworkWord | None


def align(reference: Network, hypothesis: Network) -> list[Pair]:
    """Returns the alignment that `sclite -F -D` finds. Skipped optional words are correct, `@` is omitted.

    Raises:
        InputError: the segment is too long (`MAX_CELLS`).
    """
    cells = len(reference.words) * len(hypothesis.words)
    if cells > MAX_CELLS:
        raise InputError(
            f"{len(reference.words) - 1} reference words against {len(hypothesis.words) - 1} hypothesis words "
            "are too many for one segment; split it"
        )
    if not (reference.linear and hypothesis.linear):
        rows = _network_rows(reference, hypothesis)
    elif len(hypothesis.words) <= LONG_ROW:
        rows = _linear_rows(reference, hypothesis)
    else:
        rows = _long_linear_rows(reference, hypothesis)
    return _trace_back(reference, hypothesis, rows)


def words_match(reference: NetworkWord, hypothesis: NetworkWord) -> bool:
    """Compares words, with fragments: `-x` matches a word that ends in x, `x-` one that begins with x."""
    if reference.fragment or hypothesis.fragment:
        for fragment, word in ((reference.text, hypothesis.text), (hypothesis.text, reference.text)):
            if len(fragment) > 1 and fragment.startswith(b"-"):
                return word.endswith(fragment[1:])
            if len(fragment) > 1 and fragment.endswith(b"-"):
                return word.startswith(fragment[:-1])
    return reference.text == hypothesis.text


def _skip_cost(word: NetworkWord) -> float:
    if word.null:
        return NULL_COST
    return 2.0 if word.optional else 3.0


def _pair_cost(reference: NetworkWord, hypothesis: NetworkWord) -> float:
    if reference.null and hypothesis.null:
        return 1.0
    return 0.0 if words_match(reference, hypothesis) else 4.0


class _PairCosts:
    """Costs of a reference word against every hypothesis word, cached by reference word."""

    def __init__(self, hypothesis: Network) -> None:
        self.columns = [word for word in hypothesis.words if word]
        plain = not any(word.fragment or word.null for word in self.columns)
        self._texts = [word.text for word in self.columns] if plain else None
        self._known: dict[NetworkWord, list[float]] = {}

    def of(self, word: NetworkWord) -> list[float]:
        costs = self._known.get(word)
        if costs is None:
            if self._texts is None or word.fragment:
                costs = [_pair_cost(word, other) for other in self.columns]
            else:
                text = word.text
                costs = [0.0 if other == text else 4.0 for other in self._texts]
            self._known[word] = costs
        return costs


def _linear_rows(reference: Network, hypothesis: Network) -> Rows:
    """Distances if neither side branches. All costs are integers."""
    costs = _PairCosts(hypothesis)
    insertions = [_skip_cost(word) for word in costs.columns]
    row = [0.0, *accumulate(insertions)]
    rows: Rows = [row]
    for word in reference.words[1:]:
        assert word
        deletion = _skip_cost(word)
        diagonal, left = row[0], row[0] + deletion
        above, row = row, [left]
        for up, pair, insertion in zip(above[1:], costs.of(word), insertions, strict=True):
            left += insertion
            if diagonal + pair < left:
                left = diagonal + pair
            if up + deletion < left:
                left = up + deletion
            row.append(left)
            diagonal = up
        rows.append(row)
    return rows


def _long_linear_rows(reference: Network, hypothesis: Network) -> Rows:
    """Same as `_linear_rows` for long segments: a cumulative minimum replaces the recursion along a row."""
    costs = _PairCosts(hypothesis)
    inserted = np.cumsum([0.0] + [_skip_cost(word) for word in costs.columns])
    row = inserted
    rows: Rows = [_float_array(row)]
    for word in reference.words[1:]:
        assert word
        best = row + _skip_cost(word)
        np.minimum(best[1:], row[:-1] + costs.of(word), out=best[1:])
        row = np.minimum.accumulate(best - inserted) + inserted
        rows.append(_float_array(row))
    return rows


def _network_rows(reference: Network, hypothesis: Network) -> Rows:
    """Distances with branches. Arrays of C floats round every sum as sclite does. Integers need no rounding."""
    costs = _PairCosts(hypothesis)
    arcs = list(zip(hypothesis.before[1:], map(_skip_cost, costs.columns), strict=True))
    integral = not any(word and word.null for word in [*reference.words, *hypothesis.words])
    small = len(reference.words) * len(arcs) < SMALL_CELLS
    new_row: Callable[[Iterable[float]], Row] = list if integral and small else _float_array
    row = new_row([0.0])
    for before, insertion in arcs:
        row.append(min(row[b] for b in before) + insertion)
    rows: Rows = [row]
    for into, word in zip(reference.before[1:], reference.words[1:], strict=True):
        assert word
        above = rows[into[0]] if len(into) == 1 else new_row(map(min, *(rows[a] for a in into)))
        deletion = _skip_cost(word)
        row = new_row([above[0] + deletion])
        for (before, insertion), pair, up in zip(arcs, costs.of(word), above[1:], strict=True):
            if len(before) == 1:
                diagonal, left = above[before[0]], row[before[0]]
            else:
                diagonal, left = min([above[b] for b in before]), min([row[b] for b in before])
            best = left + insertion
            if diagonal + pair < best:
                best = diagonal + pair
            if up + deletion < best:
                best = up + deletion
            row.append(best)
        rows.append(row)
    return rows


def _float_array(values: Iterable[float]) -> Row:
    return array("f", values)


def _trace_back(reference: Network, hypothesis: Network, rows: Rows) -> list[Pair]:
    """Traces back from the best end: substitution if no worse, then deletion if better, else insertion."""
    pairs = []
    _, a, b = _first_minimum(rows, reference.last, hypothesis.last)
    while a or b:
        word, other = reference.words[a], hypothesis.words[b]
        choices = []
        if word and other:
            distance, i, j = _first_minimum(rows, reference.before[a], hypothesis.before[b])
            choices.append((float32(distance + _pair_cost(word, other)), i, j))
        if word:
            distance, i, j = _first_minimum(rows, reference.before[a], (b,))
            choices.append((float32(distance + _skip_cost(word)), i, j))
        if other:
            distance, i, j = _first_minimum(rows, (a,), hypothesis.before[b])
            choices.append((float32(distance + _skip_cost(other)), i, j))
        i, j = _choose(choices)
        pair = _pair(word if i != a else None, other if j != b else None)
        if pair:
            pairs.append(pair)
        a, b = i, j
    return pairs[::-1]


def _choose(choices: list[tuple[float, int, int]]) -> tuple[int, int]:
    """Picks from [substitution, deletion, insertion]. At the margins only one of the last two exists."""
    if len(choices) == 1:
        return choices[0][1:]
    substitution, deletion, insertion = choices
    if substitution[0] <= deletion[0] and substitution[0] <= insertion[0]:
        return substitution[1:]
    return deletion[1:] if deletion[0] < insertion[0] else insertion[1:]


def _first_minimum(rows: Rows, arcs: tuple[int, ...], others: tuple[int, ...]) -> tuple[float, int, int]:
    """Returns the smallest distance among the given cells, the first in the order of the branches."""
    if len(arcs) == 1 and len(others) == 1:
        return rows[arcs[0]][others[0]], arcs[0], others[0]
    return min(((rows[a][b], a, b) for a in arcs for b in others), key=lambda cell: cell[0])


def _pair(word: NetworkWord | None, other: NetworkWord | None) -> Pair | None:
    if word and other:
        if word.null and other.null:
            return None
        return Pair(CORRECT if words_match(word, other) else SUBSTITUTION, word, other)
    only = word or other
    if only is None or only.null:
        return None
    if only.optional:
        return Pair(CORRECT, word, other)
    return Pair(DELETION if word else INSERTION, word, other)
