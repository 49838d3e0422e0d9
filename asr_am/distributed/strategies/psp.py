"""Partially synchronous SGD on parameter servers (PSP-SGD): nobody waits for slow workers, nor for slow servers.

Algorithm 1 of "Faster distributed synchronous SGD with weak synchronization" (2018), with S servers and k workers.

    server i:  broadcast ⟨w_i^t, t⟩;  receive ⟨g'_i, t'⟩, dropping those with t' < t, until c gradients have come and τ1
               has passed since, or all workers have responded;  w_i^{t+1} ← w_i^t − α d/k u(g_i / d)
    worker j:  receive ⟨w_i^{t'}, t'⟩, dropping those with t' < t, until b of the blocks have come and τ2 has passed
               since, or all servers have responded;  push the gradient's blocks ⟨g_i, t⟩

w_i block i of the weights, t step, d gradients received, g_i / d their mean (by frames), α learning rate for all k (its
η is α/k), u the optimizer's rule. With c = k and b = 1 it is `ps_sync`, but for `clip_norm`: here it
limits the norm of a worker's own gradient, there that of the mean. What the printed algorithm leaves open:

- One gradient of a worker counts in a step: one for a later step is kept until then.
- The first pull is complete, and so is every one at rest.
- A worker that is behind takes up the step that b of its blocks are of, a server the oldest step that gradients still
  come for: after a restart, or letters that were lost, all that they send would be dropped for ever.
- Workers that have no data left have responded, and count in d as those of `sync` do, from the first step that they did
  not push. A dead worker has responded, too.
- A block is of the step that its weights are of, whatever step its worker is at: a server that was restarted takes the
  newest copy.
- A late block is dropped though the worker has an older one (`late_blocks`: drop), or taken (`cache`).
- "Servers and workers can choose not to send" (`sparing`): in each step every block is pushed by c workers only, and
  sent to as many as b asks for, in turn. Fewer messages, but the choice is made beforehand: servers then wait for those
  c, not for the first c, and a slow one among them delays all.

Staleness, as counted: of the oldest block that a gradient was taken at. Gradients that a worker knows to be late
everywhere are `applied=False`. counts: `late_gradients`, blocks of gradients that servers dropped; `late_blocks`,
blocks of weights that workers did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Who sends to whom, where it is not everybody to everybody: `count` of `receivers`, in turn."""

    count: int
    receivers: int

    def sends(self, sender: int, receiver: int, t: int) -> bool:
        return (sender + receiver + t) % self.receivers < self.count


def round_robin(sparing: bool, count: int, receivers: int) -> RoundRobinSubset:
    return RoundRobinSubset(count if sparing else receivers, receivers)


@dataclass(frozen=True)
class PspOptions:
    """c: gradients that a server waits for, None: of all workers. b: share of the blocks that a worker waits for.
    tau1, tau2: seconds that they then wait longer.
    """

    c: int | None = None
    b: float = 1.0
    tau1: float = 0.0
    tau2: float = 0.0
    late_blocks: Literal["drop", "cache"] = "drop"
    sparing: bool = False

    def num_required(self, blocks: int) -> int:
        """How many blocks a worker waits for."""
        return math.ceil(self.b * blocks - 1e-9)

    def check(self, workers: int) -> None:
        """InputError for values that are out of range."""
        if self.c is not None and not 1 <= self.c <= workers:
            raise InputError(f"strategy.c={self.c}: must be 1 to {workers}, the number of workers")
        if not 0 < self.b <= 1:
            raise InputError(f"strategy.b={self.b}: is a share of the blocks, above 0 and at most 1")
        for name in ("tau1", "tau2"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"strategy.{name}={getattr(self, name)}: seconds, at least 0")
        if self.late_blocks not in ("drop", "cache"):
            raise InputError(f"strategy.late_blocks={self.late_blocks}: is drop or cache")


class Psp(ParameterServerStrategy):
    name = "psp"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, servers: int | None = None, timeout: float = 60.0,
        apart: bool = False, c: int | None = None, b: float = 1.0, tau1: float = 0.0, tau2: float = 0.0,
        late_blocks: Literal["drop", "cache"] = "drop", sparing: bool = False,
    ) -> None:  # fmt: skip
        self._rule = PspOptions(c, b, tau1, tau2, late_blocks, sparing)
        super().__init__(params, optimizer, team, servers, timeout, apart)
        self._rule.check(len(self.workers))
        self._t = 0
        self._num_required = self._rule.num_required(len(self.blocks))
        self._pushing = round_robin(sparing, c or len(self.workers), len(self.workers))
        self._weights_complete = True  # the weights at hand are complete

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._start()
        if not self._weights_complete:
            self._pull()
        step_result = gradient(None)
        if step_result is None:
            return None
        self._clip()
        team, worker, t, blocks = self.team, self.worker, self._t, range(len(self.blocks))
        late = all(worker.newest(block) > t for block in blocks)
        self.staleness[t - min(worker.versions)] += 1
        silent = [block for block in blocks if not self._pushing.sends(team.rank, block, t)]
        self._push(step_result, [t] * len(blocks), silent)
        self._t, self._weights_complete = t + 1, False
        return replace(step_result, applied=False) if late else step_result

    def _pull(self) -> None:
        """w^t, and t, with what has come until now of late blocks dropped."""
        worker, rule, blocks = self.worker, self._rule, range(len(self.blocks))
        worker.wait([self._t] * len(blocks), self._num_required)
        self._t = sorted((worker.newest(block) for block in blocks), reverse=True)[self._num_required - 1]
        if rule.tau2 > 0:
            worker.wait_extra(self._t, rule.tau2)
        if dropped := worker.apply_arrived(0 if rule.late_blocks == "cache" else self._t):
            self.metrics["late_blocks"] += dropped

    def _make_server(self, context: ServerContext, index: int) -> ParameterServer:
        return PspServer(context, index, self.params.w, self.optimizer.options, self._rule)

    def _pull_final(self, versions: Sequence[int]) -> None:
        """At rest, all take up the largest t, but for the blocks of dead servers: nobody could pull those."""
        self._t, self._weights_complete = max(versions), True
        if self.server is not None:
            with self.server.lock:
                self.server.t = self._t
        super()._pull_final(versions)
        for block, version in enumerate(versions):
            if version >= 0:
                self.worker.versions[block] = self._t

    def rejoin(self) -> None:
        super().rejoin()
        self._t, self._weights_complete = max(self.worker.versions), True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._t, self._weights_complete = max(self.worker.versions), True


class PspServer(ParameterServer):
    def __init__(
        self, context: ServerContext, index: int, w: Tensor, options: OptimizerOptions, rule: PspOptions
    ) -> None:
        super().__init__(context, index, w, options)
        k, S = len(context.workers), len(context.blocks)
        self._c, self._tau1 = rule.c or k, rule.tau1
        self._pushing, self._sending = (
            round_robin(rule.sparing, self._c, k),
            round_robin(rule.sparing, rule.num_required(S), S),
        )
        self._sparing = rule.sparing
        self._gradients: dict[int, dict[int, Push]] = {}  # by step and worker
        self._known: set[int] = set()  # workers that have pushed anything
        self._quorum_since: float | None = None  # since when c gradients are there

    def receive(self, push: Push) -> None:
        if push.t >= self.t:
            self._gradients.setdefault(push.t, {})[push.worker] = push
        else:
            self.context.metrics["late_gradients"] += 1
            if push.worker not in self._known:
                self.send(push.worker)  # which may wait for what this server's last incarnation did not send
        self._known.add(push.worker)

    def apply_ready(self) -> None:
        while self._is_due():
            self._step()

    def next_timeout(self) -> float | None:
        if not self._gradients:
            return None
        enough = self._quorum_since
        return POLL_INTERVAL if enough is None else max(enough + self._tau1 - self.team.now(), 0.0)

    def _is_due(self) -> bool:
        """Whether the wait for gradients of step t is over."""
        if not self._gradients:
            return False
        oldest = min(self._gradients)
        if len(self._gradients[oldest]) >= self._c:
            self.t = oldest
            self._quorum_since = self.team.now() if self._quorum_since is None else self._quorum_since
            return self.team.now() >= self._quorum_since + self._tau1 or self._all_responded()
        if not self._all_responded():
            return False
        self.t = oldest
        return self._all_responded()

    def _all_responded(self) -> bool:
        """Whether no gradient of step t can come any more."""
        here = self._gradients.get(self.t, {})
        missing = [
            j for j in self.context.workers
            if j not in here and self.last_step.get(j, -1) <= self.t and self.drained.get(j, self.t + 1) > self.t
            and self._pushing.sends(j, self.index, self.t)
        ]  # fmt: skip
        return not missing or not set(missing) & set(self.team.live_ranks())

    def _step(self) -> None:
        pushes = list(self._gradients.pop(self.t).values())
        self._quorum_since = None
        k = len(self.context.workers)
        pushed = {push.worker for push in pushes}
        d = len(pushes) + sum(j not in pushed and first <= self.t for j, first in self.drained.items())
        self.team.simulate_cost("averaging", len(pushes) * len(self.g))
        mean_gradient(self.g, pushes)  # g_i / d
        self.update(lr_of(pushes) * (d / k))
        self.broadcast()

    def sends_to(self, worker: int) -> bool:
        return worker in self.drained or self._sending.sends(self.index, worker, self.t)

    def mark_drained(self, worker: int, t: int, rests: int) -> None:
        super().mark_drained(worker, t, rests)
        if self._sparing:
            with self.lock:
                self.send(worker)  # it waits for an answer that it may not be sent

    def clear_pending(self) -> None:
        self._gradients.clear()
        self._quorum_since = None
