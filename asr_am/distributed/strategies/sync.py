"""Synchronous SGD: all learners hold the same weights, and every update waits for all of them.

Zhang et al. (ICASSP 2019), two forms of the same rule:

    gradients (equation 2)    g <- mean_i g_i         W <- W - α u(g)
    weights (figure 3a)       W_i' <- W - α u(g_i)    W <- mean_i W_i'

W weights, g_i gradient of learner i, α learning rate, u the optimizer's rule. The two forms differ only in rounding
where u is linear (SGD, momentum). Clipping and Adam act on the mean gradient in the first form, on each learner's own
gradient in the second. Staleness is 0. λ learners with batches of m are one learner with a batch of λm.
"""

from __future__ import annotations

from typing import Literal

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team, Work, rounds
from asr_am.errors import InputError


class Sync(Strategy):
    """Synchronous SGD by all-reduce.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule.
        team: this learner's end of the team.
        form: what is averaged, `gradients` or `weights`.
        overlap: average buckets of the gradient during the backward pass (`form=gradients` only).
    """

    name = "sync"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team,
        form: Literal["gradients", "weights"] = "gradients", overlap: bool = True,
    ) -> None:  # fmt: skip
        if form not in ("gradients", "weights"):
            raise InputError(f"strategy.form={form}: must be gradients or weights")
        super().__init__(params, optimizer, team)
        self._average_weights, self._overlap = form == "weights", overlap
        self.equal_replicas, self.continues_at_blocks = form == "gradients", form == "weights"
        self.residuals = () if self.equal_replicas else ("optimizer",)  # each learner has momentum of its own
        self._rounds = rounds(team)

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = self._step_weights(gradient) if self._average_weights else self._step_gradients(gradient)
        if step_result is not None:
            self.staleness[0] += 1
        return step_result

    def _step_gradients(self, gradient: GradientFn) -> StepResult | None:
        g = self.params.g
        pending: list[Work] = []

        def average(begin: int, end: int) -> None:
            pending.append(self.team.start_all_reduce_mean(g[begin:end]))

        step_result = gradient(average if self._overlap else None)  # g_i = calGrad(W)
        if step_result is None:
            return None
        if not self._overlap:
            average(0, len(g))
        for work in pending:  # g = mean g_i
            work.wait()
        self.optimizer.step()  # W = apply(W, g)
        return step_result

    def _step_weights(self, gradient: GradientFn) -> StepResult | None:
        self.at_block_end()
        step_result = gradient(None)  # g_i = calGrad(W)
        if step_result is None:
            return None
        w = self.params.w
        W = w.clone() if self._rounds else None
        self.optimizer.step()  # W_i' = apply(W, g_i)
        if W is not None:
            w.sub_(W)  # in 16 bits the rounding of whole weights would hide small changes
        self.team.start_all_reduce_mean(w).wait()  # W = allreduce(W_i') / λ
        if W is not None:
            w.add_(W)
        return step_result

    def drain(self) -> None:
        self.at_block_end()
