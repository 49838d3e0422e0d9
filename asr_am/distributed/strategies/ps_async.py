"""Asynchronous SGD on parameter servers (ASGD): every gradient is applied when it arrives.

Dean et al. (NIPS 2012), Downpour SGD. With a bound it is stale synchronous parallel (SSP, Ho et al., NIPS 2013).

    worker j:   w ← pull();  g = ∇l(w);  push ⟨g_i, t_i⟩, t_i the version of shard i that g was taken at
    server i:   w_i ← w_i − α u(g_i);  t ← t + 1;  send ⟨w_i, t⟩ to j

w_i shard i of the weights, g_i of the gradient, α learning rate, u the optimizer's rule, with its momentum at the
server. Each worker's own gradient is clipped. Staleness is s = t − t_i, the updates of the shard since it was pulled,
about the number of workers - 1.

A worker repeats a push until the server acknowledges that push, so every server applies every gradient of a worker that
lives, once. When a learner dies after its push and before it completes the batch, the batch is computed again. Servers
that have applied its first gradient drop the second one. `metrics` counts these shards of gradients as
`duplicate_gradients`. A push that is under way when its worker dies after completing the batch may be lost.

This is equation 3 of Zhang et al. (ICASSP 2019). k workers then move k times as far per batch as `sync`, so α has to be
smaller. With `staleness_aware` they take α / max(s, 1) (Zhang et al., IJCAI 2016), and move about as far. `bound` is
the s of SSP: a worker begins a step when it has done at most so many more in this segment than the slowest, and waits
until then. With 0, all do each step together. Workers number their own steps, so all servers agree on them. If each
server counted the pushes that it received, two servers could count two workers differently after a crash, and the
workers would wait for each other for ever. A restarted server does not limit others by a worker that has not pushed to
it yet, and a restarted worker continues from the slowest one's steps. With one worker it is `local`.
"""

from __future__ import annotations

from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.param_server.base import ParameterServerStrategy
from asr_am.distributed.param_server.server import POLL_INTERVAL, ParameterServer, ServerContext
from asr_am.distributed.param_server.weight_shards import NO_PUSH, Push
from asr_am.distributed.team import Team
from asr_am.errors import InputError


class PsAsync(ParameterServerStrategy):
    """Asynchronous SGD. Its staleness is counted at the servers, once for each shard of a gradient.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule.
        team: this learner's end of the team.
        servers: and `timeout`, `apart`: see `ParameterServerStrategy`.
        staleness_aware: divide α by the staleness.
        bound: most steps that a worker may be ahead of the slowest, None for no bound.
    """

    name = "ps_async"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, servers: int | None = None, timeout: float = 60.0,
        apart: bool = False, staleness_aware: bool = False, bound: int | None = None,
    ) -> None:  # fmt: skip
        if bound is not None and bound < 0:
            raise InputError(f"strategy.bound={bound}: must be at least 0, or null for none")
        self._staleness_aware, self._bound = staleness_aware, bound
        super().__init__(params, optimizer, team, servers, timeout, apart)

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._start()
        self._flush()
        self.worker.apply_arrived()  # w = pull()
        step_result = gradient(None)  # g
        if step_result is None:
            return None
        self._clip()
        self._push(step_result, self.worker.versions)  # ⟨g_i, t_i⟩
        return step_result

    def _flush(self) -> None:
        self.worker.flush()

    def _make_server(self, context: ServerContext, index: int) -> ParameterServer:
        options = self.optimizer.options
        return AsyncServer(context, index, self.params.w, options, self._staleness_aware, self._bound)


class AsyncServer(ParameterServer):
    """Applies every gradient at once, and delays the answer to a worker that is too far ahead."""

    def __init__(
        self, context: ServerContext, index: int, w: Tensor, options: OptimizerOptions, staleness_aware: bool,
        bound: int | None,
    ) -> None:  # fmt: skip
        super().__init__(context, index, w, options)
        self._staleness_aware, self._bound = staleness_aware, bound
        self._steps = dict.fromkeys(context.workers, 0)  # steps of each worker in the segment, as far as they are known
        self._unanswered: list[int] = []

    def receive(self, push: Push) -> None:
        self.t = max(self.t, push.t)  # a restarted server continues from the newest version that it sees
        if self.take_new([push]):
            staleness = self.t - push.t
            self.context.staleness[staleness] += 1
            self.g.copy_(push.g)
            self.update(push.lr / max(staleness, 1) if self._staleness_aware else push.lr)
        self._steps[push.worker] = push.id.step
        self._unanswered.append(push.worker)

    def apply_ready(self) -> None:
        """Answers the workers that are not too far ahead of the slowest."""
        slowest = self.slowest()
        for worker in list(self._unanswered):
            if self._bound is None or worker in self.drained or self._steps[worker] <= slowest + self._bound:
                self._unanswered.remove(worker)
                self.acknowledged[worker] = self.last_push[worker]
                self.send(worker)

    def next_timeout(self) -> float | None:
        return POLL_INTERVAL if self._unanswered else None

    def on_duplicate(self, push: Push) -> None:
        if push.worker not in self._unanswered and push.id == self.last_push[push.worker]:
            self.send(push.worker)

    def on_pull(self, worker: int, incarnation: int) -> None:
        newest = self.last_push.get(worker, NO_PUSH).incarnation
        if worker in self.context.workers and incarnation > newest:  # it rejoins and has not pushed yet
            self._steps[worker] = self.slowest(but=worker)
            if worker in self._unanswered:
                self._unanswered.remove(worker)
            self.apply_ready()
        super().on_pull(worker, incarnation)

    def slowest(self, but: int = -1) -> int:
        """Returns the steps of the slowest live worker that is not drained, other than `but`. 0 if there is none."""
        if self._bound is None:
            return 0
        alive = self.team.live_ranks()
        return min((n for j, n in self._steps.items() if j != but and j in alive and j not in self.drained), default=0)

    def recover(self) -> None:
        super().recover()
        self._steps.clear()

    def clear_pending(self) -> None:
        self._steps = dict.fromkeys(self.context.workers, 0)
        self._unanswered.clear()
