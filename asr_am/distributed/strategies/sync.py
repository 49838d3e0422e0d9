"""Synchronous SGD: all learners hold the same weights, and every update waits for every learner.

Zhang et al. (ICASSP 2019), two forms of the same rule:

    gradients (equation 2)    g <- mean_i g_i         W <- W - α u(g)
    weights (figure 3a)       W_i' <- W - α u(g_i)    W <- mean_i W_i'

W weights, g_i gradient of learner i, α learning rate, u the optimizer's rule. The forms agree where u is linear (SGD,
momentum), and differ in rounding only; clipping and Adam act on the mean gradient in the first, on each learner's own
in the second. Staleness 0. λ learners with batches of m are one learner with a batch of λm.
"""

from __future__ import annotations

from typing import Literal

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team, Work
from asr_am.errors import InputError


class Sync(Strategy):
    """form: what is averaged. overlap: of the form `gradients`, average buckets while the backward pass goes on."""

    name = "sync"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team,
        form: Literal["gradients", "weights"] = "gradients", overlap: bool = True,
    ) -> None:  # fmt: skip
        if form not in ("gradients", "weights"):
            raise InputError(f"strategy.form={form}: is gradients or weights")
        super().__init__(params, optimizer, team)
        self._average_weights, self._overlap = form == "weights", overlap

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = self._step_weights(gradient) if self._average_weights else self._step_gradients(gradient)
        if step_result is not None:
            self.staleness[0] += 1
        return step_result

    def _step_gradients(self, gradient: GradientFn) -> StepResult | None:
        g = self.params.g
        under_way: list[Work] = []

        def average(begin: int, end: int) -> None:
            under_way.append(self.team.start_all_reduce_mean(g[begin:end]))

        step_result = gradient(average if self._overlap else None)  # g_i = calGrad(W)
        if step_result is None:
            return None
        if not self._overlap:
            average(0, len(g))
        for work in under_way:  # g = mean g_i
            work.wait()
        self.optimizer.step()  # W = apply(W, g)
        return step_result

    def _step_weights(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)  # g_i = calGrad(W)
        if step_result is None:
            return None
        self.optimizer.step()  # W_i' = apply(W, g_i)
        self.team.start_all_reduce_mean(self.params.w).wait()  # W = allreduce(W_i') / λ
        return step_result
