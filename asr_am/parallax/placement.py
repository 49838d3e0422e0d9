"""Selects how each parameter's gradients are exchanged, by the bytes that a learner transfers in a step (Table 3).

    all-reduce  2 (N - 1) b / N      all-gather  2 (N - 1) α b      servers  2 α b

Symbols: b bytes of the parameter, N learners, α share of its rows that a learner touches in a step. As in the paper,
all-reduce counts what a learner sends, the others what it sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Method = Literal["all-reduce", "all-gather", "servers"]


def transfer(method: Method, alpha: float, count: float, learners: int) -> float:
    """Returns the bytes that a learner transfers in a step for one parameter of `count` bytes."""
    if method == "all-reduce":
        return 2 * (learners - 1) / learners * count
    return 2 * alpha * count * (learners - 1 if method == "all-gather" else 1)


def cheapest_method(alpha: float, learners: int) -> Method:
    """Returns the method with the fewest bytes for a sparse parameter. Ties go to all-gather, then to servers."""
    order: tuple[Method, ...] = ("all-gather", "servers", "all-reduce")
    return min(order, key=lambda method: transfer(method, alpha, 1.0, learners))


@dataclass(frozen=True)
class Placement:
    """Decision for one parameter [V, *T].

    Attributes:
        rows: Number of rows, V.
        width: Elements of a row, D.
        alpha: Measured share of touched rows. 1 for dense parameters.
        sparse: True if the model reads the parameter by lookups only, and not all rows.
    """

    name: str
    rows: int
    width: int
    alpha: float
    sparse: bool
    method: Method

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.width


@dataclass(frozen=True)
class PlacementPlan:
    """Placements of all trainable parameters of a model."""

    placements: tuple[Placement, ...]
    learners: int

    @property
    def sparse(self) -> tuple[Placement, ...]:
        """Placements of the sparse parameters."""
        return tuple(placement for placement in self.placements if placement.sparse)

    def __str__(self) -> str:
        """Formats a table of each sparse parameter and the total of the dense ones, with MB per step by each method."""
        dense = [placement for placement in self.placements if not placement.sparse]
        methods = " ".join(f"{method:>11}" for method in get_args(Method))
        lines = [f"{'parameter':32} {'elements':>12} {'α':>8}  {'method':10} {methods}"]
        if dense:
            count = sum(placement.bytes for placement in dense)
            lines.append(self._line(f"dense ({len(dense)} parameters)", count, 1.0, dense[0].method))
        lines += [self._line(one.name, one.bytes, one.alpha, one.method) for one in self.sparse]
        return "\n".join(lines)

    def _line(self, name: str, count: int, alpha: float, method: Method) -> str:
        costs = " ".join(f"{transfer(m, alpha, count, self.learners) / 1e6:8.3f} MB" for m in get_args(Method))
        return f"{name:32} {count // 4:12,} {alpha:8.5f}  {method:10} {costs}"

    def state_dict(self) -> dict[str, Any]:
        return {"learners": self.learners, "choices": [list(vars(placement).values()) for placement in self.placements]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PlacementPlan:
        return cls(tuple(Placement(*values) for values in state["choices"]), state["learners"])


def make_placement_plan(
    shapes: Sequence[tuple[str, int, int]], alphas: Sequence[float], sparse: Sequence[bool], learners: int,
    method: Method | None, hybrid: bool,
) -> PlacementPlan:  # fmt: skip
    """Selects a method for every parameter.

    Args:
        shapes: Name, V and D of each parameter.
        alphas: Share of touched rows of each parameter, the mean over learners.
        hybrid: See `Config.hybrid`. If False, every parameter lives on servers.
    """
    placements = []
    for (name, rows, width), alpha, is_sparse in zip(shapes, alphas, sparse, strict=True):
        if not hybrid:
            selected: Method = "servers"
        elif is_sparse:
            selected = method or cheapest_method(alpha, learners)
        else:
            selected = "all-reduce"
        placements.append(Placement(name, rows, width, alpha if is_sparse else 1.0, is_sparse, selected))
    return PlacementPlan(tuple(placements), learners)
