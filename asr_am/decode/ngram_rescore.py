"""Rescoring of lattices with a larger n-gram model than the decoding graph has.

The lattice is composed with both models at once: the small model's cost is taken from the graph costs and the large
model's is added, as in Kaldi's lmrescore.sh. A state of the result is a lattice state with a history of each model.

Shapes: A arcs, S states of the lattice, N states of the result, B its arcs.
"""

from __future__ import annotations

import numpy as np

from asr_am.compiled import compiled
from asr_am.decode.lattice import Lattice, LmScale, beam_excess, costs, sort_states
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.lang.ngram_automaton import LmPair, NgramAutomaton

MAX_HISTORIES = 200  # kept for a lattice state, the best ones


def rescore(lattice: Lattice, models: LmPair, scale: LmScale, beam: float) -> FstArrays:
    """Replaces the language model costs of a lattice.

    Args:
        lattice: a lattice with the costs of `models.small`.
        scale: LM scale that paths are compared at.
        beam: paths that cost this much more than the best path are left out, in units of graph cost.

    Returns:
        The lattice with the costs of `models.large`, its states in topological order. Its paths are paths of `lattice`.
    """
    order = np.argsort(lattice.source_A, kind="stable")
    first_S = np.searchsorted(lattice.source_A[order], np.arange(lattice.num_states + 1))
    cost_A = costs(lattice, [scale])[:, 0]
    arc_B, source_B, target_B, change_B, end, count = _compose(
        first_S, order, lattice.target_A, lattice.word_A, cost_A, models.small, models.large, beam
    )
    if end < 0:
        raise InputError("no path of a lattice is in its language model; run stage 1 (lang) again")
    target_B[target_B == end] = count  # the end is the last state
    weight_B2 = np.stack([lattice.graph_A[arc_B] + change_B, lattice.acoustic_A[arc_B]], axis=1)
    arcs_B4 = np.stack([source_B, target_B, lattice.label_A[arc_B], lattice.word_A[arc_B]], axis=1)
    expanded = Lattice.from_arrays(_fst(arcs_B4, weight_B2, count + 1))
    return sort_states(_pruned(expanded, scale, beam))


def _pruned(lattice: Lattice, scale: LmScale, beam: float) -> FstArrays:
    """Returns the lattice without arcs whose best path costs `beam` more than the best path of all."""
    kept = np.flatnonzero(beam_excess(lattice, scale) <= beam)
    arcs_A4 = np.stack([lattice.source_A, lattice.target_A, lattice.label_A, lattice.word_A], axis=1)[kept]
    weight_A2 = np.stack([lattice.graph_A, lattice.acoustic_A], axis=1)[kept]
    return _fst(arcs_A4, weight_A2, lattice.num_states)


def _fst(arcs_A4: np.ndarray, weight_A2: np.ndarray, num_states: int) -> FstArrays:
    """Returns arcs from state 0 to the last state as an FST. Arcs to the end of a `Lattice` have its final costs."""
    final_S2 = np.full((num_states, 2), np.inf)
    ends = arcs_A4[:, 1] == num_states - 1
    final_S2[arcs_A4[ends, 0]] = weight_A2[ends]
    return FstArrays.build(0, arcs_A4[~ends], weight_A2[~ends], final_S2)


@compiled
def _compose(
    first_S: np.ndarray, order_A: np.ndarray, target_A: np.ndarray, word_A: np.ndarray, cost_A: np.ndarray,
    small: NgramAutomaton, large: NgramAutomaton, beam: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int]:  # fmt: skip
    """Composes a lattice with two models.

    Args:
        first_S: [S + 1], first position in `order_A` of the arcs from each state.
        order_A: arcs by source state.
        cost_A: costs under the LM scale.
        beam: states whose cost exceeds the best with the same lattice state by more are not followed.

    Returns:
        For each arc on a path to the end its lattice arc, source, target and the change of its graph cost. Then the end
        state, -1 if no path reaches it, and the number of states. State 0 is the start.
    """
    num_states = len(first_S) - 1
    small_N = [small.start]  # history in the small model, of each state of the result
    large_N = [large.start]
    cost_N = [0.0]  # of the best path from the start
    next_N = [-1]  # next state of the result with the same lattice state
    head_S = np.full(num_states, -1, dtype=np.int64)
    head_S[0] = 0
    arc_B, source_B, target_B, change_B = [0], [0], [0], [0.0]  # a first element gives the lists their types
    for state in range(num_states - 1):
        followed = _best(head_S[state], next_N, cost_N, beam)
        for position in range(first_S[state], first_S[state + 1]):
            arc = order_A[position]
            target, word = target_A[arc], word_A[arc]
            for source in followed:
                before, after, change = small_N[source], large_N[source], 0.0
                if target == num_states - 1:
                    word = large.end
                if word > 0:
                    before, old = step(small, before, word)
                    after, new = step(large, after, word)
                    change = new - old
                if not np.isfinite(change):
                    continue
                cost = cost_N[source] + cost_A[arc] + change
                if target == num_states - 1:
                    before = after = -1  # one end for all histories
                found = head_S[target]
                while found >= 0 and (small_N[found] != before or large_N[found] != after):
                    found = next_N[found]
                if found < 0:
                    found = len(cost_N)
                    small_N.append(before)
                    large_N.append(after)
                    cost_N.append(cost)
                    next_N.append(head_S[target])
                    head_S[target] = found
                cost_N[found] = min(cost_N[found], cost)
                arc_B.append(arc)
                source_B.append(source)
                target_B.append(found)
                change_B.append(change)
    end = head_S[num_states - 1]
    reaches_N = np.zeros(len(cost_N), dtype=np.bool_)  # the end. Histories outside the beam or the model do not
    if end >= 0:
        reaches_N[end] = True
    for b in range(len(arc_B) - 1, 0, -1):  # all arcs from a state come after those to it
        reaches_N[source_B[b]] |= reaches_N[target_B[b]]
    kept = np.array([b for b in range(1, len(arc_B)) if reaches_N[target_B[b]]])
    arrays = np.array(arc_B)[kept], np.array(source_B)[kept], np.array(target_B)[kept], np.array(change_B)[kept]
    return *arrays, end, len(cost_N)


@compiled
def _best(head: int, next_N: list[int], cost_N: list[float], beam: float) -> list[int]:
    """Returns the states of one chain within `beam` of its best, at most MAX_HISTORIES and those of equal cost."""
    lowest_K = np.full(MAX_HISTORIES, np.inf)  # in ascending order. numba takes seconds to compile a sort
    state = head
    while state >= 0:
        cost, k = cost_N[state], MAX_HISTORIES - 1
        if cost < lowest_K[k]:
            while k > 0 and lowest_K[k - 1] > cost:
                lowest_K[k] = lowest_K[k - 1]
                k -= 1
            lowest_K[k] = cost
        state = next_N[state]
    limit = min(lowest_K[0] + beam, lowest_K[-1])
    kept = [head for _ in range(0)]
    state = head
    while state >= 0:
        if cost_N[state] <= limit:
            kept.append(state)
        state = next_N[state]
    return kept


# Here and not beside NgramAutomaton: numba's cache of `_compose` does not notice changes in another file.
@compiled
def step(automaton: NgramAutomaton, state: int, word: int) -> tuple[int, float]:
    """Returns the state after `word` and the word's cost, infinity if the model does not have it."""
    cost = 0.0
    while True:
        low, end = automaton.first_S[state], automaton.first_S[state + 1]
        high = end
        while low < high:
            middle = (low + high) // 2
            if automaton.word_A[middle] < word:
                low = middle + 1
            else:
                high = middle
        if low < end and automaton.word_A[low] == word:
            return automaton.target_A[low], cost + automaton.cost_A[low]
        if automaton.backoff_S[state] < 0:
            return state, np.inf
        cost += automaton.backoff_cost_S[state]
        state = automaton.backoff_S[state]


@compiled
def steps(automaton: NgramAutomaton, state_Q: np.ndarray, word_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the states after words and the costs of the words, see `step`."""
    next_Q, cost_Q = np.empty(len(state_Q), np.int64), np.empty(len(state_Q))
    for q in range(len(state_Q)):
        next_Q[q], cost_Q[q] = step(automaton, state_Q[q], word_Q[q])
    return next_Q, cost_Q
