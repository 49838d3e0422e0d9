"""The interface between a distributed training algorithm and the training loop.

A strategy owns the whole step: it receives the gradient as a closure, computes it when the algorithm says so, and
communicates and updates the weights. Its file can so read like the pseudo-code of its paper, and one strategy can be
built out of others.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, SegmentRecord, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.team import LearnerLost, Team

REPLICA = frozenset({"weights", "optimizer"})  # of a state, what is equal where replicas are

LossFn = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""Maps a model and a batch to the loss summed over examples, and the number of examples (words, frames)."""


def mean_state(states: Sequence[Any]) -> Any:
    """Returns the mean of nested states: of tensors, elementwise. What is no floating-point tensor is the first's.

    Learners that lack a tensor, or have an empty one, do not count for it.
    """
    first = states[0]
    if isinstance(first, Tensor) and first.is_floating_point():
        tensors = [state for state in states if state.numel()] or [first]
        total = tensors[0].double()  # sums and means of equal values are exact
        for tensor in tensors[1:]:
            total = total + tensor.to(total)
        return (total / len(tensors)).to(first)
    if isinstance(first, dict):
        names = dict.fromkeys(name for state in states for name in state)
        return {name: mean_state([state[name] for state in states if name in state]) for name in names}
    if isinstance(first, list | tuple):
        return type(first)(mean_state(parts) for parts in zip(*states, strict=True))
    return first


def means_of(states: Iterable[Mapping[str, Any]], names: Set[str]) -> dict[str, Any]:
    """Returns the means of parts of states. States that lack a part do not count for it."""
    return dict(mean_state([{name: state[name] for name in names & state.keys()} for state in states]))


class Strategy(ABC):
    """One algorithm at one learner.

    Attributes:
        name: its name in the configuration.
        synchronous: all learners take their steps together, which allows collectives. Otherwise only messages are used.
        fault_tolerant: the others continue without a learner that died. Otherwise all start again after its death.
        equal_replicas: all learners have the same state after every step, but for counts and `residuals`. A step that
            raises LearnerLost leaves that state as it was before the step.
        continues_at_blocks: when a learner is lost, the others can continue from the end of a block of one or more
            steps, of which all learners take equally many. All then have the same state, but for counts and
            `residuals`.
        nestable: between steps its model is `params.w` alone, so that it can take the steps of a block
            (`strategies/blocks.py`).
        residuals: names in `state_dict` of what each learner has for itself and a restarted one begins anew
            (`state_of_lost`), where replicas are equal or the others continue at blocks.
        at_block_end: called, where the others continue at blocks, when the last completed step has ended a block and
            `state_dict` is that after it. Does nothing until the training loop replaces it.
        params: flat weights and gradient of this learner's model.
        optimizer: the update rule.
        team: this learner's end of the team.
        staleness: number of updates by the staleness of their gradient.
        metrics: further counts of the algorithm. Their key in checkpoints and summaries is "counts".
        num_weights: number of weights of the whole model.
    """

    name: str
    synchronous = True
    fault_tolerant = False
    equal_replicas = False
    continues_at_blocks = False
    nestable = True
    residuals: tuple[str, ...] = ()

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        self.params, self.optimizer, self.team = params, optimizer, team
        self.num_weights = len(params)
        self.staleness: Counter[int] = Counter()
        self.metrics: Counter[str] = Counter()
        self.at_block_end: Callable[[], None] = lambda: None

    @classmethod
    def is_synchronous(cls, options: Mapping[str, Any]) -> bool:
        """Returns what `synchronous` will be with these options of the configuration."""
        return cls.synchronous

    def check(self, faults: Faults) -> None:  # noqa: B027
        """Raises InputError if the algorithm cannot cope with the faults of its cluster."""

    def idle_options(self, steps: int, epochs: int) -> list[str]:
        """Returns a warning, with a remedy, for each option that cannot act in so short a training.

        Args:
            steps: steps of each learner in an epoch.
        """
        return []

    def attach(self, model: nn.Module, loss: LossFn, first_batch: Callable[[], Any]) -> None:  # noqa: B027
        """Prepares for a model of which not all parameters are dense. All learners call it before anything else.

        It may replace `params` and parameters of the model.

        Args:
            model: this learner's model, whose parameters are `params`.
            first_batch: returns a batch, another one for each learner. None if there are fewer.
        """

    @abstractmethod
    def step(self, gradient: GradientFn) -> StepResult | None:
        """Does one update.

        Args:
            gradient: leases a batch and fills `params.g`, called once.

        Returns:
            The result of the batch, None if the segment has no data left.
        """

    def drain(self) -> None:  # noqa: B027
        """Completes everything under way after the last batch of a segment (see `team`: drained)."""

    def unapplied(self, record: SegmentRecord) -> tuple[int, list[int]] | None:
        """Returns the shard of the parameter server on this rank, and the completed batches that it has not applied.

        Called when drained. None: there is no server on this rank, or it does not count them.
        """
        return None

    def replica(self) -> Tensor:
        """Returns this learner's own weights [N]. Called when drained."""
        return self.params.w

    def consensus(self) -> Tensor:
        """Returns the weights [N] to validate and export. Called by all learners when drained.

        The result is never written back into the training.
        """
        return self.params.w

    def rejoin(self) -> None:
        """Rejoins after a restart: copies weights from the live learners, no optimizer state.

        Raises:
            LearnerLost: the strategy is not fault tolerant.
        """
        raise LearnerLost(self.team.rank, f"died, and strategy={self.name} cannot take a replacement in")

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values from which `load_state_dict` continues bit for bit. Called when drained."""
        return {
            "weights": self.params.w,
            "optimizer": self.optimizer.state_dict(),
            "staleness": dict(self.staleness),
            "counts": dict(self.metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned, but for the counts (`load_counts`)."""
        self.params.w.copy_(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])

    def load_counts(self, states: Iterable[dict[str, Any]]) -> None:
        """Sets `staleness` and `metrics` to the sums of those that `state_dict` returned."""
        self.staleness.clear()  # in place: servers and inner strategies share the counters
        self.metrics.clear()
        for state in states:
            self.staleness.update(state["staleness"])
            self.metrics.update(state["counts"])

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the state that every learner of a team of another size continues from.

        Weights, momentum, residuals and other tensors are the means over the learners. All rules of update depend on
        means over the team, which stay what they were: of weights, the consensus, of residuals, what is still to be
        applied. What no former learner had is new, for instance the residual after a team of one. What this learner
        does not need stays empty, for instance the global weights of a block at all but one learner of a group.

        Args:
            states: the states of the former learners. Where replicas are equal, the first one has what all share.
        """
        new = self.state_dict()
        return {
            name: new[name] if isinstance(value, Tensor) and value.shape != new[name].shape else value
            for name, value in mean_state(states).items()
        }

    def state_of_lost(self, rank: int, states: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Returns a state for a learner that died, made of those of the others after the same step.

        Replicas are equal, or a block has ended. Residuals begin at 0, but weights and optimizer at the mean of the
        others'.

        Args:
            rank: of the learner.
            states: by rank, the states of others, at least one.

        Raises:
            ValueError: none of them has what the learner needs.
        """
        other = states[min(states)]
        own = {name: torch.zeros_like(other[name]) for name in self.residuals if name not in REPLICA}
        means = means_of(states.values(), REPLICA.intersection(self.residuals))
        return {**other, **own, **means}

    def model_of(self, states: Sequence[Mapping[str, Any]]) -> Tensor:
        """Returns what `consensus` does, from the states of all learners after the same step.

        Where replicas are equal, the first one has what all share.
        """
        return cast(Tensor, means_of(states, {"weights"})["weights"])

    def load_moved(self, states: Callable[[], Iterable[dict[str, Any]]]) -> None:  # noqa: B027
        """Takes from the checkpoint what another rank had and this one has now. Called after `load_state_dict`.

        Args:
            states: loads the states of all learners in the checkpoint.
        """
