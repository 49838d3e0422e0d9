"""Asynchronous decentralised parallel SGD (ADPSGD): gossip beside the gradients, without waiting for slow learners.

Zhang et al. (ICASSP 2019), figures 3b and 4, and Lian et al. (ICML 2018). Senders and receivers alternate on a ring.

    training task:        g = calGrad(W);  atomically { W = pull_weights();  W = apply(W, g);  push_weights(W) }
    task of sender i:     after an update, with its left and right neighbour j in turn: send s_i, receive s_j, average
    task of receiver j:   for every s_i received: send s_j, average

W weights, g gradient, s snapshots. The gradient is taken at W, which nothing else writes meanwhile. Gossip uses another
buffer x: pull is W ← x, push is x ← W. Averaging merges the *difference*, x += (s_j - s_i)/2. An update between the
snapshot and the answer is so kept, and a completed exchange does not change the sum of x over all learners. Staleness
is counted as the averagings that were merged into x while the gradient was computed.

Three options are those of IBM's later systems:

    group_size    super-learners (Zhang et al., Interspeech 2019, arXiv 1907.05701): the learners of a group, usually of
                  one host, share a model. g is their mean by all-reduce, their first learner updates and gossips with
                  the first of other groups, and broadcasts W. Groups do not wait for each other, but each has its own
                  share of the batches, and after a death all start again. One group of all learners is `sync`
    partners      random: a ring drawn for each exchange (Zhang et al., ICASSP 2020, arXiv 2002.01119), in which senders
                  stay senders. exponential: see `topology.receivers`
    delay_by_one  (the same paper): a sender's update waits for the averaging of the update before. So each update is
                  followed by one averaging, beside the next gradient. Receivers never wait. If all updates happen
                  simultaneously, W(t+1) = M W(t) - α u(g(W(t))), with M the matching of step t
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.topology import Partners, check_groups, is_sender, receivers, require_even
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Group, Message, Team, Work
from asr_am.errors import InputError

log = logging.getLogger(__name__)


class Adpsgd(Strategy):
    """Asynchronous gossip SGD.

    `metrics` counts `exchanges`, completed at their senders, and `half_done`, aborted by the sender after its send.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule.
        team: this learner's end of the team, with an even number of groups.
        timeout: seconds after which a sender aborts an exchange (the partner died, or a message was lost).
        group_size: learners of a super-learner.
        partners: how a sender chooses its partners.
        delay_by_one: a sender's update waits for the averaging of the update before.
        seed: of random partners.
    """

    name = "adpsgd"
    synchronous = False
    fault_tolerant = True

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, timeout: float = 60.0, group_size: int = 1,
        partners: Partners = "ring", delay_by_one: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        _check(team.size, timeout, group_size, partners)
        super().__init__(params, optimizer, team)
        self._timeout, self._partners, self._delay_by_one, self._seed = timeout, partners, delay_by_one, seed
        self._group_size, self._num_groups = group_size, team.size // group_size
        self._group: Group | None = None
        if group_size > 1:
            self.synchronous, self.fault_tolerant = True, False
            self._group = team.split([range(first, first + group_size) for first in range(0, team.size, group_size)])
        self._x = params.w.clone()
        self._merged = 0  # averagings merged into x since it was pulled
        self._exchanges = 0  # that this sender has begun, or left out for lack of a receiver
        self._lock = team.lock()  # guards x and _merged
        self._updated, self._idle, self._active = team.event(), team.event(), team.event()
        self._idle.set()
        self._has_weights = not team.rejoins  # those of the team
        for tag in ("weights", "answer"):
            team.register_tag(tag, len(params))
        team.register_tag("welcome", -len(params))
        team.register_tag("join")
        self._leads = team.rank % group_size == 0
        self._sends = self._leads and self._num_groups > 1 and is_sender(team.rank // group_size)
        if self._group is None:
            team.spawn(self._serve_weights, "welcome")
        if self._leads and self._num_groups > 1 and not team.rejoins:
            self._begin_gossip()

    @classmethod
    def is_synchronous(cls, options: Mapping[str, Any]) -> bool:
        return bool(options.get("group_size", 1) > 1)

    def _begin_gossip(self) -> None:
        """Starts the gossip task: at the start, or after a rejoin, when this learner has trained weights to share."""
        self._has_weights = True
        self.team.spawn(self._send if self._sends else self._receive, "gossip")

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._active.set()
        step_result = gradient(None) if self._group is None else self._mean_gradient(self._group, gradient)
        if step_result is None:  # g = calGrad(W)
            return None
        if self._leads:
            self._update()
        if self._group is not None:
            self._group.broadcast(self.params.w)
        return step_result

    def _mean_gradient(self, group: Group, gradient: GradientFn) -> StepResult | None:
        """Computes this learner's gradient, and replaces it by the mean over its group."""
        pending: list[Work] = []

        def average(begin: int, end: int) -> None:
            pending.append(group.start_all_reduce_mean(self.params.g[begin:end]))

        step_result = gradient(average)
        for work in pending:
            work.wait()
        return step_result

    def _update(self) -> None:
        if self._delay_by_one:
            self._idle.wait()
        w = self.params.w
        with self._lock:
            w.copy_(self._x)  # W = pull_weights()
            self.team.simulate_cost("update", len(w))
            self.optimizer.step()  # W = apply(W, g)
            self._x.copy_(w)  # push_weights(W)
            self.staleness[self._merged] += self._group_size
            self._merged = 0
            if self._sends:
                self._idle.clear()
                self._updated.set()

    def _send(self) -> None:
        """Communication task of a sender: one exchange for each update that wakes it."""
        clock = 0
        while True:
            self._updated.wait()
            self._updated.clear()
            partner = self._choose_partner()
            if partner is not None:
                clock += 1
                self._exchange(partner, clock)
            self._exchanges += 1
            with self._lock:
                if not self._updated.is_set():
                    self._idle.set()

    def _choose_partner(self) -> int | None:
        """Returns the rank of the receiver for the next exchange, None if no receiver is alive."""
        number, live = self.team.rank // self._group_size, self.team.live_ranks()
        groups = receivers(self._partners, number, self._exchanges, self._num_groups, self._seed)
        return next((group * self._group_size for group in groups if group * self._group_size in live), None)

    def _exchange(self, partner: int, exchange: int) -> None:
        with self._lock:
            s_i = self.team.as_sent(self._x.clone())
        self.team.send(partner, "weights", exchange, s_i)
        s_j = self._answer_to(exchange, partner)
        if s_j is None:
            self.metrics["half_done"] += 1
            return
        with self._lock:
            self._average(s_j - s_i)
        self.metrics["exchanges"] += 1

    def _answer_to(self, exchange: int, partner: int) -> Tensor | None:
        deadline = self.team.now() + self._timeout
        while (message := self.team.recv("answer", partner, deadline - self.team.now())) is not None:
            if message.clock == exchange:  # else the answer to an aborted exchange
                return message.tensors[0].to(self._x.device)
        return None

    def _receive(self) -> None:
        """Communication task of a receiver."""
        while True:
            message = self.team.recv("weights")
            if message is None:
                continue
            self._active.wait()  # when drained, messages of aborted exchanges must not change x
            s_i = message.tensors[0].to(self._x.device)
            with self._lock:
                s_j = self.team.as_sent(self._x.clone())
                self._average(s_i - s_j)
            self.team.send(message.source, "answer", message.clock, s_j)

    def _average(self, difference: Tensor) -> None:
        """Merges x += difference / 2, the partner's snapshot minus this learner's. The caller holds the lock."""
        self.team.simulate_cost("averaging", len(self._x))
        self._x.add_(difference, alpha=0.5)
        self._merged += 1

    def _serve_weights(self) -> None:
        """Communication task: sends the weights to learners that rejoin, none if this learner is rejoining itself."""
        while True:
            message = self.team.recv("join")
            if message is not None:
                weights = self.replica() if self._has_weights else self._x.new_empty(0)
                self.team.send(message.source, "welcome", message.clock, weights)

    def rejoin(self) -> None:
        if not self.fault_tolerant:
            super().rejoin()
        rank, message = self.team.rank, self._request_weights()
        if message is not None:
            self._x.copy_(message.tensors[0])
            self.params.w.copy_(self._x)
            self.optimizer.reset()
            self._merged = 0
            log.info("learner %d rejoined with learner %d's weights and a fresh momentum", rank, message.source)
        else:
            self.team.restart_team(f"no learner answered learner {rank}, which asked for weights")
        self._begin_gossip()

    def _request_weights(self) -> Message | None:
        """Returns the weights of the first neighbour that sends any, None if all others are dead or rejoin themselves.

        Asks each three times, as messages may be lost.
        """
        rank, size = self.team.rank, self.team.size
        without: set[int] = set()
        for distance in range(1, 3 * size):
            neighbour = (rank + distance) % size
            if neighbour != rank and neighbour not in without and neighbour in self.team.live_ranks():
                self.team.send(neighbour, "join", self.team.incarnation)
                message = self.team.recv("welcome", neighbour, timeout=10.0)
                if message is not None and len(message.tensors[0]):
                    return message
                if message is not None:
                    without.add(neighbour)
        return None

    def drain(self) -> None:
        if self._sends:
            self._idle.wait()
        self.team.gather(self._x.new_empty(0).double())  # barrier: no exchange is under way at any learner
        self._active.clear()
        if self._group is not None:
            self._group.broadcast(self._x.view(torch.int32))  # a checkpoint must not round x to launcher.wire

    def replica(self) -> Tensor:
        with self._lock:
            return self._x.clone()

    def consensus(self) -> Tensor:
        return self.team.average(self.replica())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "x": self.replica(), "merged": self._merged, "exchanges": self._exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._x.copy_(state["x"])
        self._merged = state["merged"]
        self._exchanges = state["exchanges"]


def _check(learners: int, timeout: float, group_size: int, partners: str) -> None:
    if timeout <= 0:
        raise InputError(f"strategy.timeout={timeout}: must be above 0")
    if partners not in get_args(Partners):
        raise InputError(f"strategy.partners={partners}: must be ring, random or exponential")
    check_groups(learners, group_size)
    if group_size == 1:
        require_even(learners, "adpsgd")
    elif learners // group_size > 1 and learners // group_size % 2:
        raise InputError(
            f"strategy.group_size={group_size}: makes {learners // group_size} groups of learners={learners}, but "
            "adpsgd pairs groups on a ring and needs an even number, or one"
        )
