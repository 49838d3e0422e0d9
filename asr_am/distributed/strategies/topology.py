"""Who averages with whom in the decentralised strategies: rows of mixing matrices, and the bipartite ring."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from asr_am.errors import InputError

Mixing = Literal["pairs", "ring", "all"]


def require_even(size: int, strategy: str) -> None:
    """InputError for a ring that cannot be split into senders and receivers."""
    if size % 2:
        raise InputError(
            f"learners={size}: {strategy} pairs neighbours on a ring, which takes an even number; "
            f"use {size + 1}" + (f" or {size - 1}" if size > 1 else "")
        )


def mixing_row(kind: Mixing, rank: int, size: int, step: int) -> dict[int, float]:
    """Row `rank` of the mixing matrix of step `step`, {learner: weight}, in rank order.

    The matrices are symmetric and doubly stochastic, as the proof of convergence asks (Lian et al., NIPS 2017):
    pairs, 1/2 with the neighbour on alternating sides; ring, 1/3 with both neighbours; all, 1/size with everybody.
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
    """Senders and receivers alternate around the ring, so that no two wait for each other in a circle.

    Counted from 0, the senders are the even ranks: the odd ids of the paper, which counts from 1.
    """
    return rank % 2 == 0


def nearest_receiver(rank: int, side: int, size: int, alive: Collection[int]) -> int | None:
    """The nearest living receiver on one side (+1 or -1) of a sender, None where none is alive."""
    around = ((rank + side * distance) % size for distance in range(1, size, 2))
    return next((other for other in around if other in alive), None)
