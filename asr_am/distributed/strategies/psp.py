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
from asr_am.distributed.leases import Gradient, Stats
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.param_server.base import Served
from asr_am.distributed.param_server.server import LOOK, Reach, Server
from asr_am.distributed.param_server.weight_shards import Push, mean_gradient, rate_of
from asr_am.distributed.team import Team
from asr_am.errors import InputError


@dataclass(frozen=True)
class Turns:
    """Who sends to whom, where it is not everybody to everybody: `count` of `receivers`, in turn."""

    count: int
    receivers: int

    def sends(self, sender: int, receiver: int, t: int) -> bool:
        return (sender + receiver + t) % self.receivers < self.count


def turns(sparing: bool, count: int, receivers: int) -> Turns:
    return Turns(count if sparing else receivers, receivers)


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

    def need(self, blocks: int) -> int:
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


class Psp(Served):
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
        self._need = self._rule.need(len(self.blocks))
        self._pushing = turns(sparing, c or len(self.workers), len(self.workers))
        self._rested = True  # the weights at hand are complete

    def step(self, gradient: Gradient) -> Stats | None:
        self._start()
        if not self._rested:
            self._pull()
        stats = gradient(None)
        if stats is None:
            return None
        self._clip()
        team, worker, t, blocks = self.team, self.worker, self._t, range(len(self.blocks))
        late = all(worker.newest(block) > t for block in blocks)
        self.staleness[t - min(worker.versions)] += 1
        silent = [block for block in blocks if not self._pushing.sends(team.rank, block, t)]
        self._push(stats, [t] * len(blocks), silent)
        self._t, self._rested = t + 1, False
        return replace(stats, applied=False) if late else stats

    def _pull(self) -> None:
        """w^t, and t, with what has come until now of late blocks dropped."""
        worker, rule, blocks = self.worker, self._rule, range(len(self.blocks))
        worker.wait([self._t] * len(blocks), self._need)
        self._t = sorted((worker.newest(block) for block in blocks), reverse=True)[self._need - 1]
        if rule.tau2 > 0:
            worker.linger(self._t, rule.tau2)
        if dropped := worker.take(0 if rule.late_blocks == "cache" else self._t):
            self.counts["late_blocks"] += dropped

    def _make_server(self, reach: Reach, index: int) -> Server:
        return PspServer(reach, index, self.params.w, self.optimizer.options, self._rule)

    def _complete(self, versions: Sequence[int]) -> None:
        """At rest, all take up the largest t, but for the blocks of dead servers: nobody could pull those."""
        self._t, self._rested = max(versions), True
        if self.server is not None:
            with self.server.lock:
                self.server.t = self._t
        super()._complete(versions)
        for block, version in enumerate(versions):
            if version >= 0:
                self.worker.versions[block] = self._t

    def join(self) -> None:
        super().join()
        self._t, self._rested = max(self.worker.versions), True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._t, self._rested = max(self.worker.versions), True


class PspServer(Server):
    def __init__(self, reach: Reach, index: int, w: Tensor, options: OptimizerOptions, rule: PspOptions) -> None:
        super().__init__(reach, index, w, options)
        k, S = len(reach.workers), len(reach.blocks)
        self._c, self._tau1 = rule.c or k, rule.tau1
        self._pushing, self._sending = turns(rule.sparing, self._c, k), turns(rule.sparing, rule.need(S), S)
        self._sparing = rule.sparing
        self._gradients: dict[int, dict[int, Push]] = {}  # by step and worker
        self._known: set[int] = set()  # workers that have pushed anything
        self._enough: float | None = None  # since when c gradients are there

    def receive(self, push: Push) -> None:
        if push.t >= self.t:
            self._gradients.setdefault(push.t, {})[push.worker] = push
        else:
            self.reach.counts["late_gradients"] += 1
            if push.worker not in self._known:
                self.send(push.worker)  # which may wait for what this server's last incarnation did not send
        self._known.add(push.worker)

    def advance(self) -> None:
        while self._is_due():
            self._step()

    def patience(self) -> float | None:
        if not self._gradients:
            return None
        enough = self._enough
        return LOOK if enough is None else max(enough + self._tau1 - self.team.now(), 0.0)

    def _is_due(self) -> bool:
        """Whether the wait for gradients of step t is over."""
        if not self._gradients:
            return False
        oldest = min(self._gradients)
        if len(self._gradients[oldest]) >= self._c:
            self.t = oldest
            self._enough = self.team.now() if self._enough is None else self._enough
            return self.team.now() >= self._enough + self._tau1 or self._all_responded()
        if not self._all_responded():
            return False
        self.t = oldest
        return self._all_responded()

    def _all_responded(self) -> bool:
        """Whether no gradient of step t can come any more."""
        here = self._gradients.get(self.t, {})
        missing = [
            j for j in self.reach.workers
            if j not in here and self.last.get(j, -1) <= self.t and self.away.get(j, self.t + 1) > self.t
            and self._pushing.sends(j, self.index, self.t)
        ]  # fmt: skip
        return not missing or not set(missing) & set(self.team.alive())

    def _step(self) -> None:
        pushes = list(self._gradients.pop(self.t).values())
        self._enough = None
        k = len(self.reach.workers)
        pushed = {push.worker for push in pushes}
        d = len(pushes) + sum(j not in pushed and first <= self.t for j, first in self.away.items())
        self.team.charge("averaging", len(pushes) * len(self.g))
        mean_gradient(self.g, pushes)  # g_i / d
        self.update(rate_of(pushes) * (d / k))
        self.broadcast()

    def sends_to(self, worker: int) -> bool:
        return worker in self.away or self._sending.sends(self.index, worker, self.t)

    def go_away(self, worker: int, t: int, rests: int) -> None:
        super().go_away(worker, t, rests)
        if self._sparing:
            with self.lock:
                self.send(worker)  # it waits for an answer that it may not be sent

    def forget(self) -> None:
        self._gradients.clear()
        self._enough = None
