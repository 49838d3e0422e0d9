"""Decentralised parallel SGD (DPSGD): update, then average with neighbours, synchronously.

Zhang et al. (ICASSP 2019), equation 4; Lian et al. (NIPS 2017):

    W_i' = W_i - α u(g_i(W_i))        W_i <- Σ_j M_ij W_j'

W_i weights of learner i, g_i its gradient, α learning rate, u the optimizer's rule, M a symmetric doubly stochastic
mixing matrix. By default M pairs neighbours on a ring, on alternating sides, with M_ij = 1/2. With M_ij = 1/λ for λ
learners it is `sync`. "The pair-wise weight averaging can be executed multiple times after each gradient calculation":
with `averagings` above 1, M is the product of so many matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.topology import Mixing, mixing_row, require_even
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import LearnerLost, Team
from asr_am.errors import InputError


class Dpsgd(Strategy):
    """Decentralised SGD.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule.
        team: this learner's end of the team.
        mixing: pairs (one neighbour, alternating), ring (both neighbours) or all (all learners).
        averagings: averagings after each gradient.
    """

    name = "dpsgd"
    continues_at_blocks, residuals = True, ("weights", "optimizer")

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, mixing: Mixing = "pairs", averagings: int = 1
    ) -> None:
        if mixing not in ("pairs", "ring", "all"):
            raise InputError(f"strategy.mixing={mixing}: must be pairs, ring or all")
        if averagings < 1:
            raise InputError(f"strategy.averagings={averagings}: must be at least 1")
        if mixing == "pairs":
            require_even(team.size, "dpsgd with strategy.mixing=pairs")
        super().__init__(params, optimizer, team)
        self._mixing: Mixing = mixing
        self._averagings = averagings
        self._steps = 0  # averagings so far
        team.register_tag("weights", len(params))

    def check(self, faults: Faults) -> None:
        if faults.lost_share > 0:
            raise InputError(
                f"cluster.faults.lost_share={faults.lost_share}: dpsgd never resends messages and would wait for ever: "
                "use strategy=adpsgd, or set it to 0"
            )

    def step(self, gradient: GradientFn) -> StepResult | None:
        self.at_block_end()
        step_result = gradient(None)  # g_i = calGrad(W_i)
        if step_result is None:
            return None
        self.optimizer.step()  # W_i' = apply(W_i, g_i)
        for _ in range(self._averagings):
            self._mix()  # W_i = Σ_j M_ij W_j'
            self._steps += 1
        self.staleness[0] += 1
        return step_result

    def _mix(self) -> None:
        w, team = self.params.w, self.team
        row = mixing_row(self._mixing, team.rank, team.size, self._steps)
        for other in row.keys() - {team.rank}:
            team.send(other, "weights", self._steps, w)
        mixed, sent = torch.zeros_like(w), team.as_sent(w)
        for other, weight in row.items():  # in rank order, for the same rounding on all learners
            mixed.add_(sent if other == team.rank else self._weights_of(other), alpha=weight)
        if sent is not w:
            mixed.add_(w - sent)  # in 16 bits: the mean of all weights stays as it is, and small updates last
        team.simulate_cost("averaging", len(w) * (len(row) - 1))
        w.copy_(mixed)

    def _weights_of(self, other: int) -> Tensor:
        message = self.team.recv("weights", source=other)
        if message is None:
            raise LearnerLost(other, "died")
        if message.clock != self._steps:
            raise RuntimeError(f"learner {other} is at step {message.clock}, learner {self.team.rank} at {self._steps}")
        return message.tensors[0].to(self.params.w.device)

    def drain(self) -> None:
        self.at_block_end()

    def consensus(self) -> Tensor:
        return self.team.average(self.params.w)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]
