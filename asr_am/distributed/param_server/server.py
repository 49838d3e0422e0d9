"""A parameter server: one shard of the weights with its optimizer and version, and the tasks that answer workers.

The strategies differ in when a gradient is applied (`receive`, `apply_ready`). Everything else is shared here. There is
no server thread: the task that received a message, or the worker of the same rank, does the resulting work while it
holds the lock. The messages are described in `weight_shards`.

Shapes: N elements of all parameters, n of a shard.
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

from asr_am.distributed.leases import SegmentRecord
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.param_server.weight_shards import (
    METADATA_LEN,
    NO_COPY,
    NO_PUSH,
    Push,
    PushId,
    Shards,
    pack_answer,
    read_push,
)
from asr_am.distributed.team import Message, Team

log = logging.getLogger(__name__)

POLL_INTERVAL = 1.0  # seconds between two checks if an awaited worker has died
RECOVERY_TIMEOUT = 10.0  # seconds to wait for the next copy of a lost shard
RETRY_INTERVAL = 2.5  # seconds after which unanswered requests for a copy are repeated
DEATH_INTERVAL = 0.1  # seconds between two checks if a worker that was asked has died


@dataclass
class ServerContext:
    """The team around a server.

    Attributes:
        workers: all ranks that compute gradients.
        deliver_local: called as f(shard, t, w_i, acknowledged, slowest) in place of a message to the worker of the
            same rank.
    """

    team: Team
    shards: Shards
    workers: Sequence[int]
    metrics: Counter[str]
    staleness: Counter[int]
    deliver_local: Callable[[int, int, Tensor, PushId, int], None]


class ParameterServer(ABC):
    """Server i.

    Args:
        index: i.
        w: all weights [N]. The server copies its shard.

    Attributes:
        w: its shard of the weights [n].
        g: the mean gradient of the shard [n].
        t: version, the number of updates.
        drain_count: number of drains so far.
        last_push: identity of the newest push that each worker has sent.
        last_step: t of that push.
        acknowledged: identity of the newest push of each worker that was applied, or dropped for good.
        applied: digest of each gradient that was applied in this segment, by (segment, batch).
        drained: workers that push nothing more before the next drain, with the first step that they did not push.
        lock: guards all of these.
    """

    def __init__(self, context: ServerContext, index: int, w: Tensor, options: OptimizerOptions) -> None:
        self.context, self.team, self.index, self.options = context, context.team, index, options
        self.w = context.shards.padded(w, index)
        self.g = torch.zeros_like(self.w)
        self.optimizer = Optimizer(self, replace(options, clip_norm=0.0))  # the shard's norm is not the gradient's
        self.t = 0
        self.drain_count = 0
        self.last_push: dict[int, PushId] = {}
        self.last_step: dict[int, int] = {}
        self.acknowledged: dict[int, PushId] = {}
        self.applied: dict[tuple[int, int], int] = {}
        self._applied_before: dict[int, int] = {}  # digest by batch, of the segment before the last drain
        self.drained: dict[int, int] = {}
        self.lock = self.team.lock()
        self._timeout_changed = self.team.event()
        self.team.register_tag("push", context.shards.size, METADATA_LEN)
        self.team.register_tag("away", 1)
        self.team.register_tag("pull")
        self.team.register_tag("copy", context.shards.size)

    def start(self) -> None:
        """Starts to answer messages, once the state is what workers may use."""
        self.team.spawn(self._push_loop, "server: push")
        self.team.spawn(self._timeout_loop, "server: watch")
        self.team.spawn(self._drain_loop, "server: away")
        self.team.spawn(self._pull_loop, "server: pull")

    # overridden by strategies. All are called with the lock held

    @abstractmethod
    def receive(self, push: Push) -> None:
        """Accepts a new gradient."""

    @abstractmethod
    def apply_ready(self) -> None:
        """Does the updates that are due. Called whenever one may have become due."""

    @abstractmethod
    def clear_pending(self) -> None:
        """Drops gradients that wait for others."""

    def next_timeout(self) -> float | None:
        """Returns the seconds after which `apply_ready` must run even if no message arrives, None for never."""
        return None

    def sends_to(self, worker: int) -> bool:
        """Returns whether the shard is broadcast to this worker at the present t."""
        return True

    def on_duplicate(self, push: Push) -> None:
        """Handles a gradient that arrived before: its answer was lost, or is not due yet."""
        if self.t > push.t:
            self.send(push.worker)

    def on_pull(self, worker: int, incarnation: int) -> None:
        """Handles a worker's request for the shard. A higher incarnation than its pushes had says that it rejoins."""
        self.send(worker, exact=True)

    def slowest(self, but: int) -> int:
        """Returns the steps of the slowest worker other than `but`, where the strategy counts them."""
        return 0

    # events, and the update

    def push(self, push: Push) -> None:
        """Handles a worker's gradient."""
        with self.lock:
            if push.id <= self.last_push.get(push.worker, NO_PUSH):
                self.on_duplicate(push)
                return
            if push.id.segment < self.drain_count:
                return  # sent to the server that this one replaces. The worker has drained since and waits for nothing
            timeout = self.next_timeout()
            if push.t >= self.drained.get(push.worker, push.t + 1):
                del self.drained[push.worker]  # the worker was restarted after it had announced its drain
            self.last_push[push.worker], self.last_step[push.worker] = push.id, push.t
            self.receive(push)
            self.apply_ready()
            if self.next_timeout() != timeout:
                self._timeout_changed.set()

    def mark_drained(self, worker: int, t: int, drain_count: int) -> None:
        """Handles a worker's announcement that it is drained.

        Args:
            t: it has pushed all steps before t.
            drain_count: number of the drain that it waits for. Announcements of an earlier one are ignored.
        """
        with self.lock:
            if drain_count == self.drain_count:
                self.drained[worker] = t
                self.apply_ready()

    def take_new(self, pushes: Sequence[Push]) -> list[Push]:
        """Returns the pushes whose batch was not applied in this segment, and records that they are applied now.

        A learner may die after its push and before it completes the batch. The batch is then computed again, and the
        servers that have applied the first gradient drop the second one.
        """
        new = []
        for push in pushes:
            key = push.id.segment, push.batch
            if key in self.applied:
                self.context.metrics["duplicate_gradients"] += 1
            else:
                self.applied[key] = push.digest
                new.append(push)
        return new

    def send(self, worker: int, exact: bool = False) -> None:
        """Sends ⟨w_i, t⟩ to a worker, and acknowledges its pushes. `exact`: as int32, which is never rounded."""
        acknowledged, slowest = self.acknowledged.get(worker, NO_PUSH), self.slowest(but=worker)
        if worker == self.team.rank:
            self.context.deliver_local(self.index, self.t, self.w.clone(), acknowledged, slowest)
        else:
            w = self.w.view(torch.int32) if exact else self.w
            self.team.send(worker, "weights", self.t, w, pack_answer(acknowledged, slowest))

    def broadcast(self) -> None:
        """Sends ⟨w_i, t⟩ to all live workers, from the next rank on, so that servers do not all begin with the same."""
        alive, rank = set(self.team.live_ranks()), self.team.rank
        workers = [worker for worker in self.context.workers if worker in alive and self.sends_to(worker)]
        for worker in sorted(workers, key=lambda worker: (worker - rank) % self.team.size):
            self.send(worker)

    def update(self, lr: float) -> None:
        """Applies w_i <- w_i - lr x u(g_i), t <- t + 1."""
        self.team.simulate_cost("update", len(self.w))
        self.optimizer.lr = lr
        self.optimizer.step()
        self.t += 1

    def drain(self, drain_count: int) -> None:
        """Ends a segment when the team is drained: drops gradients of the dead, and forgets who was drained."""
        with self.lock:
            self._applied_before = {
                batch: digest for (segment, batch), digest in self.applied.items() if segment == self.drain_count
            }
            self.drain_count = drain_count
            self.drained.clear()
            self.applied = {key: digest for key, digest in self.applied.items() if key[0] >= drain_count}
            self.clear_pending()

    def unapplied(self, record: SegmentRecord) -> list[int]:
        """Returns the completed batches that it has not applied. RuntimeError: it has applied other examples."""
        with self.lock:
            applied = self._applied_before
        for done in record.completions:
            if applied.get(done.batch, done.digest) != done.digest:
                raise RuntimeError(
                    f"server {self.index} applied a gradient of other examples than those of batch {done.batch}"
                )
        return [done.batch for done in record.completions if done.batch not in applied]

    # state

    def state_dict(self) -> dict[str, Any]:
        return {"block": self.index, "w": self.w, "t": self.t, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any] | None, w: Tensor, t: int, drain_count: int) -> bool:
        """Continues from a checkpoint.

        Args:
            state: a server's state. If it is not of this shard, the weights are taken instead.
            w: all weights [N].
            t: their version.
            drain_count: number of drains before the checkpoint.

        Returns:
            False if the state is not of this shard, so that the momentum is missing: see `take_over`.
        """
        self.drain_count = drain_count
        self.last_push.clear()
        self.last_step.clear()
        self.acknowledged.clear()
        self.applied.clear()
        if state is not None and state["block"] == self.index and len(state["w"]) == len(self.w):
            self.w.copy_(state["w"])
            self.t = state["t"]
            self.optimizer.load_state_dict(state["optimizer"])
            return True
        self._restore(t, self.context.shards.padded(w, self.index))
        return False

    def take_over(self, states: Sequence[dict[str, Any]], num_shards: int) -> None:
        """Continues with the momentum that other servers had in a checkpoint, cut into the shards of now.

        Args:
            states: states of the servers that the checkpoint has, one for each shard unless a server was dead.
            num_shards: number of shards of the checkpoint.
        """
        shards = self.context.shards
        before = replace(shards, ranks=tuple(range(num_shards)))
        rules = {state["block"]: state["optimizer"] for state in states}
        first, last = self.index * shards.size, min((self.index + 1) * shards.size, shards.elements) - 1
        needed = range(first // before.size, last // before.size + 1)
        if not needed or not all(shard in rules and rules[shard]["state"] for shard in needed):
            log.warning("shard %d starts without momentum: the checkpoint has no state of this server", self.index)
            return
        names = rules[needed[0]]["state"][0]
        moments: dict[str, Any] = {}
        for name, value in names.items():
            parts = {shard: rules[shard]["state"][0][name] for shard in needed}
            if isinstance(value, Tensor) and value.dim():
                whole = torch.zeros(num_shards * before.size)
                for shard, part in parts.items():
                    before.of(whole, shard).copy_(part)
                moments[name] = shards.padded(whole[: shards.elements], self.index)
            else:  # Adam's number of steps
                moments[name] = max(parts.values()) if value is not None else None
        self.optimizer.load_state_dict({"state": {0: moments}, "param_groups": rules[needed[0]]["param_groups"]})

    def recover(self) -> None:
        """Takes the newest copy of the shard that a worker holds. Called after a restart, before `start`.

        If there is none, the updates since the last checkpoint are lost, and the team starts again from there. Retries
        unanswered requests. A worker that dies meanwhile has no copy any more. The request also tells drained workers
        to announce their drain again.
        """
        silent = {rank for rank in self.team.live_ranks() if rank != self.team.rank and rank in self.context.workers}
        copies: list[Message] = []
        retry, deadline = self.team.now(), self.team.now() + RECOVERY_TIMEOUT
        while silent and self.team.now() < deadline:
            if self.team.now() >= retry:
                retry = self.team.now() + RETRY_INTERVAL
                for worker in sorted(silent):
                    self.team.send(worker, "lost", 0)
            if (message := self.team.recv("copy", timeout=DEATH_INTERVAL)) is not None:
                silent.discard(message.source)
                copies.append(message)
                retry, deadline = self.team.now() + RETRY_INTERVAL, self.team.now() + RECOVERY_TIMEOUT
            silent.intersection_update(self.team.live_ranks())
        newest = max(copies, key=lambda message: message.clock, default=None)
        if newest is None or newest.clock == NO_COPY:
            self.team.restart_team(f"no live learner has a copy of shard {self.index}, whose server died")
        log.info("server %d restarted from learner %d's copy, without momentum", self.index, newest.source)
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
        """Runs `apply_ready` when a timeout or a death may have ended a wait."""
        while True:
            self._timeout_changed.wait(self.next_timeout())
            self._timeout_changed.clear()
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
                    self.on_pull(message.source, message.clock)
