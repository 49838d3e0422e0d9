"""Synchronous SGD on parameter servers: every update waits for the gradients of all workers.

Li et al. (OSDI 2014), and equations 4 and 5 of PSP-SGD (`psp`). In step t

    worker j:   w^t ← pull();  g_j = ∇l(w^t);  push ⟨g_j, t⟩
    server i:   g_i ← Σ_j g_ij, weighted by frames;  w_i^{t+1} ← w_i^t − α u(g_i);  send ⟨w_i^{t+1}, t+1⟩ to all

w_i shard i of the weights, g_ij of worker j's gradient, α learning rate, u the optimizer's rule. The whole mean
gradient is clipped: servers exchange the norms of their parts. Staleness is 0, and the weights are those of `sync`. A
worker without data in the last round is not waited for. A learner that dies ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.leases import GradientFn, SegmentRecord, StepResult
from asr_am.distributed.optimizer import OptimizerOptions, clip
from asr_am.distributed.param_server.base import ParameterServerStrategy
from asr_am.distributed.param_server.server import POLL_INTERVAL, ParameterServer, ServerContext
from asr_am.distributed.param_server.weight_shards import Push, lr_of, mean_gradient
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import LearnerLost

NORM_RETRY = 5.0  # seconds after which a server asks again for missing parts of the norm


class PsSync(ParameterServerStrategy):
    """Synchronous SGD on parameter servers. For the arguments see `ParameterServerStrategy`."""

    name = "ps_sync"
    fault_tolerant = False

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._start()
        self._flush()
        self.worker.apply_arrived()  # w^t
        step_result = gradient(None)  # g_j
        if step_result is None:
            return None
        self._push(step_result, self.worker.versions)  # ⟨g_j, t⟩
        self.staleness[0] += 1
        return step_result

    def unapplied(self, record: SegmentRecord) -> tuple[int, list[int]] | None:
        return None  # a step has the gradients of all

    def rejoin(self) -> None:
        Strategy.rejoin(self)  # raises LearnerLost

    def _make_server(self, context: ServerContext, index: int) -> ParameterServer:
        return SyncServer(context, index, self.params.w, self.optimizer.options)


class SyncServer(ParameterServer):
    """Waits for the gradients of all workers.

    With clipping, messages "norm" (t, sum of squares of g_i as float64 [1]) go from each server to all others, and
    "norm wanted" (t) asks for one again. The lock is released while partial norms are awaited, to avoid deadlock with a
    local worker's resend.
    """

    def __init__(self, context: ServerContext, index: int, w: Tensor, options: OptimizerOptions) -> None:
        super().__init__(context, index, w, options)
        self._pushes: dict[int, Push] = {}
        self._lr: float | None = None  # of the step whose mean gradient g_i is complete
        self._squares: dict[tuple[int, int], Tensor] = {}  # sum of squares of g_i, by step and server's rank
        self._norm_requested = 0.0  # time at which parts of the norm were last sent or asked for
        self._clips = options.clip_norm > 0
        if self._clips:
            self.team.register_tag("norm", 2)
            self.team.register_tag("norm wanted")

    def start(self) -> None:
        super().start()
        if self._clips:
            self.team.spawn(self._norm_loop, "server: norm")
            self.team.spawn(self._norm_request_loop, "server: norm wanted")

    def receive(self, push: Push) -> None:
        if push.t != self.t:
            raise RuntimeError(f"worker {push.worker} is at step {push.t}, server {self.index} at {self.t}")
        self._pushes[push.worker] = push

    def apply_ready(self) -> None:
        if self._pushes and self._all_pushed():
            pushes = list(self._pushes.values())
            self._pushes = {}
            self.team.simulate_cost("averaging", len(pushes) * len(self.g))
            mean_gradient(self.g, pushes)  # g_i
            self._lr = lr_of(pushes)
            if self._clips:
                self._squares[self.t, self.team.rank] = self.g.double().square().sum().reshape(1)
                self._norm_requested = self.team.now()
                self._send_norm(self._other_servers(), self.t)
        if self._lr is not None and (not self._clips or self._clip_mean()):
            self.update(self._lr)  # w_i^{t+1}
            self._lr = None
            self.acknowledged.update(self.last_push)  # nobody pushes for t + 1 before it has w_i^{t+1}
            self.broadcast()

    def _all_pushed(self) -> bool:
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
        return POLL_INTERVAL if self._pushes or self._lr is not None else None

    def clear_pending(self) -> None:
        self._pushes.clear()

    # the norm of the whole mean gradient: every server adds the squares of all shards in the same order

    def _other_servers(self) -> list[int]:
        return [rank for rank in self.context.shards.ranks if rank != self.team.rank]

    def _clip_mean(self) -> bool:
        """Clips g_i if the parts of the norm are all known. Returns whether they are."""
        missing = [rank for rank in self._other_servers() if (self.t, rank) not in self._squares]
        if missing:
            self._require_alive(missing, "needs its part of the norm")
            if self.team.now() >= self._norm_requested + NORM_RETRY:
                self._norm_requested = self.team.now()
                for rank in missing:
                    self.team.send(rank, "norm wanted", self.t)
            return False
        norm = torch.cat([self._squares[self.t, rank] for rank in self.context.shards.ranks]).sum().sqrt()
        clip(self.g, norm.float(), self.options.clip_norm)
        for old in [key for key in self._squares if key[0] < self.t]:  # the last step's stay: others may still ask
            del self._squares[old]
        return True

    def _send_norm(self, ranks: Sequence[int], t: int) -> None:
        for rank in ranks:
            self.team.send(rank, "norm", t, self._squares[t, self.team.rank].view(torch.int32))

    def _norm_loop(self) -> None:
        while True:
            message = self.team.recv("norm")
            if message is not None:
                with self.lock:
                    self._squares[message.clock, message.source] = message.tensors[0].clone().view(torch.float64)
                    self.apply_ready()

    def _norm_request_loop(self) -> None:
        """Sends this server's part again where the message was lost. A request for a later step is answered then."""
        while True:
            message = self.team.recv("norm wanted")
            if message is not None:
                with self.lock:
                    if (message.clock, self.team.rank) in self._squares:
                        self._send_norm([message.source], message.clock)
