"""Partially synchronous SGD on parameter servers (PSP-SGD): tolerates slow workers and slow servers.

Algorithm 1 of "Faster distributed synchronous SGD with weak synchronization" (2018), with S servers and k workers.

    server i:  broadcast ⟨w_i^t, t⟩;  receive ⟨g'_i, t'⟩, dropping those with t' < t, until c gradients have arrived and
               τ1 has passed since, or all workers have responded;  w_i^{t+1} ← w_i^t − α d/k u(g_i / d)
    worker j:  receive ⟨w_i^{t'}, t'⟩, dropping those with t' < t, until the share b of the shards has arrived and τ2
               has passed since, or all servers have responded;  push the gradient's shards ⟨g_i, t⟩

w_i shard i of the weights, t step, d gradients received, g_i / d their mean (by frames), α learning rate for all k (the
paper's η is α/k), u the optimizer's rule. With c = k and b = 1 it is `ps_sync`, except for `clip_norm`, which here
limits the norm of a worker's own gradient and there that of the mean. Points that the printed algorithm leaves open:

- One gradient of a worker counts in a step. One for a later step is kept until then.
- A batch is applied once at a server. A second gradient of it, after the death of a learner that had pushed but not
  completed the batch, counts in d like the response of a drained worker, without data. Nothing but t changes in a step
  in which all gradients are such.
- A push is repeated only while its worker waits for the next step. If a message is lost and the server goes on without
  the gradient, it is dropped like a late one, uncounted.
- The first pull is complete, and so is every pull of a drain.
- A worker that is behind continues with the step that the share b of its shards is of. A server continues with the
  oldest step that gradients still arrive for. Otherwise, after a restart or lost messages, all that they send would be
  dropped for ever.
- Drained workers have responded. They count in d as they do in `sync`, from the first step that they did not push.
  Dead workers have responded, too.
- A shard's step is that of its weights, whatever step its worker is at. A restarted server takes the newest copy.
- A late shard is dropped although the worker has an older one (`late_blocks=drop`), or taken (`late_blocks=cache`).
- "Servers and workers can choose not to send" (`sparing=true`): in each step every shard is pushed by c workers only,
  and sent to as many workers as b requires, in turn. There are fewer messages, but the choice is made beforehand.
  Servers then wait for those c workers, not for the first c, so a slow one among them delays all. A step whose c
  workers are all dead or drained changes nothing but t.

Staleness is counted as that of the oldest shard that a gradient was taken at. Gradients that a worker knows to be late
everywhere are `applied=False`. `metrics` counts `late_gradients` and `duplicate_gradients`, shards of gradients that
servers dropped because they were late or of a batch that was applied before, and `late_blocks`, shards of weights that
workers dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.param_server.base import ParameterServerStrategy
from asr_am.distributed.param_server.server import POLL_INTERVAL, ParameterServer, ServerContext
from asr_am.distributed.param_server.weight_shards import Push, lr_of, mean_gradient
from asr_am.distributed.team import Team
from asr_am.errors import InputError


@dataclass(frozen=True)
class RoundRobinSubset:
    """A schedule in which each sender sends to `count` of `receivers` in each step, in turn."""

    count: int
    receivers: int

    def sends(self, sender: int, receiver: int, t: int) -> bool:
        return (sender + receiver + t) % self.receivers < self.count


def round_robin(reduced_messages: bool, count: int, receivers: int) -> RoundRobinSubset:
    """Returns the schedule. Without `reduced_messages` all send to all."""
    return RoundRobinSubset(count if reduced_messages else receivers, receivers)


@dataclass(frozen=True)
class PspOptions:
    """The rule of partial synchronisation.

    Attributes:
        c: number of gradients that a server waits for, None for all workers'. Without ranks that are gone for good, it
            waits for those of the workers that are left, at most.
        b: share of the shards that a worker waits for.
        tau1: seconds that a server then waits longer.
        tau2: seconds that a worker then waits longer.
        late_blocks: what happens to late shards, drop or cache.
        reduced_messages: send only the messages that c and b require (`strategy.sparing`).
    """

    c: int | None = None
    b: float = 1.0
    tau1: float = 0.0
    tau2: float = 0.0
    late_blocks: Literal["drop", "cache"] = "drop"
    reduced_messages: bool = False

    def num_required(self, shards: int) -> int:
        """Returns the number of shards that a worker waits for."""
        return math.ceil(self.b * shards - 1e-9)

    def quorum(self, workers: int) -> int:
        """Returns the number of gradients that a server waits for."""
        return min(self.c or workers, workers)

    def check(self, workers: int) -> None:
        """Raises InputError for values that are out of range."""
        if self.c is not None and not 1 <= self.c <= workers:
            raise InputError(f"strategy.c={self.c}: must be 1 to {workers}, the number of workers")
        if not 0 < self.b <= 1:
            raise InputError(f"strategy.b={self.b}: must be a share of the shards, above 0 and at most 1")
        for name in ("tau1", "tau2"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"strategy.{name}={getattr(self, name)}: must be at least 0 seconds")
        if self.late_blocks not in ("drop", "cache"):
            raise InputError(f"strategy.late_blocks={self.late_blocks}: must be drop or cache")


class Psp(ParameterServerStrategy):
    """Partially synchronous SGD.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule.
        team: this learner's end of the team.
        servers: and `timeout`, `apart`: see `ParameterServerStrategy`.
        c: and `b`, `tau1`, `tau2`, `late_blocks`: see `PspOptions`.
        sparing: reduced messages, see above.
    """

    name = "psp"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, servers: int | None = None, timeout: float = 60.0,
        apart: bool = False, c: int | None = None, b: float = 1.0, tau1: float = 0.0, tau2: float = 0.0,
        late_blocks: Literal["drop", "cache"] = "drop", sparing: bool = False,
    ) -> None:  # fmt: skip
        self._psp = PspOptions(c, b, tau1, tau2, late_blocks, sparing)
        super().__init__(params, optimizer, team, servers, timeout, apart)
        self._psp.check(team.size - self.dedicated_servers)
        self._t = 0
        self._num_required = self._psp.num_required(len(self.shards))
        self._pushing = round_robin(sparing, self._psp.quorum(len(self.workers)), len(self.workers))
        self._weights_complete = True  # params.w is w^t, pulled or loaded

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._start()
        if not self._weights_complete:
            self._pull()
        step_result = gradient(None)
        if step_result is None:
            return None
        self._clip()
        team, worker, t, shards = self.team, self.worker, self._t, range(len(self.shards))
        late = all(worker.newest(shard) > t for shard in shards)
        self.staleness[t - min(worker.versions)] += 1
        number = self.workers.index(team.rank)
        skip = [shard for shard in shards if not self._pushing.sends(number, shard, t)]
        self._push(step_result, [t] * len(shards), skip)
        self._t, self._weights_complete = t + 1, False
        return replace(step_result, applied=False) if late else step_result

    def _pull(self) -> None:
        """Pulls w^t and sets t. Drops the late shards that have arrived."""
        worker, psp, shards = self.worker, self._psp, range(len(self.shards))
        worker.wait([self._t] * len(shards), self._num_required)
        self._t = sorted((worker.newest(shard) for shard in shards), reverse=True)[self._num_required - 1]
        if psp.tau2 > 0:
            worker.wait_extra(self._t, psp.tau2)
        if dropped := worker.apply_arrived(0 if psp.late_blocks == "cache" else self._t):
            self.metrics["late_blocks"] += dropped

    def _make_server(self, context: ServerContext, index: int) -> ParameterServer:
        return PspServer(context, index, self.params.w, self.optimizer.options, self._psp)

    def _pull_final(self, versions: Sequence[int]) -> None:
        """Pulls all shards and sets t to the largest, except for the shards of dead servers, which cannot be pulled."""
        self._t, self._weights_complete = max(versions), True
        if self.server is not None:
            with self.server.lock:
                self.server.t = max(self.server.t, self._t)  # it may have gone on: `PspServer._is_void`
        super()._pull_final(versions)
        for shard, version in enumerate(versions):
            if version >= 0:
                self.worker.versions[shard] = max(self.worker.versions[shard], self._t)

    def rejoin(self) -> None:
        super().rejoin()
        self._t, self._weights_complete = max(self.worker.versions), True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._t, self._weights_complete = max(self.worker.versions), True


class PspServer(ParameterServer):
    """Updates when c gradients of a step have arrived and τ1 has passed since."""

    def __init__(
        self, context: ServerContext, index: int, w: Tensor, options: OptimizerOptions, psp: PspOptions
    ) -> None:
        super().__init__(context, index, w, options)
        k, S = len(context.workers), len(context.shards)
        self._c, self._tau1, self._reduced_messages = psp.quorum(k), psp.tau1, psp.reduced_messages
        self._pushing = round_robin(psp.reduced_messages, self._c, k)
        self._sending = round_robin(psp.reduced_messages, psp.num_required(S), S)
        self._gradients: dict[int, dict[int, Push]] = {}  # by step and worker
        self._awaited = 0  # number of a worker that was waited for at the last look
        self._known: set[int] = set()  # workers that have pushed to this incarnation
        self._quorum_since: float | None = None  # time at which c gradients of step t were complete

    def receive(self, push: Push) -> None:
        # a dead learner may have left a gradient for the step that its replacement begins with
        if push.t >= self.t and push.worker not in self._gradients.get(push.t, {}):
            self._gradients.setdefault(push.t, {})[push.worker] = push
        else:
            self.context.metrics["late_gradients"] += 1
            self.acknowledged[push.worker] = push.id
            if push.worker not in self._known:
                self.send(push.worker)  # it may wait for an answer that this server's last incarnation did not send
        self._known.add(push.worker)

    def apply_ready(self) -> None:
        while self._is_due():
            self._step()

    def next_timeout(self) -> float | None:
        if not self._gradients:
            return POLL_INTERVAL if self._reduced_messages else None  # see `_is_void`
        since = self._quorum_since
        return POLL_INTERVAL if since is None else max(since + self._tau1 - self.team.now(), 0.0)

    def _is_due(self) -> bool:
        """Returns whether the wait for gradients is over, and moves t to the oldest step that has any."""
        if not self._gradients:
            return self._is_void()
        oldest = min(self._gradients)
        if len(self._gradients[oldest]) >= self._c:
            self.t = oldest
            self._quorum_since = self.team.now() if self._quorum_since is None else self._quorum_since
            return self.team.now() >= self._quorum_since + self._tau1 or self._all_responded()
        if not self._all_responded():
            return False
        self.t = oldest
        return self._all_responded()

    def _is_void(self) -> bool:
        """Returns whether no worker that is to push for step t is left, but others are: it gets no gradient at all."""
        if not self._reduced_messages:
            return False
        live = self.team.live_ranks()
        left = [n for n, j in enumerate(self.context.workers) if j in live and self.drained.get(j, self.t + 1) > self.t]
        return bool(left) and not any(self._pushing.sends(n, self.index, self.t) for n in left)

    def _all_responded(self) -> bool:
        """Returns whether no further gradient of step t can arrive."""
        arrived = self._gradients.get(self.t, {})
        workers, first, live = self.context.workers, self._awaited, self.team.live_ranks()
        for number in chain(range(first, len(workers)), range(first)):
            j = workers[number]
            if (
                j not in arrived and self.last_step.get(j, -1) <= self.t and self.drained.get(j, self.t + 1) > self.t
                and self._pushing.sends(number, self.index, self.t) and j in live
            ):  # fmt: skip
                self._awaited = number
                return False
        return True

    def _step(self) -> None:
        pushes = list(self._gradients.pop(self.t, {}).values())
        self._quorum_since = None
        k = len(self.context.workers)
        pushed = {push.worker for push in pushes}
        d = len(pushes) + sum(j not in pushed and first <= self.t for j, first in self.drained.items())
        self.acknowledged.update((push.worker, push.id) for push in pushes)
        if new := self.take_new(pushes):
            self.team.simulate_cost("averaging", len(new) * len(self.g))
            mean_gradient(self.g, new)  # g_i / d
            self.update(lr_of(new) * (d / k))
        else:
            self.t += 1
        self.broadcast()

    def sends_to(self, worker: int) -> bool:
        return worker in self.drained or self._sending.sends(self.index, worker, self.t)

    def mark_drained(self, worker: int, t: int, drain_count: int) -> None:
        super().mark_drained(worker, t, drain_count)
        if self._reduced_messages:
            with self.lock:
                self.send(worker)  # it waits for an answer that the schedule may skip

    def clear_pending(self) -> None:
        self._gradients.clear()
        self._quorum_since = None
