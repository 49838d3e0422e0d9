"""Synchronous SGD on parameter servers: every update waits for the gradients of all workers.

Li et al. (OSDI 2014), equations 4 and 5 of PSP-SGD (`psp`). In step t

    worker j:   w^t ← pull();  g_j = ∇l(w^t);  push ⟨g_j, t⟩
    server i:   g_i ← Σ_j g_ij, weighed by frames;  w_i^{t+1} ← w_i^t − α u(g_i);  send ⟨w_i^{t+1}, t+1⟩ to all

w_i block i of the weights, g_ij that of worker j's gradient, α learning rate, u the optimizer's rule, with the norm
limited of the whole mean gradient (servers tell each other their parts of it). Staleness 0: the same weights as `sync`.
A worker without data in the last round is not waited for. A learner that dies ends the run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr_am.distributed.blocks import Push, mean_gradient, rate_of
from asr_am.distributed.optimizer import OptimizerOptions, clip
from asr_am.distributed.served import Served
from asr_am.distributed.server import LOOK, Reach, Server
from asr_am.distributed.strategy import Gradient, Stats, Strategy
from asr_am.distributed.team import LearnerLost

INSIST = 5.0  # seconds until a server asks the others again for their parts of the norm


class PsSync(Served):
    name = "ps_sync"
    forgiving = False

    def step(self, gradient: Gradient) -> Stats | None:
        self._start()
        self.worker.settle()
        self.worker.take()  # w^t
        stats = gradient(None)  # g_j
        if stats is None:
            return None
        self._push(stats, self.worker.versions)  # ⟨g_j, t⟩
        self.staleness[0] += 1
        return stats

    def join(self) -> None:
        Strategy.join(self)  # refuses

    def _make_server(self, reach: Reach, index: int) -> Server:
        return SyncServer(reach, index, self.params.w, self.optimizer.options)


class SyncServer(Server):
    def __init__(self, reach: Reach, index: int, w: Tensor, options: OptimizerOptions) -> None:
        super().__init__(reach, index, w, options)
        self._pushes: dict[int, Push] = {}
        self._squares: dict[tuple[int, int], Tensor] = {}  # of g_i, by step and rank
        self._heard = self.team.event()
        if options.clip_norm > 0:
            self.team.accept("norm", 2)
            self.team.accept("norm wanted")

    def start(self) -> None:
        super().start()
        if self.options.clip_norm > 0:
            self.team.spawn(self._hear, "server: norm")
            self.team.spawn(self._repeat, "server: norm wanted")

    def receive(self, push: Push) -> None:
        if push.t != self.t:
            raise RuntimeError(f"worker {push.worker} is at step {push.t}, server {self.index} at {self.t}")
        self._pushes[push.worker] = push

    def advance(self) -> None:
        if not self._pushes:
            return
        missing = [j for j in self.reach.workers if j not in self._pushes and self.away.get(j, self.t + 1) > self.t]
        alive = self.team.alive()
        for j in missing:
            if j not in alive:
                raise LearnerLost(j, "died, and strategy=ps_sync waits for the gradients of all")
        if missing:
            return
        pushes = list(self._pushes.values())
        self._pushes = {}
        self.team.charge("averaging", len(pushes) * len(self.g))
        mean_gradient(self.g, pushes)  # g_i
        if self.options.clip_norm > 0:
            clip(self.g, self._norm(), self.options.clip_norm)
        self.update(rate_of(pushes))  # w_i^{t+1}
        self.broadcast()

    def patience(self) -> float | None:
        return LOOK if self._pushes else None

    def forget(self) -> None:
        self._pushes.clear()

    def _norm(self) -> Tensor:
        """Of the whole mean gradient: the squares of all blocks, added in their order by every server."""
        t, ranks = self.t, self.reach.blocks.ranks
        self._squares[t, self.team.rank] = self.g.double().square().sum().reshape(1)
        for rank in ranks:
            self._tell(rank, t)
        while missing := [rank for rank in ranks if (t, rank) not in self._squares]:
            self._heard.clear()
            if all((t, rank) in self._squares for rank in missing) or self._heard.wait(INSIST):
                continue
            for rank in missing:
                if rank not in self.team.alive():
                    raise LearnerLost(rank, "died, and strategy=ps_sync needs its part of the norm")
                self.team.post(rank, "norm wanted", t)
        for old in [key for key in self._squares if key[0] < t - 1]:  # others may be a step behind, and ask
            del self._squares[old]
        return torch.cat([self._squares[t, rank] for rank in ranks]).sum().sqrt().float()

    def _tell(self, rank: int, t: int) -> None:
        """This server's part of the norm in step t."""
        if rank != self.team.rank:
            self.team.post(rank, "norm", t, self._squares[t, self.team.rank].view(torch.float32))

    def _hear(self) -> None:
        """The others' parts of the norm."""
        while True:
            letter = self.team.collect("norm")
            if letter is not None:
                self._squares[letter.clock, letter.source] = letter.tensors[0].clone().view(torch.float64)
                self._heard.set()

    def _repeat(self) -> None:
        """Tell again whom a letter has not reached; who asks for a step to come is told then."""
        while True:
            letter = self.team.collect("norm wanted")
            if letter is not None and (letter.clock, self.team.rank) in self._squares:
                self._tell(letter.source, letter.clock)
