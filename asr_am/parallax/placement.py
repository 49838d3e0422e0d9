"""Which way each parameter's gradients go, by the bytes that a learner then transfers in a step (table 3).

    all-reduce  2 (N - 1) b / N      all-gather  2 (N - 1) α b      servers  2 α b

b bytes of the parameter, N learners, α share of its rows that a learner touches. As in the paper, of an all-reduce what
a learner sends is counted, of the others what it sends and what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Method = Literal["all-reduce", "all-gather", "servers"]


def transfer(path: Method, alpha: float, count: float, learners: int) -> float:
    """Bytes of a learner in a step, of a parameter with b = `count` bytes."""
    if path == "all-reduce":
        return 2 * (learners - 1) / learners * count
    return 2 * alpha * count * (learners - 1 if path == "all-gather" else 1)


def cheapest_method(alpha: float, learners: int) -> Method:
    """For a sparse parameter; of equals that which needs no server and moves rows only."""
    order: tuple[Method, ...] = ("all-gather", "servers", "all-reduce")
    return min(order, key=lambda path: transfer(path, alpha, 1.0, learners))


@dataclass(frozen=True)
class Placement:
    """rows V, width D: of the parameter [V, *T]. alpha: measured. sparse: whether it is only looked up."""

    name: str
    rows: int
    width: int
    alpha: float
    sparse: bool
    path: Method

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.width


@dataclass(frozen=True)
class PlacementPlan:
    """One choice for each parameter of the model."""

    choices: tuple[Placement, ...]
    learners: int

    @property
    def sparse(self) -> tuple[Placement, ...]:
        return tuple(choice for choice in self.choices if choice.sparse)

    def __str__(self) -> str:
        """A table: each sparse parameter, and all dense ones together; MB a learner transfers by each way."""
        dense = [choice for choice in self.choices if not choice.sparse]
        ways = " ".join(f"{way:>11}" for way in get_args(Method))
        lines = [f"{'parameter':32} {'elements':>12} {'α':>8}  {'path':10} {ways}"]
        if dense:
            count = sum(choice.bytes for choice in dense)
            lines.append(self._line(f"dense ({len(dense)} parameters)", count, 1.0, dense[0].path))
        lines += [self._line(choice.name, choice.bytes, choice.alpha, choice.path) for choice in self.sparse]
        return "\n".join(lines)

    def _line(self, name: str, count: int, alpha: float, path: Method) -> str:
        ways = " ".join(f"{transfer(way, alpha, count, self.learners) / 1e6:8.3f} MB" for way in get_args(Method))
        return f"{name:32} {count // 4:12,} {alpha:8.5f}  {path:10} {ways}"

    def state_dict(self) -> dict[str, Any]:
        return {"learners": self.learners, "choices": [list(vars(choice).values()) for choice in self.choices]}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> PlacementPlan:
        return cls(tuple(Placement(*values) for values in state["choices"]), state["learners"])


def make_placement_plan(
    shapes: Sequence[tuple[str, int, int]], alphas: Sequence[float], sparse: Sequence[bool], learners: int,
    path: Method | None, hybrid: bool,
) -> PlacementPlan:  # fmt: skip
    """shapes: name, V and D of each parameter. path: of the sparse ones, None: the cheapest. hybrid: see Config."""
    choices = []
    for (name, rows, width), alpha, is_sparse in zip(shapes, alphas, sparse, strict=True):
        if not hybrid:
            way: Method = "servers"
        elif is_sparse:
            way = path or cheapest_method(alpha, learners)
        else:
            way = "all-reduce"
        choices.append(Placement(name, rows, width, alpha if is_sparse else 1.0, is_sparse, way))
    return PlacementPlan(tuple(choices), learners)
