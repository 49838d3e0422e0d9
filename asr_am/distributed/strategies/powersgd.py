"""PowerSGD: synchronous SGD in which learners send low-rank factors of their gradients.

Vogels et al. (NeurIPS 2019, arXiv 1905.13727), algorithms 1 (compression) and 2 (error feedback). For the gradient of
every weight matrix, at learner i,

    M_i <- G_i + E_i
    P   <- mean_i M_i Q                    all-reduced, r columns
    P̂   <- orthogonalise(P)
    Q_i <- M_iᵀ P̂,  Q <- mean_i Q_i        all-reduced, r columns, the start of the next step's Q
    E_i <- M_i - P̂ Q_iᵀ
    W   <- W - α u(P̂ Qᵀ)

G_i gradient and E_i error [n, m], P and P̂ [n, r], Q [m, r], r rank, α learning rate, u the optimizer's rule. Vectors,
and matrices that would not become smaller, are averaged as they are, together with P. Matrices with more rows than
columns are transposed, so that P̂ P̂ᵀ = 1 at full rank, r = n: it is then `sync`, up to rounding. All learners compute P̂
from the same P. It has the same bits only on processors of one kind, so use one.

On a virtual cluster messages have the size that the workload's own matrices imply (`matrices` in conf/workload), and
the products take what the cluster's `factoring_bandwidth` says, whatever the rank, as they read whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.packed_mean import PackedMean
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError


@dataclass
class Factored:
    """A weight matrix whose gradient is sent as factors.

    Attributes:
        begin, end: its elements in the flat weights.
        shape: its rows and columns.
        Q: right factor [m, r].
    """

    begin: int
    end: int
    shape: tuple[int, int]
    Q: Tensor

    def view(self, flat: Tensor) -> Tensor:
        """Returns the matrix [n, m] in a flat vector, with n <= m."""
        matrix = flat[self.begin : self.end].view(self.shape)
        return matrix.T if self.shape[0] > self.shape[1] else matrix


class Powersgd(Strategy):
    """Synchronous SGD with low-rank compression.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule, applied to the mean of what was sent.
        team: this learner's end of the team.
        rank: r. Smaller matrices have their full rank.
        min_compression: a matrix is factored if that divides its size by more than this. 0 factors all matrices.
    """

    name = "powersgd"
    equal_replicas, residuals = True, ("error",)

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, rank: int = 4, min_compression: float = 1.0
    ) -> None:
        if rank < 1:
            raise InputError(f"strategy.rank={rank}: must be at least 1")
        if not min_compression >= 0:
            raise InputError(f"strategy.min_compression={min_compression}: must be at least 0")
        super().__init__(params, optimizer, team)
        self._rank, self._min_compression = rank, min_compression
        self._factored = self._find_matrices()
        self._error = torch.zeros_like(params.w)
        self._modelled = self._modelled_elements()

    def _find_matrices(self) -> list[Factored]:
        random = torch.Generator().manual_seed(0)  # the same Q at all learners
        found = []
        for shape, end in zip(self.params.shapes, self.params.ends, strict=True):
            rows, columns = shape[0] if shape else 1, shape.numel() // max(shape[0] if shape else 1, 1)
            if len(shape) >= 2 and self._pays(rows, columns):
                Q = torch.randn(max(rows, columns), min(self._rank, rows, columns), generator=random)
                found.append(Factored(end - shape.numel(), end, (rows, columns), Q.to(self.params.w.device)))
        return found

    def _pays(self, rows: int, columns: int) -> bool:
        r = min(self._rank, rows, columns)
        return rows * columns > self._min_compression * r * (rows + columns)

    def _modelled_elements(self) -> tuple[float | None, float | None]:
        """Returns the elements of both all-reduces as the workload's matrices imply, None for their real share."""
        size = self.team.modelled_size()
        if size is None:
            return None, None
        first, second, total = 0.0, 0.0, 0.0
        for number, rows, columns in size.matrices:
            r = min(self._rank, rows, columns)
            factored = self._pays(rows, columns)
            first += number * (r * min(rows, columns) if factored else rows * columns)
            second += number * r * max(rows, columns) if factored else 0.0
            total += number * rows * columns
        return first * size.elements / total, second * size.elements / total

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)  # G_i = calGrad(W)
        if step_result is None:
            return None
        self.compress()
        self.optimizer.step()
        self.staleness[0] += 1
        return step_result

    @torch.no_grad()
    def compress(self) -> None:
        """Sets g to the mean of P̂ Qᵀ and of what is not factored."""
        g, error, (first, second) = self.params.g, self._error, self._modelled
        self.team.simulate_cost("factoring", len(g))
        own = [each.view(g).add_(each.view(error)) for each in self._factored]  # M_i
        P = [M @ each.Q for M, each in zip(own, self._factored, strict=True)]
        PackedMean(self.team, [*P, *self._others(g)], first).wait()
        P_hat = [torch.linalg.qr(p).Q for p in P]
        Q = [M.T @ p for M, p in zip(own, P_hat, strict=True)]
        for M, p, q in zip(own, P_hat, Q, strict=True):
            M.sub_(p @ q.T)
        if Q:
            PackedMean(self.team, Q, second).wait()
        for each, M, p, q in zip(self._factored, own, P_hat, Q, strict=True):
            each.view(error).copy_(M)  # E_i changes when nothing can fail any more
            M.copy_(p @ q.T)
            each.Q = q

    def _others(self, g: Tensor) -> Sequence[Tensor]:
        """Returns the parts of the gradient that are not factored."""
        edges = [0, *(edge for each in self._factored for edge in (each.begin, each.end)), len(g)]
        return [g[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "error": self._error, "Q": [each.Q for each in self._factored]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._error.copy_(state["error"])
        for each, Q in zip(self._factored, state["Q"], strict=True):
            each.Q.copy_(Q)
