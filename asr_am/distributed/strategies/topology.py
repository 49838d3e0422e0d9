"""Topology of the decentralised strategies: rows of mixing matrices, and the bipartite ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from asr_am.errors import InputError

Mixing = Literal["pairs", "ring", "all"]
Partners = Literal["ring", "random", "exponential"]


def require_even(size: int, strategy: str) -> None:
    """Raises InputError for a ring that cannot be split into senders and receivers."""
    if size % 2:
        raise InputError(
            f"learners={size}: {strategy} pairs neighbours on a ring and needs an even number: "
            f"use {size + 1}" + (f" or {size - 1}" if size > 1 else "")
        )


def mixing_row(kind: Mixing, rank: int, size: int, step: int) -> dict[int, float]:
    """Returns one row of a mixing matrix.

    The matrices are symmetric and doubly stochastic, as the proof of convergence requires (Lian et al., NIPS 2017).

    Args:
        kind: pairs (weight 1/2, one neighbour on alternating sides), ring (1/3, both neighbours) or all (1/size, all
            learners).
        rank: the row.
        size: number of learners.
        step: number of the step, which selects the side of `pairs`.

    Returns:
        The weight of each learner with a weight above 0, in rank order.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    if kind == "all":
        members = set(range(size))
    elif kind == "ring":
        members = {left, rank, right}
    else:
        members = {rank, right if (rank + step) % 2 == 0 else left}
    return {member: 1 / len(members) for member in sorted(members)}


def is_sender(rank: int) -> bool:
    """Returns True for a sender. Senders and receivers alternate around the ring, which avoids circular waits.

    Senders are the even ranks, counted from 0. These are the odd ids of the paper, which counts from 1.
    """
    return rank % 2 == 0


def receivers(partners: Partners, sender: int, exchange: int, size: int, seed: int) -> Iterator[int]:
    """Yields all receivers in the order in which a sender prefers them for an exchange.

    If all senders are at the same exchange, their first choices are a matching of senders and receivers.

    Args:
        partners: ring (right and left neighbour in turn, then the next receivers on that side), random (a matching
            drawn for each exchange) or exponential (0, 1, 2, 4, ... receivers to the right of the neighbour, in turn).
        sender: its rank.
        exchange: number of the exchange.
        size: number of learners, even.
        seed: of the random matchings.
    """
    if partners == "ring":
        side = -1 if exchange % 2 else 1
        yield from ((sender + side * distance) % size for distance in range(1, size, 2))
        return
    count, first = size // 2, sender // 2
    order: Sequence[int] = range(count)
    if partners == "random":
        order = _permutation(count, seed, exchange)
    else:
        hops = [0, *(2**k for k in range((count - 1).bit_length()))]
        first += hops[exchange % len(hops)]
    yield from (2 * order[(first + k) % count] + 1 for k in range(count))


@lru_cache(maxsize=64)  # virtual learners are at nearly the same exchange
def _permutation(count: int, seed: int, number: int) -> tuple[int, ...]:
    """Returns the permutation of range(count) that a seed has for this number."""
    return tuple(np.random.default_rng([seed, number]).permutation(count).tolist())


def check_groups(learners: int, group_size: int) -> None:
    """Raises InputError if the learners cannot be divided into groups of equal size."""
    if group_size < 1 or learners % group_size:
        sizes = ", ".join(str(size) for size in range(1, learners + 1) if learners % size == 0)
        raise InputError(
            f"strategy.group_size={group_size}: does not divide learners={learners} into equal groups; choose one of "
            f"{sizes}, or change learners"
        )
