"""The inner loops of the lattice search: token passing in flat arrays, compiled by numba.

A *token* is a graph state reached in a frame, with the cost of the best path to it. A *link* is a graph arc taken from
a token to a token of the same frame (no label) or of the next one. Both are rows of arrays that grow with the
utterance. Every `PRUNE_INTERVAL` frames, those that are on no path within the lattice beam are removed.

Beams and cutoffs are those of Kaldi's lattice-faster-decoder.cc. What differs is that arcs without labels are followed
until no cost changes before their links are made, so that no link is made twice.

Costs are float32 as in Kaldi. Those of a frame are relative to the best token of the frame before, so they stay small.

Nothing here checks its input: see `asr_am.decode.search`. Loops stand where NumPy has an expression, and `np.int64`
where 0 would do, because each expression and each constant argument adds a good part of a second to compilation.

Search and pruning are in one file, as numba's cache does not notice changes of a function in another one.

Shapes: A arcs, F = T + 1 (frame f has the tokens after f frames), L graph labels, N links, P pdfs, S graph states,
T frames.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from asr_am.compiled import compiled
from asr_am.decode.search_graph import LABEL, TARGET, WEIGHT

PRUNE_INTERVAL = 25  # frames
PRUNE_SCALE = np.float32(0.1)  # pruning looks further back where extra costs change by more than this x lattice beam
NUM_BINS = 1024  # of the histograms that find the cutoffs of `max_active` and `min_active`
MAX_SERIAL = 2**31 - 1
FIRST_SIZE = 4096  # tokens and links

SOURCE, END, ARC, COST = 0, 1, 2, 3  # columns of a link, see `Trellis.link_N4`
# Columns of `Trellis.bounds_F4`: first link and link after the last of each kind.
EPSILON, EMITTING = np.int64(0), np.int64(2)


class Arcs(NamedTuple):
    """The graph and the scores of an utterance, see `SearchGraph`. `weight_A4` is `arc_A4` as float32."""

    start: int
    first_S2: np.ndarray
    arc_A4: np.ndarray
    weight_A4: np.ndarray
    final_S: np.ndarray
    pdf_L: np.ndarray
    score_TP: np.ndarray
    acoustic_scale: np.float32


class Beams(NamedTuple):
    """See `SearchOptions`. `max_active` is at least 1."""

    beam: np.float32
    lattice_beam: np.float32
    max_active: int
    min_active: int
    beam_delta: np.float32


class Frame(NamedTuple):
    """The tokens of one frame, by position.

    Attributes:
        state, cost: of each token.
        epsilon: positions of the tokens whose states have arcs without labels.
    """

    state: np.ndarray
    cost: np.ndarray
    epsilon: np.ndarray


class TokenIndex(NamedTuple):
    """Finds the token of a state, and lists tokens.

    Attributes:
        serial_S: serial number of a state's latest token. Serial numbers grow from frame to frame, so that nothing must
            be reset: in this frame, tokens have `base` + position.
        active: tokens to expand.
        queue, queued: tokens whose arcs without labels are to be followed.
    """

    serial_S: np.ndarray
    active: np.ndarray
    queue: np.ndarray
    queued: np.ndarray


class Trellis(NamedTuple):
    """Tokens and links of all frames.

    Attributes:
        begin_F: first token of each frame, and the number of tokens.
        bounds_F4: first link and link after the last of each frame, without labels and with.
        cost: of each token.
        extra: cost of the best path through each token minus cost of the best path, as of the last pruning.
        link_N4: rows (source, end, graph arc, cost of the best path that ends with the link as float32 bits).
    """

    begin_F: np.ndarray
    bounds_F4: np.ndarray
    cost: np.ndarray
    extra: np.ndarray
    link_N4: np.ndarray


class TokenLattice(NamedTuple):
    """Result of a search.

    Attributes:
        num_tokens: 0 if no path survived. Token 0 is the start, the last ones are those of the last frame.
        link_N4, bounds_F4: see `Trellis`.
        final: final costs of the tokens of the last frame, 0 for all if none is in a final state.
        complete: whether any is in a final state.
        active: mean number of tokens that were expanded in a frame.
    """

    num_tokens: int
    link_N4: np.ndarray
    bounds_F4: np.ndarray
    final: np.ndarray
    complete: bool
    active: float


@compiled
def search_tokens(arcs: Arcs, beams: Beams) -> TokenLattice:
    """Searches an utterance of at least one frame and prunes to the lattice beam."""
    num_frames, num_states = len(arcs.score_TP), len(arcs.final_S)
    frame, following = _empty_frame(num_states), _empty_frame(num_states)
    index = TokenIndex(
        np.zeros(num_states, np.int32),
        np.empty(num_states, np.int32),
        np.empty(num_states, np.int32),
        np.zeros(num_states, np.bool_),
    )
    trellis = Trellis(
        np.zeros(num_frames + 2, np.int64),
        np.zeros((num_frames + 1, 4), np.int64),
        np.empty(FIRST_SIZE, np.float32),
        np.empty(FIRST_SIZE, np.float32),
        np.empty((FIRST_SIZE, 4), np.int32),
    )
    frame.state[0], frame.cost[0], frame.epsilon[0] = arcs.start, 0, 0
    base, count, cutoff = np.int64(1), np.int64(1), beams.beam
    index.serial_S[arcs.start] = base
    num_epsilon = np.int64(arcs.first_S2[arcs.start, 1] > arcs.first_S2[arcs.start, 0])
    none: Any = np.int64(0)
    pruned, num_links, num_expanded = none, none, none
    for t in range(num_frames + 1):
        count, num_epsilon, bound = _follow_epsilons(arcs, index, base, frame, count, num_epsilon, cutoff)
        trellis = _append_tokens(trellis, t, frame.cost[:count], num_links, bound)
        num_links = _link_epsilons(arcs, index, base, frame, num_epsilon, cutoff, trellis, t, num_links)
        if t == num_frames or count == 0:
            break
        if t % PRUNE_INTERVAL == 0 and t > 0:
            lowest = _prune_back(trellis, t - 1, pruned, beams.lattice_beam, beams.lattice_beam * PRUNE_SCALE)
            num_links = _compact(trellis, lowest, t)
            pruned = t
        cutoff, adaptive_beam, best = _cutoff(frame.cost[:count], beams)
        num_active, bound = _select_active(arcs, frame, count, cutoff, index.active)
        num_expanded += num_active
        trellis = _with_room(trellis, t, none, num_links, bound)
        base += count
        if base > MAX_SERIAL - num_states:
            for s in range(num_states):
                index.serial_S[s] = 0
            base = np.int64(1)
        offset, cutoff = -frame.cost[best], _best_next_cost(arcs, t, frame.state[best]) + adaptive_beam
        count, num_epsilon, num_links, cutoff = _emit(
            arcs, index, base, frame, num_active, offset, cutoff, adaptive_beam, following, trellis, t, num_links
        )
        frame, following = following, frame
    active = num_expanded / num_frames
    if count == 0:
        return TokenLattice(none, trellis.link_N4[:0], trellis.bounds_F4, frame.cost[:0], False, active)
    complete, final = _prune_end(arcs, frame, count, trellis, beams.lattice_beam)
    _prune_back(trellis, num_frames - 1, none, beams.lattice_beam, np.float32(0))
    num_links = _compact(trellis, none, num_frames)
    return TokenLattice(
        trellis.begin_F[num_frames + 1], trellis.link_N4[:num_links], trellis.bounds_F4, final, complete, active
    )


@compiled
def _empty_frame(num_states: int) -> Frame:
    """Returns room for a token in every state. Memory that is never touched costs nothing."""
    return Frame(np.empty(num_states, np.int32), np.empty(num_states, np.float32), np.empty(num_states, np.int32))


@compiled
def _append_tokens(trellis: Trellis, t: int, cost: np.ndarray, num_links: int, more_links: int) -> Trellis:
    """Appends the tokens of frame t. Returns the trellis with room for more links."""
    trellis = _with_room(trellis, t, len(cost), num_links, more_links)
    begin = trellis.begin_F[t]
    end = begin + len(cost)
    for i in range(len(cost)):
        trellis.cost[begin + i] = cost[i]
        trellis.extra[begin + i] = 0
    trellis.begin_F[t + 1] = end
    trellis.bounds_F4[t, EPSILON] = num_links
    return trellis


@compiled
def _with_room(trellis: Trellis, t: int, more_tokens: int, num_links: int, more_links: int) -> Trellis:
    """Returns the trellis with room for more tokens in frame t and more links."""
    cost, extra, link_N4 = trellis.cost, trellis.extra, trellis.link_N4
    begin = trellis.begin_F[t]
    if begin + more_tokens > len(cost):
        size = max(begin + more_tokens, 2 * len(cost))
        cost, extra = np.empty(size, np.float32), np.empty(size, np.float32)
        for i in range(begin):
            cost[i], extra[i] = trellis.cost[i], trellis.extra[i]
    if num_links + more_links > len(link_N4):
        link_N4 = np.empty((max(num_links + more_links, 2 * len(link_N4)), 4), np.int32)
        for n in range(num_links):
            for column in range(4):
                link_N4[n, column] = trellis.link_N4[n, column]
    return Trellis(trellis.begin_F, trellis.bounds_F4, cost, extra, link_N4)


@compiled
def _cutoff(cost: np.ndarray, beams: Beams) -> tuple[np.float32, np.float32, int]:
    """Returns the highest cost of a token that is expanded, the beam for the next frame, and the best token."""
    best = 0
    for i in range(len(cost)):
        if cost[i] < cost[best]:
            best = i
    cutoff, adaptive_beam = cost[best] + beams.beam, beams.beam
    below = within = 0
    for i in range(len(cost)):
        below += cost[i] < cutoff
        within += cost[i] <= cutoff
    n: Any = np.int64(-1)
    if below > beams.max_active:
        n = beams.max_active
    elif len(cost) <= beams.min_active:
        cutoff = adaptive_beam = np.float32(np.inf)
    elif within <= beams.min_active:
        n = beams.min_active
    if n >= 0:
        cutoff = _nth(cost, n)
        adaptive_beam = cutoff - cost[best] + beams.beam_delta
    return cutoff, adaptive_beam, best


@compiled
def _nth(cost: np.ndarray, n: int) -> np.float32:
    """Returns element n of the sorted costs, by histograms of the bin that it is in."""
    low, high = cost[0], cost[0]
    for i in range(len(cost)):
        low, high = min(low, cost[i]), max(high, cost[i])
    bins = np.empty(NUM_BINS, np.int64)
    while low < high:
        for b in range(NUM_BINS):
            bins[b] = 0
        scale = (NUM_BINS - 1) / (np.float64(high) - np.float64(low))
        for i in range(len(cost)):
            if low <= cost[i] <= high:
                bins[int((np.float64(cost[i]) - low) * scale)] += 1
        b = 0
        while bins[b] <= n:
            n -= bins[b]
            b += 1
        least, most = high, low
        for i in range(len(cost)):
            if low <= cost[i] <= high and int((np.float64(cost[i]) - low) * scale) == b:
                least, most = min(least, cost[i]), max(most, cost[i])
        low, high = least, most
    return low


@compiled
def _select_active(arcs: Arcs, frame: Frame, count: int, cutoff: np.float32, active: np.ndarray) -> tuple[int, int]:
    """Lists the tokens to expand. Returns their number and that of their arcs with labels."""
    num_active, num_arcs = 0, 0
    for i in range(count):
        if frame.cost[i] <= cutoff:
            active[num_active] = i
            num_active += 1
            s = frame.state[i]
            num_arcs += arcs.first_S2[s + 1, 0] - arcs.first_S2[s, 1]
    return num_active, num_arcs


@compiled
def _best_next_cost(arcs: Arcs, t: int, s: int) -> np.float32:
    """Returns the lowest cost of going on from state s in frame t, a first bound for the next frame."""
    best = np.float32(np.inf)
    for a in range(arcs.first_S2[s, 1], arcs.first_S2[s + 1, 0]):
        score = arcs.score_TP[t, arcs.pdf_L[arcs.arc_A4[a, LABEL] - 1]]
        best = min(best, arcs.weight_A4[a, WEIGHT] - arcs.acoustic_scale * score)
    return best


@compiled
def _emit(
    arcs: Arcs, index: TokenIndex, base: int, frame: Frame, num_active: int, offset: np.float32, cutoff: np.float32,
    adaptive_beam: np.float32, following: Frame, trellis: Trellis, t: int, num_links: int,
) -> tuple[int, int, int, np.float32]:  # fmt: skip
    """Follows the arcs with labels from the active tokens of frame t. `offset` is added to their costs.

    Loops that only load what is anywhere in memory come first, without a branch on what they load, so that a core has
    many loads under way at once. This halves the time on large graphs.

    Returns:
        Tokens of the next frame, those of them with arcs without labels, links, and the cutoff of the next frame.
    """
    first_S2, arc_A4, weight_A4, pdf_L = arcs.first_S2, arcs.arc_A4, arcs.weight_A4, arcs.pdf_L
    score_P, acoustic_scale, serial_S = arcs.score_TP[t], arcs.acoustic_scale, index.serial_S
    link_N4, link_cost_N4 = trellis.link_N4, trellis.link_N4.view(np.float32)
    begin, next_begin = trellis.begin_F[t], trellis.begin_F[t + 1]
    end = num_links
    for k in range(num_active):
        i = index.active[k]
        s = frame.state[i]
        from_cost = frame.cost[i] + offset
        for a in range(first_S2[s, 1], first_S2[s + 1, 0]):
            cost = from_cost + (weight_A4[a, WEIGHT] - acoustic_scale * score_P[pdf_L[arc_A4[a, LABEL] - 1]])
            target = arc_A4[a, TARGET]
            link_N4[end, SOURCE] = begin + i
            link_N4[end, END] = target ^ (target >> 31)  # without the mark of arcs without labels
            link_N4[end, ARC] = a
            link_cost_N4[end, COST] = cost
            end += cost < cutoff
            cutoff = min(cutoff, cost + adaptive_beam)
    for n in range(num_links, end):
        link_N4[n, END] = serial_S[link_N4[n, END]] - base
    count, num_epsilon, kept = 0, 0, num_links
    for n in range(num_links, end):
        cost, a, j = link_cost_N4[n, COST], link_N4[n, ARC], link_N4[n, END]
        if not cost < cutoff:
            continue
        if j < 0:
            target = arc_A4[a, TARGET]
            has_epsilons = target < 0
            if has_epsilons:
                target = ~target
            j = serial_S[target] - base
            if j < 0:
                j = count
                count += 1
                serial_S[target] = base + j
                following.state[j] = target
                following.cost[j] = cost
                if has_epsilons:
                    following.epsilon[num_epsilon] = j
                    num_epsilon += 1
        if cost < following.cost[j]:
            following.cost[j] = cost
        link_N4[kept, SOURCE] = link_N4[n, SOURCE]
        link_N4[kept, END] = next_begin + j
        link_N4[kept, ARC] = a
        link_cost_N4[kept, COST] = cost
        kept += 1
    trellis.bounds_F4[t, EMITTING + 1] = kept
    return count, num_epsilon, kept, cutoff


@compiled
def _follow_epsilons(
    arcs: Arcs, index: TokenIndex, base: int, frame: Frame, count: int, num_epsilon: int, cutoff: np.float32
) -> tuple[int, int, int]:
    """Follows arcs without labels until no cost changes.

    Returns:
        The frame's tokens, those of them with arcs without labels, and how many links these can have.
    """
    state, cost, epsilon, serial_S = frame.state, frame.cost, frame.epsilon, index.serial_S
    queue, queued = index.queue, index.queued
    num_queued = num_epsilon
    for k in range(num_epsilon):
        queue[k] = epsilon[num_epsilon - 1 - k]
        queued[queue[k]] = True
    while num_queued > 0:
        num_queued -= 1
        i = queue[num_queued]
        queued[i] = False
        if not cost[i] < cutoff:
            continue
        s = state[i]
        for a in range(arcs.first_S2[s, 0], arcs.first_S2[s, 1]):
            total = cost[i] + arcs.weight_A4[a, WEIGHT]
            if not total < cutoff:
                continue
            target = arcs.arc_A4[a, TARGET]
            has_epsilons = target < 0
            if has_epsilons:
                target = ~target
            j = serial_S[target] - base
            if j < 0:
                j = count
                count += 1
                serial_S[target] = base + j
                state[j] = target
                cost[j] = total
                if has_epsilons:
                    epsilon[num_epsilon] = j
                    num_epsilon += 1
            elif total < cost[j]:
                cost[j] = total
            else:
                continue
            if has_epsilons and not queued[j]:
                queued[j] = True
                queue[num_queued] = j
                num_queued += 1
    bound = 0
    for k in range(num_epsilon):
        s = state[epsilon[k]]
        bound += arcs.first_S2[s, 1] - arcs.first_S2[s, 0]
    return count, num_epsilon, bound


@compiled
def _link_epsilons(
    arcs: Arcs, index: TokenIndex, base: int, frame: Frame, num_epsilon: int, cutoff: np.float32, trellis: Trellis,
    t: int, num_links: int,
) -> int:  # fmt: skip
    """Makes the links of frame t's arcs without labels. Returns the number of links."""
    link_N4, link_cost_N4 = trellis.link_N4, trellis.link_N4.view(np.float32)
    begin = trellis.begin_F[t]
    for k in range(num_epsilon):
        i = frame.epsilon[k]
        if not frame.cost[i] < cutoff:
            continue
        s = frame.state[i]
        for a in range(arcs.first_S2[s, 0], arcs.first_S2[s, 1]):
            cost = frame.cost[i] + arcs.weight_A4[a, WEIGHT]
            if not cost < cutoff:
                continue
            target = arcs.arc_A4[a, TARGET]
            link_N4[num_links, SOURCE] = begin + i
            link_N4[num_links, END] = begin + index.serial_S[~target if target < 0 else target] - base
            link_N4[num_links, ARC] = a
            link_cost_N4[num_links, COST] = cost
            num_links += 1
    for column in range(EPSILON + 1, 4):
        trellis.bounds_F4[t, column] = num_links
    return num_links


@compiled
def _prune_back(trellis: Trellis, top: int, required: int, lattice_beam: np.float32, delta: np.float32) -> int:
    """Removes links that are on no path within the lattice beam, from frame `top` back.

    Frames before `required` were pruned before. They are pruned again as long as an extra cost of the frame after them
    has changed by more than `delta`. Tokens to be removed get an infinite extra cost.

    Returns:
        The first frame that may have changed.
    """
    extra = trellis.extra
    t, changed = top, True
    while t >= 0 and (t >= required or changed):
        begin, end = trellis.begin_F[t], trellis.begin_F[t + 1]
        before = np.empty(end - begin, np.float32)
        for i in range(end - begin):
            before[i] = extra[begin + i]
            extra[begin + i] = np.inf
        _prune_links(trellis, t, EMITTING, lattice_beam)
        _prune_epsilons(trellis, t, lattice_beam)
        changed = False
        for i in range(end - begin):
            changed |= abs(extra[begin + i] - before[i]) > delta
        t -= 1
    return t + 1


@compiled
def _prune_end(
    arcs: Arcs, frame: Frame, count: int, trellis: Trellis, lattice_beam: np.float32
) -> tuple[bool, np.ndarray]:
    """Prunes the last frame. Returns whether a final state was reached, and the final costs of the tokens left."""
    t = len(trellis.bounds_F4) - 1
    begin, best, complete = trellis.begin_F[t], np.float32(np.inf), False
    final = np.empty(count, np.float32)
    for i in range(count):
        final[i] = arcs.final_S[frame.state[i]]
        complete |= final[i] < np.inf
    for i in range(count):
        if not complete:
            final[i] = 0
        best = min(best, frame.cost[i] + final[i])
    for i in range(count):
        excess = frame.cost[i] + final[i] - best
        trellis.extra[begin + i] = excess if excess <= lattice_beam else np.inf
    _prune_epsilons(trellis, t, lattice_beam)
    kept = 0
    for i in range(count):
        if trellis.extra[begin + i] < np.inf:
            final[kept] = final[i]
            kept += 1
    return complete, final[:kept]


@compiled
def _prune_epsilons(trellis: Trellis, t: int, lattice_beam: np.float32) -> None:
    """Prunes frame t's links without labels. Their order is arbitrary, so costs are lowered until none changes."""
    bounds_4, extra, link_N4, link_cost_N4 = (
        trellis.bounds_F4[t], trellis.extra, trellis.link_N4, trellis.link_N4.view(np.float32)
    )  # fmt: skip
    changed = True
    while changed:
        changed = False
        for n in range(bounds_4[EPSILON + 1] - 1, bounds_4[EPSILON] - 1, -1):
            source, end = link_N4[n, SOURCE], link_N4[n, END]
            excess = extra[end] + max(np.float32(0), link_cost_N4[n, COST] - trellis.cost[end])
            if excess <= lattice_beam and excess < extra[source]:
                extra[source] = excess
                changed = True
    _prune_links(trellis, t, EPSILON, lattice_beam)


@compiled
def _prune_links(trellis: Trellis, t: int, kind: int, lattice_beam: np.float32) -> None:
    """Lowers extra costs to those of frame t's links of a kind. Removes links beyond the lattice beam."""
    bounds_4, extra, link_N4, link_cost_N4 = (
        trellis.bounds_F4[t], trellis.extra, trellis.link_N4, trellis.link_N4.view(np.float32)
    )  # fmt: skip
    kept = bounds_4[kind]
    for n in range(bounds_4[kind], bounds_4[kind + 1]):
        source, end = link_N4[n, SOURCE], link_N4[n, END]
        excess = extra[end] + max(np.float32(0), link_cost_N4[n, COST] - trellis.cost[end])
        if excess <= lattice_beam:
            extra[source] = min(extra[source], excess)
            for column in range(4):
                link_N4[kept, column] = link_N4[n, column]
            kept += 1
    bounds_4[kind + 1] = kept


@compiled
def _compact(trellis: Trellis, lowest: int, top: int) -> int:
    """Closes the gaps that pruning left in the frames `lowest` to `top`. Returns the number of links."""
    begin_F, bounds_F4, link_N4 = trellis.begin_F, trellis.bounds_F4, trellis.link_N4
    first = begin_F[lowest]
    position = np.empty(begin_F[top + 1] - first, np.int32)  # new positions
    kept, begin = first, first
    for t in range(lowest, top + 1):
        end = begin_F[t + 1]
        begin_F[t] = kept
        for i in range(begin, end):
            if trellis.extra[i] < np.inf:
                position[i - first] = kept
                trellis.cost[kept] = trellis.cost[i]
                trellis.extra[kept] = trellis.extra[i]
                kept += 1
        begin = end
    begin_F[top + 1] = kept
    if lowest > 0:  # links of the frame before, to tokens that have moved
        for n in range(bounds_F4[lowest - 1, EMITTING], bounds_F4[lowest - 1, EMITTING + 1]):
            link_N4[n, END] = position[link_N4[n, END] - first]
    moved = bounds_F4[lowest, EPSILON]
    for t in range(lowest, top + 1):
        for kind in (EPSILON, EMITTING):
            begin, end = bounds_F4[t, kind], bounds_F4[t, kind + 1]
            bounds_F4[t, kind] = moved
            for n in range(begin, end):
                link_N4[moved, SOURCE] = position[link_N4[n, SOURCE] - first]
                link_N4[moved, END] = position[link_N4[n, END] - first]
                link_N4[moved, ARC] = link_N4[n, ARC]
                link_N4[moved, COST] = link_N4[n, COST]
                moved += 1
            bounds_F4[t, kind + 1] = moved
    return moved
