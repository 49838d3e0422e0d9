"""The inner loops over frames, compiled by numba: the E-step of mixtures, and the best path through an alignment graph.

They take frames in the order of time and release the GIL, so threads share mixtures, and nothing is sorted or sent
between processes. Both are in one file, as numba's cache does not notice changes of a function in another one. Nothing
here checks its input.

The beams of `best_path` are those of Kaldi's faster-decoder.cc. Scores are computed when a token first needs them: in a
frame, few pdfs of a graph are needed.

Shapes: T frames, D feature dimension, W = 2D padded to a multiple of LANES, G Gaussians of all pdfs, P pdfs, S graph
states, A arcs, Q pdfs of one graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asr_am.compiled import compiled

MIN_ACTIVE = 20  # tokens that no beam removes, as in kaldi_decoder
BEAM_DELTA = 0.5  # added to the distance of token MIN_ACTIVE where that decides
LANES = 16  # float32 numbers of a vector register
TOGETHER = 4  # frames
FIRST_SIZE = 4096  # tokens

# Sums may be reordered, so that they use vector registers. Not where NaN means something.
reordered = compiled(fastmath=True)


class Mixtures(NamedTuple):
    """Mixtures as the loops read them, see `DiagGmms`.

    Attributes:
        linear_GW: coefficients of x and of x*x in the log density, then zeros. float32.
        constant_G: log weight plus log normaliser, float32.
        offsets_P1: first Gaussian of each pdf, and G.
        largest: Gaussians of the largest pdf.
    """

    linear_GW: np.ndarray
    constant_G: np.ndarray
    offsets_P1: np.ndarray
    largest: int


class AlignGraph(NamedTuple):
    """The alignment graph of one utterance, arcs sorted by source state.

    Attributes:
        start: start state.
        first_S1: first arc of each state, and A.
        target_A: destination state.
        label_A: graph label, 0 for arcs without a frame.
        column_A: column of the scores that an arc with a label reads.
        weight_A: costs, float32.
        final_S: final costs, infinite for states that are not final. float32.
    """

    start: int
    first_S1: np.ndarray
    target_A: np.ndarray
    label_A: np.ndarray
    column_A: np.ndarray
    weight_A: np.ndarray
    final_S: np.ndarray


class Scores(NamedTuple):
    """The scores of one utterance.

    Attributes:
        scaled_TQ: scaled log-likelihoods, float32. NaN where one is not computed yet.
        x_TD: frames. Without columns if all scores are computed.
        mixtures: mixtures that compute scores.
        pdf_Q: pdf of each column.
        boost_P: added to the log-likelihood of each pdf, float32.
        scale: acoustic scale.
    """

    scaled_TQ: np.ndarray
    x_TD: np.ndarray
    mixtures: Mixtures
    pdf_Q: np.ndarray
    boost_P: np.ndarray
    scale: np.float32


@reordered
def _log_densities(mixtures: Mixtures, pdf: int, x_W: np.ndarray, density_K: np.ndarray) -> np.float32:
    """Sets the log densities of the Gaussians of a pdf, minus the highest, which it returns."""
    begin, end = mixtures.offsets_P1[pdf], mixtures.offsets_P1[pdf + 1]
    highest = np.float32(-np.inf)
    for g in range(begin, end):
        row_W = mixtures.linear_GW[g]
        total = mixtures.constant_G[g]
        for w in range(len(x_W)):
            total += row_W[w] * x_W[w]
        density_K[g - begin] = total
        highest = max(highest, total)
    for k in range(end - begin):
        density_K[k] -= highest
    return highest


@reordered
def _set_squares(x_D: np.ndarray, x_W: np.ndarray) -> None:
    """Sets the first 2D values of `x_W` to x and x*x."""
    for d in range(len(x_D)):
        x_W[d] = x_D[d]
        x_W[len(x_D) + d] = x_D[d] * x_D[d]


@compiled
def accumulate_frames(
    mixtures: Mixtures, pdf_T: np.ndarray, x_TD: np.ndarray, other_TD: np.ndarray, occ_G: np.ndarray,
    sums_GW: np.ndarray,
) -> float:  # fmt: skip
    """Adds the statistics of a block of frames. Those of a pdf are taken TOGETHER at a time, which share its Gaussians.

    Args:
        pdf_T: pdf of each frame, negative for frames to ignore. int32.
        x_TD: frames that posteriors are computed from.
        other_TD: frames that are summed, usually the same.
        occ_G: occupancies, float64, changed in place.
        sums_GW: weighted sums of x and of x*x, then zeros, float64, changed in place.

    Returns:
        The log-likelihood of the frames.
    """
    order, bounds_P1 = _by_pdf(pdf_T, len(mixtures.offsets_P1) - 1)
    width = mixtures.linear_GW.shape[1]
    x_KW, other_KW = np.zeros((TOGETHER, width), np.float32), np.zeros((TOGETHER, width), np.float32)
    density_KG = np.empty((TOGETHER, mixtures.largest), np.float32)
    loglik = 0.0
    for pdf in range(len(bounds_P1) - 1):
        begin, size = mixtures.offsets_P1[pdf], mixtures.offsets_P1[pdf + 1] - mixtures.offsets_P1[pdf]
        for first in range(bounds_P1[pdf], bounds_P1[pdf + 1], TOGETHER):
            count = min(TOGETHER, bounds_P1[pdf + 1] - first)
            for k in range(count):
                _set_squares(x_TD[order[first + k]], x_KW[k])
                _set_squares(other_TD[order[first + k]], other_KW[k])
            _densities_together(mixtures, begin, size, x_KW, density_KG)
            for k in range(TOGETHER):
                if k < count:
                    loglik += _to_posteriors(density_KG[k], size)
                else:
                    density_KG[k, :size] = 0
            _add_together(density_KG, other_KW, occ_G[begin : begin + size], sums_GW[begin : begin + size])
    return loglik


@compiled
def _by_pdf(pdf_T: np.ndarray, num_pdfs: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns frames sorted by pdf, and where those of each pdf begin, [P + 1]."""
    next_P = np.zeros(num_pdfs + 1, np.int64)
    for t in range(len(pdf_T)):
        if pdf_T[t] >= 0:
            next_P[pdf_T[t] + 1] += 1
    for p in range(num_pdfs):
        next_P[p + 1] += next_P[p]
    bounds_P1, order = next_P.copy(), np.empty(len(pdf_T), np.int64)
    for t in range(len(pdf_T)):
        if pdf_T[t] >= 0:
            order[next_P[pdf_T[t]]] = t
            next_P[pdf_T[t]] += 1
    return order, bounds_P1


@reordered
def _densities_together(mixtures: Mixtures, begin: int, size: int, x_KW: np.ndarray, density_KG: np.ndarray) -> None:
    """Sets the log densities of TOGETHER frames."""
    a_W, b_W, c_W, d_W = x_KW[0], x_KW[1], x_KW[2], x_KW[3]
    for g in range(size):
        row_W, constant = mixtures.linear_GW[begin + g], mixtures.constant_G[begin + g]
        a, b, c, d = constant, constant, constant, constant
        for w in range(len(row_W)):
            a += row_W[w] * a_W[w]
            b += row_W[w] * b_W[w]
            c += row_W[w] * c_W[w]
            d += row_W[w] * d_W[w]
        density_KG[0, g], density_KG[1, g], density_KG[2, g], density_KG[3, g] = a, b, c, d


@reordered
def _to_posteriors(density_G: np.ndarray, size: int) -> float:
    """Turns log densities of a frame into posteriors. Returns the log-likelihood."""
    highest, total = density_G[0], np.float32(0)
    for g in range(size):
        highest = max(highest, density_G[g])
    for g in range(size):
        density_G[g] = np.exp(density_G[g] - highest)
        total += density_G[g]
    for g in range(size):
        density_G[g] /= total
    return np.float64(highest) + np.float64(np.log(total))


@reordered
def _add_together(density_KG: np.ndarray, x_KW: np.ndarray, occ_G: np.ndarray, sums_GW: np.ndarray) -> None:
    """Adds TOGETHER frames with these posteriors. The sum over them is float32."""
    a_W, b_W, c_W, d_W = x_KW[0], x_KW[1], x_KW[2], x_KW[3]
    for g in range(len(occ_G)):
        a, b, c, d = density_KG[0, g], density_KG[1, g], density_KG[2, g], density_KG[3, g]
        occ_G[g] += a + b + c + d
        row_W = sums_GW[g]
        for w in range(len(a_W)):
            row_W[w] += a * a_W[w] + b * b_W[w] + c * c_W[w] + d * d_W[w]


@compiled
def add_moments(x_TD: np.ndarray, sum_D: np.ndarray, square_D: np.ndarray) -> None:
    """Adds the frames and their squares to float64 sums."""
    for t in range(len(x_TD)):
        for d in range(len(sum_D)):
            sum_D[d] += x_TD[t, d]
            square_D[d] += x_TD[t, d] * x_TD[t, d]


@reordered
def _log_likelihood(mixtures: Mixtures, pdf: int, x_W: np.ndarray, density_K: np.ndarray) -> np.float32:
    highest = _log_densities(mixtures, pdf, x_W, density_K)
    total = np.float32(0.0)
    for k in range(mixtures.offsets_P1[pdf + 1] - mixtures.offsets_P1[pdf]):
        total += np.exp(density_K[k])
    return highest + np.log(total)


@compiled
def _score(scores: Scores, t: int, column: int, x_W: np.ndarray, density_K: np.ndarray) -> np.float32:
    """Returns a scaled log-likelihood, computed where it is not known."""
    known = scores.scaled_TQ[t, column]
    if known == known:  # not NaN
        return known
    pdf = scores.pdf_Q[column]
    loglik = _log_likelihood(scores.mixtures, pdf, x_W, density_K) + scores.boost_P[pdf]
    scores.scaled_TQ[t, column] = loglik * scores.scale
    return scores.scaled_TQ[t, column]


class Tokens(NamedTuple):
    """Tokens of one frame by position, and the position of each state's token, -1 without one.

    Attributes:
        state, cost: of each token. Costs are float64.
        slot_S: position of the token in each state.
    """

    state: np.ndarray
    cost: np.ndarray
    slot_S: np.ndarray


class History(NamedTuple):
    """Tokens of all frames: the token before, -1 for the first, and the arc that was taken."""

    before: np.ndarray
    arc: np.ndarray


@compiled
def best_path(graph: AlignGraph, scores: Scores, beam: float, label_T: np.ndarray) -> float:
    """Finds the best path to a final state.

    Args:
        scores: its scores. Those that are needed are computed.
        beam: on costs.
        label_T: set to the labels of the path.

    Returns:
        The sum of the path's scores, NaN if no path ends in a final state.
    """
    num_frames, num_states = len(label_T), len(graph.final_S)
    x_W = np.zeros(scores.mixtures.linear_GW.shape[1], np.float32)
    density_K = np.empty(scores.mixtures.largest, np.float32)
    now = Tokens(np.empty(num_states, np.int32), np.empty(num_states), np.full(num_states, -1, np.int32))
    following = Tokens(np.empty(num_states, np.int32), np.empty(num_states), np.full(num_states, -1, np.int32))
    stack, stacked = np.empty(num_states, np.int32), np.zeros(num_states, np.bool_)
    history = History(np.empty(FIRST_SIZE, np.int32), np.empty(FIRST_SIZE, np.int32))
    now.state[0], now.cost[0], now.slot_S[graph.start] = graph.start, 0, 0
    history.before[0], history.arc[0] = -1, -1
    base, count, limit = np.int64(0), np.int64(1), np.inf
    for t in range(num_frames + 1):
        history = _with_room(history, base + count, 2 * num_states)
        count = _follow_epsilons(graph, now, count, history, base, limit, stack, stacked)
        if t == num_frames or count == 0:
            break
        _set_squares(scores.x_TD[t], x_W)
        cutoff, width, best = _cutoff(now.cost[:count], beam)
        limit, found, next_base = np.inf, np.int64(0), base + count
        for k in range(-1, count):  # the best token first, for a limit
            i = best if k < 0 else k
            if now.cost[i] >= cutoff:
                continue
            s = now.state[i]
            for a in range(graph.first_S1[s], graph.first_S1[s + 1]):
                if graph.label_A[a] == 0:
                    continue
                score = np.float64(_score(scores, t, graph.column_A[a], x_W, density_K))
                cost = now.cost[i] + graph.weight_A[a] - score
                if cost >= limit and k >= 0:
                    continue
                limit = min(limit, cost + width)
                if k < 0:
                    continue
                _, found = _place(following, found, history, next_base, graph.target_A[a], cost, base + i, a)
        for i in range(count):
            now.slot_S[now.state[i]] = -1
        now, following = following, now
        base, count = next_base, found
    if count == 0:
        return np.nan
    return _trace_back(graph, scores, now, count, history, base, label_T)


@compiled
def _with_room(history: History, used: int, more: int) -> History:
    """Returns the history with room for more tokens."""
    if used + more <= len(history.before):
        return history
    size = 2 * (used + more)
    before, arc = np.empty(size, np.int32), np.empty(size, np.int32)
    for i in range(used):
        before[i], arc[i] = history.before[i], history.arc[i]
    return History(before, arc)


@compiled
def _cutoff(cost: np.ndarray, beam: float) -> tuple[float, float, int]:
    """Returns the cost that tokens to be expanded are below, the beam of the next frame, and the best token."""
    best, within = 0, 0
    for i in range(len(cost)):
        if cost[i] < cost[best]:
            best = i
    if len(cost) <= MIN_ACTIVE:
        return np.inf, np.inf, best
    for i in range(len(cost)):
        within += cost[i] <= cost[best] + beam
    if within > MIN_ACTIVE:
        return cost[best] + beam, beam, best
    lowest = np.full(MIN_ACTIVE + 1, np.inf)  # the lowest costs so far, sorted
    for i in range(len(cost)):
        k = MIN_ACTIVE
        while k >= 0 and cost[i] < lowest[k]:
            if k < MIN_ACTIVE:
                lowest[k + 1] = lowest[k]
            k -= 1
        if k < MIN_ACTIVE:
            lowest[k + 1] = cost[i]
    return lowest[MIN_ACTIVE], lowest[MIN_ACTIVE] - cost[best] + BEAM_DELTA, best


@compiled
def _place(
    tokens: Tokens, count: int, history: History, base: int, state: int, cost: float, before: int, arc: int
) -> tuple[int, int]:
    """Gives a state a token, unless it has one that costs no more.

    Returns:
        The token's position, -1 if it was not placed. Then the number of tokens.
    """
    slot = tokens.slot_S[state]
    if slot < 0:
        slot = count
        tokens.state[slot], tokens.slot_S[state] = state, slot
        count += 1
    elif cost >= tokens.cost[slot]:
        return -1, count
    tokens.cost[slot] = cost
    history.before[base + slot], history.arc[base + slot] = before, arc
    return slot, count


@compiled
def _follow_epsilons(
    graph: AlignGraph, tokens: Tokens, count: int, history: History, base: int, limit: float, stack: np.ndarray,
    stacked: np.ndarray,
) -> int:  # fmt: skip
    """Follows arcs without labels from the first `count` tokens. Returns the number of tokens after that."""
    waiting = 0
    for i in range(count):
        stack[waiting] = i
        stacked[i] = True
        waiting += 1
    while waiting > 0:
        waiting -= 1
        i = stack[waiting]
        stacked[i] = False
        if tokens.cost[i] > limit:
            continue
        s = tokens.state[i]
        for a in range(graph.first_S1[s], graph.first_S1[s + 1]):
            if graph.label_A[a] > 0:
                continue
            cost = tokens.cost[i] + graph.weight_A[a]
            if cost > limit:
                continue
            slot, count = _place(tokens, count, history, base, graph.target_A[a], cost, base + i, a)
            if slot >= 0 and not stacked[slot]:
                stack[waiting] = slot
                stacked[slot] = True
                waiting += 1
    return count


@compiled
def _trace_back(
    graph: AlignGraph, scores: Scores, tokens: Tokens, count: int, history: History, base: int, label_T: np.ndarray
) -> float:
    """Sets the labels of the best path that ends in a final state. Returns the sum of its scores, NaN without one."""
    best, lowest = -1, np.inf
    for i in range(count):
        cost = tokens.cost[i] + graph.final_S[tokens.state[i]]
        if cost < lowest:
            best, lowest = i, cost
    if best < 0:
        return np.nan
    token, t, total = base + best, len(label_T) - 1, 0.0
    while history.before[token] >= 0:
        a = history.arc[token]
        if graph.label_A[a] > 0:
            label_T[t] = graph.label_A[a]
            total += scores.scaled_TQ[t, graph.column_A[a]]
            t -= 1
        token = history.before[token]
    return total
