"""A parameter server: one block of the weights, its optimizer and its version, and the tasks that answer workers.

When a gradient is applied is what the strategies differ in (`receive`, `advance`); here is what they share. Whoever
brings something, a task that has collected a letter or the worker of the same rank, does the work it leads to, holding
the lock. Letters are those of `blocks`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.param_server.weight_shards import METADATA_LEN, Push, Shards, read_push
from asr_am.distributed.team import Message, Team

log = logging.getLogger(__name__)

POLL_INTERVAL = 1.0  # seconds between two looks at who of the awaited has died
RECOVERY_TIMEOUT = 10.0  # seconds to wait for the next copy of a block that was lost
RETRY_INTERVAL = 2.5  # seconds after which those that have not answered are asked again


@dataclass
class ServerContext:
    """What a server does on the team. workers: all ranks that compute gradients. own: takes ⟨w_i, t⟩ for the worker of
    the same rank, which no letter goes to; counts: the strategy's.
    """

    team: Team
    blocks: Shards
    workers: Sequence[int]
    metrics: Counter[str]
    staleness: Counter[int]
    deliver_local: Callable[[int, int, Tensor], None]


class ParameterServer(ABC):
    """Server i. w, g: its block of the weights and the mean gradient [n]. t: updates it has had.

    last: the newest t that each worker has pushed. away: workers that push nothing before the rest that is coming, and
    the first step that they did not push.
    """

    def __init__(self, context: ServerContext, index: int, w: Tensor, options: OptimizerOptions) -> None:
        self.context, self.team, self.index, self.options = context, context.team, index, options
        self.w = context.blocks.padded(w, index)
        self.g = torch.zeros_like(self.w)
        self.optimizer = Optimizer(self, replace(options, clip_norm=0.0))  # the norm of a block is not the gradient's
        self.t = 0
        self.drain_count = 0
        self.last_step: dict[int, int] = {}
        self.drained: dict[int, int] = {}
        self.lock = self.team.lock()
        self._waits = self.team.event()  # for something else than a letter, from now on or in another way
        self.team.register_tag("push", context.blocks.size, METADATA_LEN)
        self.team.register_tag("away", 1)
        self.team.register_tag("pull")
        self.team.register_tag("copy", context.blocks.size)

    def start(self) -> None:
        """Begin to answer letters: once the state is what others may work with."""
        self.team.spawn(self._push_loop, "server: push")
        self.team.spawn(self._timeout_loop, "server: watch")
        self.team.spawn(self._drain_loop, "server: away")
        self.team.spawn(self._pull_loop, "server: pull")

    # what a strategy says

    @abstractmethod
    def receive(self, push: Push) -> None:
        """Take a gradient; holding the lock."""

    @abstractmethod
    def apply_ready(self) -> None:
        """Do the updates that are due, holding the lock; called whenever something may have become due."""

    def next_timeout(self) -> float | None:
        """Seconds until `advance` has to look again, though nothing came; None: not before something does."""
        return None

    def sends_to(self, worker: int) -> bool:
        """Whether a worker is among those that the block of the present t is broadcast to."""
        return True

    def on_duplicate(self, push: Push) -> None:
        """A gradient that has come before: the answer was lost, or is not due yet; holding the lock."""
        if self.t > push.t:
            self.send(push.worker)

    def on_pull(self, worker: int) -> None:
        """A worker asks for the block; holding the lock."""
        self.send(worker)

    # what happens

    def push(self, push: Push) -> None:
        with self.lock:
            if push.t <= self.last_step.get(push.worker, -1):
                self.on_duplicate(push)
                return
            waited = self.next_timeout()
            if push.t >= self.drained.get(push.worker, push.t + 1):
                del self.drained[push.worker]  # it is another incarnation
            self.last_step[push.worker] = push.t
            self.receive(push)
            self.apply_ready()
            if self.next_timeout() != waited:
                self._waits.set()

    def mark_drained(self, worker: int, t: int, drain_count: int) -> None:
        """A worker has pushed all steps before t, and will push nothing before rest number `rests`."""
        with self.lock:
            if drain_count == self.drain_count:
                self.drained[worker] = t
                self.apply_ready()

    def send(self, worker: int) -> None:
        """⟨w_i, t⟩ to a worker."""
        if worker == self.team.rank:
            self.context.deliver_local(self.index, self.t, self.w.clone())
        else:
            self.team.send(worker, "weights", self.t, self.w)

    def broadcast(self) -> None:
        """⟨w_i, t⟩ to all living workers, beginning with the next rank, so that servers do not crowd at one worker."""
        alive, rank = self.team.live_ranks(), self.team.rank
        workers = [worker for worker in self.context.workers if worker in alive and self.sends_to(worker)]
        for worker in sorted(workers, key=lambda worker: (worker - rank) % self.team.size):
            self.send(worker)

    def update(self, lr: float) -> None:
        """w_i <- w_i - rate x u(g_i), t <- t + 1."""
        self.team.simulate_cost("update", len(self.w))
        self.optimizer.lr = lr
        self.optimizer.step()
        self.t += 1

    def drain(self, drain_count: int) -> None:
        """Everybody is at rest: what is left are gradients of the dead. Forget them, and who was away."""
        with self.lock:
            self.drain_count = drain_count
            self.drained.clear()
            self.clear_pending()

    @abstractmethod
    def clear_pending(self) -> None:
        """Drop gradients that wait; holding the lock."""

    # state

    def state_dict(self) -> dict[str, Any]:
        return {"block": self.index, "w": self.w, "t": self.t, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any] | None, w: Tensor, t: int, drain_count: int) -> None:
        """Take up a state; where there is none of this block, weights w [N] of version t."""
        self.drain_count = drain_count
        self.last_step.clear()
        if state is not None and state["block"] == self.index and len(state["w"]) == len(self.w):
            self.w.copy_(state["w"])
            self.t = state["t"]
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            log.warning("block %d begins without momentum: the checkpoint has none of this server", self.index)
            self._restore(t, self.context.blocks.padded(w, self.index))

    def recover(self) -> None:
        """After a restart, before `start`: take the newest copy of the block that a worker has.

        Whom a letter does not reach is asked again: workers that are away tell only a server that asks that they are.
        """
        silent = {rank for rank in self.team.live_ranks() if rank != self.team.rank and rank in self.context.workers}
        copies: list[Message] = []
        end = self.team.now() + RECOVERY_TIMEOUT
        while silent and self.team.now() < end:
            for worker in sorted(silent):
                self.team.send(worker, "lost", 0)
            while silent and (message := self.team.recv("copy", timeout=RETRY_INTERVAL)) is not None:
                silent.discard(message.source)
                copies.append(message)
                end = self.team.now() + RECOVERY_TIMEOUT
        newest = max(copies, key=lambda message: message.clock, default=None)
        if newest is None:
            log.warning("server %d is back; no worker answered, so it has the block of the last checkpoint", self.index)
        else:
            log.info("server %d is back, with learner %d's copy and no momentum", self.index, newest.source)
            self._restore(newest.clock, newest.tensors[0])

    def _restore(self, t: int, w: Tensor) -> None:
        self.t = t
        self.w.copy_(w)
        self.optimizer.reset()

    # tasks

    def _push_loop(self) -> None:
        while True:
            message = self.team.recv("push")
            if message is not None:
                self.push(read_push(message))

    def _timeout_loop(self) -> None:
        """Look again where time alone, or a death, may end a wait."""
        while True:
            self._waits.wait(self.next_timeout())
            self._waits.clear()
            with self.lock:
                self.apply_ready()

    def _drain_loop(self) -> None:
        while True:
            message = self.team.recv("away")
            if message is not None:
                self.mark_drained(message.source, int(message.tensors[0]), message.clock)
                self.team.send(message.source, "heard", message.clock)

    def _pull_loop(self) -> None:
        while True:
            message = self.team.recv("pull")
            if message is not None:
                with self.lock:
                    self.on_pull(message.source)
