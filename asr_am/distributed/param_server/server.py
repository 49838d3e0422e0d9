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
from asr_am.distributed.param_server.weight_shards import NOTE, Blocks, Push, read_push
from asr_am.distributed.team import Letter, Team

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two looks at who of the awaited has died
COPY = 10.0  # seconds to wait for the next copy of a block that was lost
AGAIN = 2.5  # seconds after which those that have not answered are asked again


@dataclass
class Reach:
    """What a server does on the team. workers: all ranks that compute gradients. own: takes ⟨w_i, t⟩ for the worker of
    the same rank, which no letter goes to; counts: the strategy's.
    """

    team: Team
    blocks: Blocks
    workers: Sequence[int]
    counts: Counter[str]
    staleness: Counter[int]
    own: Callable[[int, int, Tensor], None]


class Server(ABC):
    """Server i. w, g: its block of the weights and the mean gradient [n]. t: updates it has had.

    last: the newest t that each worker has pushed. away: workers that push nothing before the rest that is coming, and
    the first step that they did not push.
    """

    def __init__(self, reach: Reach, index: int, w: Tensor, options: OptimizerOptions) -> None:
        self.reach, self.team, self.index, self.options = reach, reach.team, index, options
        self.w = reach.blocks.padded(w, index)
        self.g = torch.zeros_like(self.w)
        self.optimizer = Optimizer(self, replace(options, clip_norm=0.0))  # the norm of a block is not the gradient's
        self.t = 0
        self.rests = 0
        self.last: dict[int, int] = {}
        self.away: dict[int, int] = {}
        self.lock = self.team.lock()
        self._waits = self.team.event()  # for something else than a letter, from now on or in another way
        self.team.accept("push", reach.blocks.size, NOTE)
        self.team.accept("away", 1)
        self.team.accept("pull")
        self.team.accept("copy", reach.blocks.size)

    def start(self) -> None:
        """Begin to answer letters: once the state is what others may work with."""
        self.team.spawn(self._serve, "server: push")
        self.team.spawn(self._watch, "server: watch")
        self.team.spawn(self._hear_away, "server: away")
        self.team.spawn(self._answer, "server: pull")

    # what a strategy says

    @abstractmethod
    def receive(self, push: Push) -> None:
        """Take a gradient; holding the lock."""

    @abstractmethod
    def advance(self) -> None:
        """Do the updates that are due, holding the lock; called whenever something may have become due."""

    def patience(self) -> float | None:
        """Seconds until `advance` has to look again, though nothing came; None: not before something does."""
        return None

    def sends_to(self, worker: int) -> bool:
        """Whether a worker is among those that the block of the present t is broadcast to."""
        return True

    def receive_again(self, push: Push) -> None:
        """A gradient that has come before: the answer was lost, or is not due yet; holding the lock."""
        if self.t > push.t:
            self.send(push.worker)

    def asked(self, worker: int) -> None:
        """A worker asks for the block; holding the lock."""
        self.send(worker)

    # what happens

    def push(self, push: Push) -> None:
        with self.lock:
            if push.t <= self.last.get(push.worker, -1):
                self.receive_again(push)
                return
            waited = self.patience()
            if push.t >= self.away.get(push.worker, push.t + 1):
                del self.away[push.worker]  # it is another incarnation
            self.last[push.worker] = push.t
            self.receive(push)
            self.advance()
            if self.patience() != waited:
                self._waits.set()

    def go_away(self, worker: int, t: int, rests: int) -> None:
        """A worker has pushed all steps before t, and will push nothing before rest number `rests`."""
        with self.lock:
            if rests == self.rests:
                self.away[worker] = t
                self.advance()

    def send(self, worker: int) -> None:
        """⟨w_i, t⟩ to a worker."""
        if worker == self.team.rank:
            self.reach.own(self.index, self.t, self.w.clone())
        else:
            self.team.post(worker, "weights", self.t, self.w)

    def broadcast(self) -> None:
        """⟨w_i, t⟩ to all living workers, beginning with the next rank, so that servers do not crowd at one worker."""
        alive, rank = self.team.alive(), self.team.rank
        workers = [worker for worker in self.reach.workers if worker in alive and self.sends_to(worker)]
        for worker in sorted(workers, key=lambda worker: (worker - rank) % self.team.size):
            self.send(worker)

    def update(self, rate: float) -> None:
        """w_i <- w_i - rate x u(g_i), t <- t + 1."""
        self.team.charge("update", len(self.w))
        self.optimizer.lr = rate
        self.optimizer.step()
        self.t += 1

    def rest(self, rests: int) -> None:
        """Everybody is at rest: what is left are gradients of the dead. Forget them, and who was away."""
        with self.lock:
            self.rests = rests
            self.away.clear()
            self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Drop gradients that wait; holding the lock."""

    # state

    def state_dict(self) -> dict[str, Any]:
        return {"block": self.index, "w": self.w, "t": self.t, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any] | None, w: Tensor, t: int, rests: int) -> None:
        """Take up a state; where there is none of this block, weights w [N] of version t."""
        self.rests = rests
        self.last.clear()
        if state is not None and state["block"] == self.index and len(state["w"]) == len(self.w):
            self.w.copy_(state["w"])
            self.t = state["t"]
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            log.warning("block %d begins without momentum: the checkpoint has none of this server", self.index)
            self._take_up(t, self.reach.blocks.padded(w, self.index))

    def recover(self) -> None:
        """After a restart, before `start`: take the newest copy of the block that a worker has.

        Whom a letter does not reach is asked again: workers that are away tell only a server that asks that they are.
        """
        silent = {rank for rank in self.team.alive() if rank != self.team.rank and rank in self.reach.workers}
        copies: list[Letter] = []
        end = self.team.now() + COPY
        while silent and self.team.now() < end:
            for worker in sorted(silent):
                self.team.post(worker, "lost", 0)
            while silent and (letter := self.team.collect("copy", timeout=AGAIN)) is not None:
                silent.discard(letter.source)
                copies.append(letter)
                end = self.team.now() + COPY
        newest = max(copies, key=lambda letter: letter.clock, default=None)
        if newest is None:
            log.warning("server %d is back; no worker answered, so it has the block of the last checkpoint", self.index)
        else:
            log.info("server %d is back, with learner %d's copy and no momentum", self.index, newest.source)
            self._take_up(newest.clock, newest.tensors[0])

    def _take_up(self, t: int, w: Tensor) -> None:
        self.t = t
        self.w.copy_(w)
        self.optimizer.reset()

    # tasks

    def _serve(self) -> None:
        while True:
            letter = self.team.collect("push")
            if letter is not None:
                self.push(read_push(letter))

    def _watch(self) -> None:
        """Look again where time alone, or a death, may end a wait."""
        while True:
            self._waits.wait(self.patience())
            self._waits.clear()
            with self.lock:
                self.advance()

    def _hear_away(self) -> None:
        while True:
            letter = self.team.collect("away")
            if letter is not None:
                self.go_away(letter.source, int(letter.tensors[0]), letter.clock)
                self.team.post(letter.source, "heard", letter.clock)

    def _answer(self) -> None:
        while True:
            letter = self.team.collect("pull")
            if letter is not None:
                with self.lock:
                    self.asked(letter.source)
