"""Independent reference implementations of the algorithms, in one process and in float64, from the papers' equations.

Each returns the weights at the end of every segment: [N] if all learners share them, else [λ, N].

Symbols: W weights, g gradient, α learning rate, u the optimizer's rule, M mixing matrix, λ learners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from tests.support.toy_problem import HIDDEN, Batch, Problem, X, Y, start_weights


class Momentum:
    """The rule u: V <- 0.9 V + g, after clipping g to the norm `clip`."""

    def __init__(self, clip: float = math.inf) -> None:
        self._clip, self._V = clip, torch.zeros(())

    def __call__(self, g: Tensor) -> Tensor:
        self._V = 0.9 * self._V + g * min(1.0, self._clip / (float(g.norm()) + 1e-6))
        return self._V


class Adam:
    """Kingma and Ba (ICLR 2015), algorithm 1, with β 0.9 and 0.98."""

    def __init__(self) -> None:
        self._m, self._v, self._t = torch.zeros(()), torch.zeros(()), 0

    def __call__(self, g: Tensor) -> Tensor:
        self._m, self._v, self._t = 0.9 * self._m + 0.1 * g, 0.98 * self._v + 0.02 * g**2, self._t + 1
        return self._m / (1 - 0.9**self._t) / ((self._v / (1 - 0.98**self._t)).sqrt() + 1e-8)


MakeRule = Callable[[], Callable[[Tensor], Tensor]]
Turn = tuple[int, int, float]


def gradient(W: Tensor, batch: Batch | None, loss_denominator: float) -> Tensor:
    """Returns the gradient [N] of the summed squared error / loss_denominator. Zero without data."""
    if batch is None:
        return torch.zeros_like(W)
    with torch.enable_grad():
        leaf = W.clone().requires_grad_()
        A, a, B, b = leaf.split([HIDDEN * X, HIDDEN, Y * HIDDEN, Y])
        hidden = torch.tanh(batch.x_FX.double() @ A.view(HIDDEN, X).T + a)
        error = hidden @ B.view(Y, HIDDEN).T + b - batch.y_FY.double()
        return torch.autograd.grad(error.square().sum() / loss_denominator, leaf)[0]


@dataclass(frozen=True)
class Round:
    """One step of all learners.

    Attributes:
        rate: learning rate.
        batches: batch of each learner, None for a learner without data.
        ends_segment: True for the last round of a segment.
    """

    rate: float
    batches: Sequence[Batch | None]
    ends_segment: bool

    @property
    def frames(self) -> int:
        return sum(batch.frames for batch in self.batches if batch)


def rounds(problem: Problem) -> Iterator[Round]:
    """Yields all rounds of a run."""
    size, step = problem.learners, 0
    for epoch in range(problem.epochs):
        batches = problem.of(epoch)
        count = -(-len(batches) // size)
        for r in range(count):
            shares: list[Batch | None] = list(batches[r * size : (r + 1) * size])
            rate = problem.lr * (1 - 0.5 * r / count) / (1 + step / 100)
            last = r == count - 1 or (r + 1) % problem.rounds_per_segment == 0
            yield Round(rate, shares + [None] * (size - len(shares)), last)
            step += 1


def mean_gradient(W: Tensor, at: Round) -> Tensor:
    """Returns the gradient [N] of the mean loss over all frames of the round."""
    return sum((gradient(W, batch, at.frames) for batch in at.batches), torch.zeros_like(W))


@cache
def sync(problem: Problem, make_rule: MakeRule = Momentum) -> list[Tensor]:
    """Runs W <- W - α u(mean g(W))."""
    W, u, saved = start_weights().double(), make_rule(), []
    for now in rounds(problem):
        W = W - now.rate * u(mean_gradient(W, now))
        if now.ends_segment:
            saved.append(W)
    return saved


@cache
def hybrid(problem: Problem) -> list[Tensor]:
    """Runs A_{t+1} = A_t - α u(mean g(A_{t-1})), A_1 = A_0."""
    before = A = start_weights().double()
    u, saved = Momentum(), []
    for now in rounds(problem):
        before, A = A, A - now.rate * u(mean_gradient(before, now))
        if now.ends_segment:
            saved.append(A)
    return saved


def hybrid_own(problem: Problem, make_rule: MakeRule) -> list[Tensor]:
    """Runs hybrid with a nonlinear rule: A_{t+1} = A_t - α mean u_i(g_i(A_{t-1}))."""
    size = problem.learners
    before = A = start_weights().double()
    u, saved = [make_rule() for _ in range(size)], []
    for now in rounds(problem):
        updates = [u[i](gradient(before, batch, now.frames / size)) for i, batch in enumerate(now.batches)]
        before, A = A, A - now.rate * torch.stack(updates).mean(dim=0)
        if now.ends_segment:
            saved.append(A)
    return saved


def dpsgd(problem: Problem, M: Callable[[int], Tensor], make_rule: MakeRule = Momentum) -> list[Tensor]:
    """Runs W <- M_t (W - α u), with u_i(g_i(W_i)) for each learner."""
    size = problem.learners
    W, u, saved = start_weights().double().repeat(size, 1), [make_rule() for _ in range(size)], []
    for step, now in enumerate(rounds(problem)):
        updates = [u[i](gradient(W[i], batch, now.frames / size)) for i, batch in enumerate(now.batches)]
        W = M(step) @ (W - now.rate * torch.stack(updates))
        if now.ends_segment:
            saved.append(W)
    return saved


def adpsgd(
    problem: Problem, turns: Sequence[Sequence[Turn]], make_rule: MakeRule = Momentum,
    M: Callable[[int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Runs W'_{t+1} = M_t W'_t - α u, with u_i(g_i(W'_t,i)) for each learner.

    ADPSGD takes this form if all updates happen simultaneously and all exchanges end before the next: it is then the
    decentralised SGD of Lian et al. (NIPS 2017) with gradients of staleness 1.

    Args:
        turns: (epoch, batch, rate) of each gradient, by learner.
        make_rule: builds a learner's rule u_i.
        M: mixing matrix of each step, None for pairs of neighbours on alternating sides.

    Returns:
        M W' at the end [λ, N].
    """
    size = problem.learners
    M = M or partial(pairs, size)
    W, u = start_weights().double().repeat(size, 1), [make_rule() for _ in range(size)]
    mixed = W
    for step, now in enumerate(zip(*turns, strict=True)):
        batches = [problem.of(epoch)[number] for epoch, number, _ in now]
        updates = [u[i](gradient(W[i], batch, batch.frames)) for i, batch in enumerate(batches)]
        W = mixed - torch.tensor([[rate] for _, _, rate in now], dtype=torch.float64) * torch.stack(updates)
        mixed = M(step) @ W
    return mixed


def super_adpsgd(problem: Problem, group_size: int) -> Tensor:
    """Runs `adpsgd` of groups, each with the mean gradient of its learners. Returns M W' at the end [groups, N]."""
    count = problem.learners // group_size
    W, u = start_weights().double().repeat(count, 1), [Momentum() for _ in range(count)]
    mixed = W
    for step, now in enumerate(rounds(problem)):
        mean = now.frames / problem.learners
        g = [gradient(W[i // group_size], batch, mean) / group_size for i, batch in enumerate(now.batches)]
        sums = torch.stack(g).view(count, group_size, -1).sum(dim=1)
        W = mixed - now.rate * torch.stack([u[i](sums[i]) for i in range(count)])
        mixed = pairs(count, step) @ W
    return mixed


def pairs(size: int, step: int) -> Tensor:
    """Returns M [λ, λ] with neighbours (0 1) (2 3) ... in even steps, (1 2) (3 4) ... (size-1 0) in odd ones."""
    M = torch.zeros(size, size, dtype=torch.float64)
    for i in range(step % 2, size, 2):
        j = (i + 1) % size
        M[i, i] = M[i, j] = M[j, i] = M[j, j] = 0.5
    return M


def ring(size: int) -> Tensor:
    """Returns M [λ, λ] with a third for a learner itself and for either neighbour, for at least three learners."""
    one = torch.eye(size, dtype=torch.float64)
    return (one + one.roll(1, 0) + one.roll(-1, 0)) / 3
