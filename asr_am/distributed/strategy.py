"""What a distributed training algorithm is to the training loop.

A strategy owns the step: it is handed the gradient as a closure, so that its file reads like the pseudo-code of its
paper, and one strategy can be built out of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.team import LearnerLost, Team


class Strategy(ABC):
    """One algorithm at one learner.

    in_step: all learners take their steps together (collectives are allowed); otherwise only mail is used. forgiving:
    the others go on without a lost learner; else it ends the run. staleness: updates by the staleness of their
    gradient. counts: what else an algorithm counts of itself.
    """

    name: str
    synchronous = True
    fault_tolerant = False

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        self.params, self.optimizer, self.team = params, optimizer, team
        self.staleness: Counter[int] = Counter()
        self.metrics: Counter[str] = Counter()

    def check(self, faults: Faults) -> None:  # noqa: B027
        """InputError where the algorithm cannot do with what goes wrong on its cluster."""

    @abstractmethod
    def step(self, gradient: GradientFn) -> StepResult | None:
        """Do one update; None when the segment has no data left."""

    def drain(self) -> None:  # noqa: B027
        """After the last batch of a segment: drain what is under way, so that the state is complete."""

    def replica(self) -> Tensor:
        """This learner's own weights [N], at rest."""
        return self.params.w

    def consensus(self) -> Tensor:
        """The weights [N] to validate and export; called by all learners, at rest. Never written back."""
        return self.params.w

    def rejoin(self) -> None:
        """Take the place of a learner that died: others' weights, nothing else of theirs."""
        raise LearnerLost(self.team.rank, f"died, and strategy={self.name} cannot take a replacement in")

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values from which `load_state_dict` continues with the same bits, at rest."""
        return {
            "weights": self.params.w,
            "optimizer": self.optimizer.state_dict(),
            "staleness": dict(self.staleness),
            "counts": dict(self.metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.params.w.copy_(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        for counter, counted in ((self.staleness, state["staleness"]), (self.metrics, state["counts"])):
            counter.clear()  # and not another: whoever counts has this one
            counter.update(counted)
