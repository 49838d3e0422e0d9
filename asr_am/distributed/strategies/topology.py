"""Topology of the decentralised strategies: rows of mixing matrices, and the bipartite ring."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from asr_am.errors import InputError

Mixing = Literal["pairs", "ring", "all"]


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


def nearest_receiver(rank: int, side: int, size: int, alive: Collection[int]) -> int | None:
    """Finds the nearest live receiver on one side of a sender.

    Args:
        rank: the sender.
        side: +1 or -1.
        size: number of learners.
        alive: ranks of the live learners.

    Returns:
        The receiver's rank, None if none is alive.
    """
    candidates = ((rank + side * distance) % size for distance in range(1, size, 2))
    return next((other for other in candidates if other in alive), None)
