"""The common part of `bmuf`, `diloco` and `slowmo`: learners train apart for blocks of steps, then models are combined.

In each block every learner, or every group of learners, takes block_size steps with an inner strategy. At its end the
mean of the models is turned into the model from which all continue (`BlockStrategy.combine`). Only the first learner of
each group takes part in that, and broadcasts the result inside its group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategies.topology import check_groups
from asr_am.distributed.strategy import Strategy, mean_state
from asr_am.distributed.team import (
    CostKind,
    Event,
    Gather,
    Group,
    Lock,
    ModelSize,
    SingleProcess,
    Team,
    Work,
    find_group,
    rounds,
)
from asr_am.errors import InputError

MakeInner = Callable[[FlatParams, Optimizer, Team], Strategy]
AtBlock = Literal["keep", "average", "reset"]


class BlockStrategy(Strategy):
    """Blocks of steps of an inner strategy.

    Blocks continue over checkpoints and epochs, with all learners in each. In the last round of an epoch, learners
    without data take an idle step, and the steps of the others are longer, because gradients are scaled so that the
    mean over all learners stays the same. `train.optimizer.clip_norm` limits them. `metrics` counts `blocks`.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule inside a block.
        team: this learner's end of the team.
        block_size: steps of a block.
        momentum: what happens to the learners' own momentum at the end of a block: keep, average (over all) or reset.
        inner: makes the strategy that takes the steps of a block, which must use collectives only and have its model in
            `params.w` alone (`Strategy.nestable`). None: `Local`.
        group_size: learners of a group, which share a model.
        fragments: equal parts of the model. Each is combined once per block, at evenly spread steps.
    """

    nestable = False

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, block_size: int, momentum: AtBlock = "keep",
        inner: MakeInner | None = None, group_size: int = 1, fragments: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(params, optimizer, team)
        _check(team.size, block_size, momentum, group_size, fragments)
        if inner is None and group_size > 1:
            raise InputError(
                f"strategy.group_size={group_size}: groups need a strategy of their own; add "
                "+strategy@strategy.inner=sync, or another one"
            )
        groups = [range(first, first + group_size) for first in range(0, team.size, group_size)]
        self._group = team.split(groups) if group_size > 1 else None
        inner_team = SingleProcess() if self._group is None else GroupTeam(team, self._group, groups)
        self._inner = (inner or Local)(params, optimizer, inner_team)
        if not self._inner.nestable:
            raise InputError(
                f"strategy.inner={self._inner.name}: has weights beside the model's, which a block would not change; "
                "choose sync, gtc, powersgd or topk"
            )
        if momentum == "average" and optimizer.options.kind in ("adam", "adagrad") and not _holds_squares(team):
            raise InputError(
                f"launcher.wire=float16: the averages of {optimizer.options.kind}'s squares at a block become 0; use "
                "launcher.wire=bfloat16"
            )
        self.staleness, self.metrics = self._inner.staleness, self._inner.metrics
        alone = momentum == "keep" and group_size == 1
        self.residuals = (*self._inner.residuals, *(["optimizer"] if alone else []))
        self.continues_at_blocks = fragments == 1 and (self._inner.equal_replicas or isinstance(self._inner, Local))
        self.num_models, self._group_size = team.size // group_size, group_size
        self._block_size, self._momentum = block_size, momentum
        self._group_leaders: Group | None = team
        if self._group is not None:
            self._group_leaders = team.split([range(0, team.size, group_size)])
        ends = [len(params) * k // fragments for k in range(fragments + 1)]
        parts = [slice(begin, end) for begin, end in pairwise(ends)]
        self._fragments = {k * block_size // fragments: part for k, part in enumerate(parts)}  # by step of the block
        self._rounds = rounds(team)
        size = len(params) if self._group_leaders or self._rounds else 0
        self._W_g = params.w[:size].clone()  # the model that was broadcast, [0] where it is not needed
        self._steps = 0  # in the present block

    def step(self, gradient: GradientFn) -> StepResult | None:
        self._report_block_end()
        step_result = self._inner.step(gradient)
        if step_result is None:
            return None
        self._steps = (self._steps + 1) % self._block_size
        if self._steps in self._fragments:
            self._finish(self._fragments[self._steps])
        if self._steps == 0:
            self._finish_block()
        return step_result

    def idle_options(self, steps: int, epochs: int) -> list[str]:
        found = self._inner.idle_options(steps, epochs)
        if self.team.size == 1 or self._block_size // len(self._fragments) <= steps:
            return found
        lead = f"strategy.block_size={self._block_size}: each learner takes {steps} steps in an epoch"
        if self._block_size // len(self._fragments) > steps * epochs:
            effect = f"and {steps * epochs} in all, so that no block ends and {self.num_models} models never meet"
        else:
            effect = f"so that the {self.num_models} models meet in some epochs only"
        size = max(1, steps // 4)
        return [*found, f"{lead}, {effect}; set it to {size}, for {steps // size} blocks in an epoch"]

    def _finish(self, part: slice) -> None:
        """Combines the models' elements `part`."""
        w, W_g, leaders = self.params.w[part], self._W_g[part], self._group_leaders
        if leaders is not None:
            self._communicate(lambda x: leaders.start_all_reduce_mean(x).wait(), w, W_g)
            self.combine(w, W_g, part)
        if self._group is not None:
            self._communicate(self._group.broadcast, w, W_g)
        if len(W_g):
            W_g.copy_(w)

    def _communicate(self, collective: Callable[[Tensor], None], w: Tensor, W_g: Tensor) -> None:
        """Does a collective on w, in 16 bits on its change since W_g.

        The rounding of whole weights would hide small changes, and a block momentum would add it up.
        """
        if self._rounds:
            w.sub_(W_g)
        collective(w)
        if self._rounds:
            w.add_(W_g)

    def _zeros(self) -> Tensor:
        """Returns zeros for an outer momentum: [N], or [0] at a learner that does not combine models."""
        return torch.zeros_like(self.params.w[: len(self.params) if self._group_leaders else 0])

    @abstractmethod
    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        """Turns the mean of the models into the next common model, in place.

        Args:
            w: the mean [n].
            W_g: the model [n] from which all have started.
            part: where these elements are in the whole model.
        """

    def _finish_block(self) -> None:
        if self._momentum == "reset":
            self.optimizer.reset()
        elif self._momentum == "average":
            for velocity in _velocities(self.optimizer, len(self.params)):
                self.team.start_all_reduce_mean(velocity).wait()
        self.metrics["blocks"] += 1

    def _report_block_end(self) -> None:
        if self._steps == 0:
            self.at_block_end()

    def drain(self) -> None:
        self._inner.drain()
        self._report_block_end()

    def consensus(self) -> Tensor:
        """Returns the mean [N] of the learners' weights, also in the middle of a block."""
        self._inner.consensus()
        return self.team.average(self.params.w)

    def state_dict(self) -> dict[str, Any]:
        return {**self._inner.state_dict(), "steps": self._steps, "W_g": self._W_g}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)
        self._steps = state["steps"]
        self._W_g.copy_(state["W_g"])

    def state_of_lost(self, rank: int, states: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Does `Strategy.state_of_lost`. The learner's optimizer is that of its group, else the mean of all."""
        leads, group = rank % self._group_size == 0, rank // self._group_size
        alike = [other for other in states if (other % self._group_size == 0) == leads]
        if not alike:
            raise ValueError(f"no model of the last block for learner {rank}")
        own = {other: state for other, state in states.items() if other // self._group_size == group}
        inner = self._inner.state_of_lost(rank, own or states)
        if not own:
            inner["optimizer"] = mean_state([state["optimizer"] for state in states.values()])
        return {**states[alike[0]], **{name: inner[name] for name in self._inner.state_dict()}}


class GroupTeam(SingleProcess):
    """The team of an inner strategy: the collectives of its group. Other parts raise InputError.

    Args:
        team: the whole team.
        group: the group.
        groups: ranks of all groups.
    """

    def __init__(self, team: Team, group: Group, groups: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._team, self._group = team, group
        self.rank, self.size = group.rank, group.size
        self.ranks = find_group(team.rank, team.size, groups) or ()
        self.comm_stats, self.clock = team.comm_stats, team.clock

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> Work:
        return self._group.start_all_reduce_mean(x, modelled)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        return self._group.start_all_gather(x, lengths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        self._group.broadcast(x, source)

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        raise InputError("strategy.inner: a group cannot be split again; choose another inner strategy")

    def register_tag(self, tag: str, *lengths: int) -> None:
        raise InputError("strategy.inner: needs messages, but a group has collectives only; choose another one")

    def lock(self) -> Lock:
        raise InputError("strategy.inner: needs communication tasks, but a group has none; choose another one")

    def event(self) -> Event:
        raise InputError("strategy.inner: needs communication tasks, but a group has none; choose another one")

    def as_sent(self, x: Tensor) -> Tensor:
        return self._team.as_sent(x)

    def simulate_cost(self, kind: CostKind, elements: int, scattered: bool = False) -> None:
        self._team.simulate_cost(kind, elements, scattered)

    def modelled_size(self) -> ModelSize | None:
        return self._team.modelled_size()


def _check(learners: int, block_size: int, momentum: str, group_size: int, fragments: int) -> None:
    if block_size < 1:
        raise InputError(f"strategy.block_size={block_size}: must be at least 1 step")
    if momentum not in ("keep", "average", "reset"):
        raise InputError(f"the learners' momentum at a block, {momentum}: must be keep, average or reset")
    check_groups(learners, group_size)
    if not 1 <= fragments <= block_size:
        raise InputError(f"strategy.fragments={fragments}: must be from 1 to strategy.block_size={block_size}")
    if fragments > 1 and momentum != "keep":
        raise InputError(
            f"strategy.fragments={fragments}: their blocks end at different steps, so momentum must be keep"
        )


def _holds_squares(team: Team) -> bool:
    """Returns whether the square of a small gradient element is not rounded to 0 on its way."""
    return bool(team.as_sent(torch.tensor([1e-10])).any())


def _velocities(optimizer: Optimizer, length: int) -> list[Tensor]:
    """Returns the optimizer's state vectors [N]: momentum, and Adam's second moments."""
    state = optimizer.state_dict()["state"].get(0, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.numel() == length]
