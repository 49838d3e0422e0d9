"""Synchronous SGD on parameter servers: every update waits for the gradients of all workers.

Li et al. (OSDI 2014), equations 4 and 5 of PSP-SGD (`psp`). In step t

    worker j:   w^t ← pull();  g_j = ∇l(w^t);  push ⟨g_j, t⟩
    server i:   g_i ← Σ_j g_ij, weighed by frames;  w_i^{t+1} ← w_i^t − α u(g_i);  send ⟨w_i^{t+1}, t+1⟩ to all

w_i block i of the weights, g_ij that of worker j's gradient, α learning rate, u the optimizer's rule, with the norm
limited of the whole mean gradient (servers tell each other their parts of it). Staleness 0: the same weights as `sync`.
A worker without data in the last round is not waited for. A learner that dies ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import OptimizerOptions, clip
from asr_am.distributed.param_server.base import ParameterServerStrategy
from asr_am.distributed.param_server.server import POLL_INTERVAL, ParameterServer, ServerContext
from asr_am.distributed.param_server.weight_shards import Push, lr_of, mean_gradient
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import LearnerLost

INSIST = 5.0  # seconds until a server asks the others again for their parts of the norm


class PsSync(ParameterServerStrategy):
    name = "ps_sync"
    fault_tolerant = False

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._start()
        self.worker.flush()
        self.worker.apply_arrived()  # w^t
        step_result = gradient(None)  # g_j
        if step_result is None:
            return None
        self._push(step_result, self.worker.versions)  # ⟨g_j, t⟩
        self.staleness[0] += 1
        return step_result

    def rejoin(self) -> None:
        Strategy.rejoin(self)  # refuses

    def _make_server(self, context: ServerContext, index: int) -> ParameterServer:
        return SyncServer(context, index, self.params.w, self.optimizer.options)


class SyncServer(ParameterServer):
    """It holds no lock while it waits for the others' parts of the norm: they may wait for what a worker of this rank
    has to push again.
    """

    def __init__(self, context: ServerContext, index: int, w: Tensor, options: OptimizerOptions) -> None:
        super().__init__(context, index, w, options)
        self._pushes: dict[int, Push] = {}
        self._rate: float | None = None  # of the step whose g_i is there
        self._squares: dict[tuple[int, int], Tensor] = {}  # of g_i, by step and rank
        self._asked = 0.0  # when the others were told of a norm, or asked
        self._clips = options.clip_norm > 0
        if self._clips:
            self.team.register_tag("norm", 2)
            self.team.register_tag("norm wanted")

    def start(self) -> None:
        super().start()
        if self._clips:
            self.team.spawn(self._hear, "server: norm")
            self.team.spawn(self._repeat, "server: norm wanted")

    def receive(self, push: Push) -> None:
        if push.t != self.t:
            raise RuntimeError(f"worker {push.worker} is at step {push.t}, server {self.index} at {self.t}")
        self._pushes[push.worker] = push

    def apply_ready(self) -> None:
        if self._pushes and self._all_came():
            pushes = list(self._pushes.values())
            self._pushes = {}
            self.team.simulate_cost("averaging", len(pushes) * len(self.g))
            mean_gradient(self.g, pushes)  # g_i
            self._rate = lr_of(pushes)
            if self._clips:
                self._squares[self.t, self.team.rank] = self.g.double().square().sum().reshape(1)
                self._asked = self.team.now()
                self._tell(self._others(), self.t)
        if self._rate is not None and (not self._clips or self._clipped()):
            self.update(self._rate)  # w_i^{t+1}
            self._rate = None
            self.broadcast()

    def _all_came(self) -> bool:
        missing = [
            j for j in self.context.workers if j not in self._pushes and self.drained.get(j, self.t + 1) > self.t
        ]
        self._require_alive(missing, "waits for the gradients of all")
        return not missing

    def _require_alive(self, ranks: Sequence[int], why: str) -> None:
        alive = self.team.live_ranks()
        for rank in ranks:
            if rank not in alive:
                raise LearnerLost(rank, f"died, and strategy=ps_sync {why}")

    def next_timeout(self) -> float | None:
        return POLL_INTERVAL if self._pushes or self._rate is not None else None

    def clear_pending(self) -> None:
        self._pushes.clear()

    # the norm of the whole mean gradient: the squares of all blocks, added in their order by every server

    def _others(self) -> list[int]:
        return [rank for rank in self.context.blocks.ranks if rank != self.team.rank]

    def _clipped(self) -> bool:
        """Limit g_i, once the others' parts of the norm are known."""
        missing = [rank for rank in self._others() if (self.t, rank) not in self._squares]
        if missing:
            self._require_alive(missing, "needs its part of the norm")
            if self.team.now() >= self._asked + INSIST:
                self._asked = self.team.now()
                for rank in missing:
                    self.team.send(rank, "norm wanted", self.t)
            return False
        norm = torch.cat([self._squares[self.t, rank] for rank in self.context.blocks.ranks]).sum().sqrt()
        clip(self.g, norm.float(), self.options.clip_norm)
        for old in [key for key in self._squares if key[0] < self.t]:  # the last step's stay: others may still ask
            del self._squares[old]
        return True

    def _tell(self, ranks: Sequence[int], t: int) -> None:
        for rank in ranks:
            self.team.send(rank, "norm", t, self._squares[t, self.team.rank].view(torch.float32))

    def _hear(self) -> None:
        while True:
            message = self.team.recv("norm")
            if message is not None:
                with self.lock:
                    self._squares[message.clock, message.source] = message.tensors[0].clone().view(torch.float64)
                    self.apply_ready()

    def _repeat(self) -> None:
        """Tell again whom a letter has not reached; who asks for a step to come is told then."""
        while True:
            message = self.team.recv("norm wanted")
            if message is not None:
                with self.lock:
                    if (message.clock, self.team.rank) in self._squares:
                        self._tell([message.source], message.clock)
