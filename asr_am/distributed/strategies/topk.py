"""Top-k sparsification with error feedback: synchronous SGD in which learners send their largest gradient elements.

Stich et al. (NeurIPS 2018, arXiv 1809.07599), algorithm 1 (Mem-SGD), with the learning rate after the compression, as
Aji and Heafield (EMNLP 2017). At learner i

    e_i <- e_i + g_i
    s_i  = the k elements of e_i with the largest magnitude, else 0      sent: k indices and k values
    e_i <- e_i - s_i
    W   <- W - α u(mean_i s_i)

W weights, g_i gradient of learner i, e_i its error, α learning rate, u the optimizer's rule. What was sent and what
remains add up to the gradients. With k = N it is `sync`. Unlike `gtc`, values are sent as they are, and their number is
fixed. The search for the k elements is not charged on a virtual cluster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError

MAX_ELEMENTS = 1 << 31  # that an int32 index addresses


class Topk(Strategy):
    """Synchronous SGD with top-k sparsification.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule, applied to the mean of what was sent.
        team: this learner's end of the team.
        density: k, as a share of all elements.
    """

    name = "topk"
    equal_replicas, residuals = True, ("error",)

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team, density: float = 0.01) -> None:
        if not 0 < density <= 1:
            raise InputError(f"strategy.density={density}: must be a share, above 0 and at most 1")
        if len(params) > MAX_ELEMENTS:
            raise InputError(f"strategy=topk: the model has more than {MAX_ELEMENTS} weights")
        super().__init__(params, optimizer, team)
        self._k = max(1, round(density * len(params)))
        self._error = torch.zeros_like(params.w)

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)  # g_i = calGrad(W)
        if step_result is None:
            return None
        g = self.params.g
        g += self._error  # e_i itself changes when all have what is sent
        index = self._largest()
        messages = self._exchange(index, g[index])
        self._error.copy_(g)
        self._error[index] = 0.0
        self._set_mean(messages)
        self.optimizer.step()
        self.staleness[0] += 1
        return step_result

    def _largest(self) -> Tensor:
        """Returns the indices of s_i, when g is e_i."""
        return self.params.g.abs().topk(self._k, sorted=False).indices

    def _exchange(self, index: Tensor, sent: Tensor) -> list[Tensor]:
        """Sends s_i to all learners. Returns the messages of all, in rank order."""
        packed = torch.cat([index.to(torch.int32), sent.view(torch.int32)])
        return self.team.start_all_gather(packed, [len(packed)] * self.team.size).wait()

    def _set_mean(self, messages: list[Tensor]) -> None:
        """Sets g to the mean of all learners' s_i, added in rank order."""
        g = self.params.g.zero_()
        for message in messages:
            indices, values = message[: self._k], message[self._k :]
            g[indices.long()] += values.view(torch.float32)
        g.div_(self.team.size)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "error": self._error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._error.copy_(state["error"])
