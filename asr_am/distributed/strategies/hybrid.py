"""HYBRID of Zhang et al. (ICASSP 2019, figure 3c): an all-reduce of the weights beside the next gradient.

    g_t  = calGrad(A_{t-1})      while the all-reduce of the W'_{t-1} of all learners is under way
    A_t  = pull_weights()        = mean_i W'_{t-1,i}
    W'_t = A_t - α u(g_t)
    push_weights(W'_t)           starts the next all-reduce

A_t average weights, W'_t one learner's weights, g_t its gradient, α learning rate, u the optimizer's rule. A step uses
two different pulls: the gradient is taken at A_{t-1} and applied to A_t. Hence, with ḡ the mean gradient of all
learners,

    A_{t+1} = A_t - α u(ḡ(A_{t-1}))

which is one chain of weights with staleness 1 (for a linear u: SGD, momentum).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy, means_of
from asr_am.distributed.team import Team, Work, rounds


class Hybrid(Strategy):
    """Overlapped model averaging. Between steps `params.w` is A_t, where the next gradient is taken.

    `_pushed` is W'_t and becomes A_{t+1} when the pending all-reduce completes. In 16 bits W'_t - A_t is sent, as
    the rounding of whole weights would hide small changes.
    """

    name = "hybrid"
    continues_at_blocks, residuals = True, ("optimizer",)
    nestable = False

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        self._pushed = params.w.clone()  # A_1 = A_0: nothing was pushed before the first step
        self._pending: Work | None = None
        self._rounds = rounds(team)
        self._steps = 0

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)  # g_t = calGrad(A_{t-1})
        if step_result is None:
            return None
        self.drain()
        self.params.w.copy_(self._pushed)  # A_t = pull_weights(), where the next gradient is taken
        self.optimizer.step(self._pushed)  # W'_t = apply(A_t, g_t)
        if self._rounds:
            self._pushed.sub_(self.params.w)
        self._pending = self.team.start_all_reduce_mean(self._pushed)  # push_weights(W'_t)
        self.staleness[min(self._steps, 1)] += 1  # the first gradient is taken at the weights it updates
        self._steps += 1
        return step_result

    def drain(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if self._rounds:
                self._pushed.add_(self.params.w)
        self.at_block_end()  # A_{t+1} is known, and nothing of the next step

    def replica(self) -> Tensor:
        return self._pushed

    def consensus(self) -> Tensor:
        return self.replica()

    def model_of(self, states: Sequence[Mapping[str, Any]]) -> Tensor:
        return cast(Tensor, means_of(states, {"pushed"})["pushed"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pushed": self._pushed, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pushed.copy_(state["pushed"])
        self._steps = state["steps"]
