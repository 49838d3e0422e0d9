"""Runs a single-device training program on a team: `get_runner` and `shard` (Table 2 of the paper).

The first batch is used for a probe without an update. It shows which parameters are sparse (`sparsity_probe`), and the
cost model selects a method for each (`placement`). Dense parameters become a `FlatParams`, which is averaged during the
backward pass. Sparse ones leave the model. A `SparseWeight` in their place looks rows up on servers (`row_server`,
`row_worker`) or in a local replica (`replicated_table`).

Training is synchronous: each step equals that of one device on the batches of all learners, except that only touched
rows of sparse parameters are updated, as in torch.optim.SparseAdam.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.strategy import LossFn
from asr_am.distributed.team import SingleProcess, Team
from asr_am.errors import InputError
from asr_am.parallax.config import Config
from asr_am.parallax.partitioned_model import PartitionedModel
from asr_am.parallax.placement import PlacementPlan
from asr_am.parallax.planning import partition, plan_parameters
from asr_am.parallax.row_optimizer import OptimizerSpec

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Shard(Generic[Batch]):
    """One learner's batches: every `size`th one, starting with number `rank`.

    If the last round is incomplete, learners without a batch get None, so that all take the same number of steps.
    `Runner.run` treats None as a batch without examples.
    """

    dataset: Iterable[Batch]
    rank: int
    size: int

    def __iter__(self) -> Iterator[Batch | None]:
        batches = iter(self.dataset)
        while batch_round := list(islice(batches, self.size)):
            yield batch_round[self.rank] if self.rank < len(batch_round) else None


def shard(dataset: Iterable[Batch], team: Team | None = None) -> Shard[Batch]:
    """Returns this learner's part of a dataset (Table 2 of the paper).

    Args:
        dataset: Batches, in the same order on all learners.
        team: The learners. None reads RANK and WORLD_SIZE, which torchrun sets, and is a single learner without them.

    Raises:
        InputError: RANK or WORLD_SIZE is not valid.
    """
    if team is not None:
        return Shard(dataset, team.rank, team.size)
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise InputError(f"RANK and WORLD_SIZE: must be integers ({error})") from None
    if not 0 <= rank < size:
        raise InputError(f"RANK={rank}, WORLD_SIZE={size}: the rank must be at least 0 and below the size")
    return Shard(dataset, rank, size)


def get_runner(
    model: nn.Module, loss: LossFn, optimizer: torch.optim.Optimizer, team: Team | None = None,
    config: Config | None = None,
) -> Runner:  # fmt: skip
    """Prepares a single-device program for training on a team (Table 2 of the paper).

    Model, loss and batches stay as they are. `Runner.run` replaces zero_grad, backward, clipping and step. Frozen
    parameters keep their values on every learner.

    Args:
        model: The model. All learners must begin with the same weights.
        loss: Returns the summed loss and the number of examples of a batch.
        optimizer: The program's optimizer. Its rule is applied where parameters live. Its learning rate is read in each
            step, so schedules keep working.
        team: The learners, made by `connect` or a virtual cluster. None trains in this process alone. If parameters
            live on servers, a team can have only one runner in its life, because servers never stop listening.

    Raises:
        InputError: The optimizer's class is not supported, it lacks a trainable parameter or has a foreign one, or it
            has done steps.
    """
    return Runner(model, loss, optimizer, team or SingleProcess(), config or Config())


class Runner(AbstractContextManager["Runner"]):
    """Trains a model on a team. Use it as a context manager: no learner leaves while others may need its server.

    Attributes:
        model: The model. Its sparse parameters are replaced in the first step.
        plan: Placement of the parameters. None before the first step.
        counts: Bytes so far by kind: those of `RowWorker` and `ReplicatedTable`, and "all-reduce".
    """

    def __init__(
        self, model: nn.Module, loss: LossFn, optimizer: torch.optim.Optimizer, team: Team, config: Config
    ) -> None:
        self.model, self.team = model, team
        # A single learner needs no servers.
        self.config = replace(config, hybrid=True, path=None, servers=None) if team.size == 1 else config
        self.plan: PlacementPlan | None = None
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self._loss, self._optimizer, self._spec = loss, optimizer, OptimizerSpec(optimizer, model)
        self._partitioned: PartitionedModel | None = None

    def run(self, batch: Any | None) -> float:
        """Does one step on the batches of all learners, None for some. Returns the mean loss of an example."""
        partitioned = self._partitioned
        if partitioned is None:  # this is the first step
            partitioned = self._build(plan_parameters(self.model, self._loss, batch, self.team, self.config))
        lr = self._spec.lr(self._optimizer)
        means: list[float] = []
        partitioned.step(self.team.timed(lambda on_bucket: self._gradient(partitioned, batch, lr, means, on_bucket)))
        self.steps += 1
        return means[0]

    def weights(self, average: bool = False) -> dict[str, Tensor]:
        """Returns the complete model's `state_dict` on the CPU, or its moving averages. All learners must call it."""
        return self._built.weights(average)

    def drain(self) -> None:
        """Waits until all updates are applied on all servers. All learners must call it."""
        if self._partitioned is not None:
            self._partitioned.drain()

    def state_dict(self) -> dict[str, Any]:
        """Returns this learner's part of a checkpoint, tensors and plain values. All learners must call it."""
        partitioned = self._built
        self.drain()
        assert self.plan is not None  # made together with _built
        return {
            "steps": self.steps, "made_with": self._made_with(), "counts": dict(self.counts),
            "plan": self.plan.state_dict(), "split": partitioned.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes bit for bit from this learner's part of a checkpoint.

        All learners must call it, before the first step. The program restores its own state: schedules, its position in
        the data, frozen parameters and random streams.

        Raises:
            InputError: Learners, options or optimizer are not those of the checkpoint.
        """
        made_with = state.get("made_with", {})
        for name, now in self._made_with().items():
            if (then := made_with.get(name)) != now:
                raise InputError(f"the checkpoint was made with {name} {then}, not {now}; resume with the same")
        self._build(PlacementPlan.from_state_dict(state["plan"]), state["split"])
        self.steps = state["steps"]
        self.counts.update(state["counts"])

    def __exit__(self, *exception: object) -> None:
        """Waits for all learners, as others may still need this learner's server."""
        if exception[0] is None and self._partitioned is not None:
            self._partitioned.close()

    def _made_with(self) -> dict[str, Any]:
        options = {f"parallax.{name}": value for name, value in vars(self.config).items()}
        return {"learners on machines": list(self.team.hosts), "the optimizer": self._spec.summary(), **options}

    @property
    def _built(self) -> PartitionedModel:
        if self._partitioned is None:
            raise RuntimeError("the runner has done no step yet")
        return self._partitioned

    def _gradient(
        self, partitioned: PartitionedModel, batch: Any | None, lr: float, means: list[float],
        on_bucket: BucketHook | None,
    ) -> StepResult:  # fmt: skip
        """Runs the backward pass, scaled so that the mean over learners is the gradient of the mean over all examples.

        Appends that mean to `means`.
        """
        params, zero = partitioned.params, torch.zeros(())
        params.rebind_grads()  # a zero_grad that was left in the program unbinds them
        params.g.zero_()
        loss_sum, examples = (None, 0.0) if batch is None else self._loss(self.model, batch)
        both = torch.tensor([0.0 if loss_sum is None else float(loss_sum.detach()), examples], dtype=torch.float64)
        bits = both.view(torch.int32).to(params.g.device)  # not rounded to launcher.wire
        all_bits = torch.cat(self.team.start_all_gather(bits).wait()).cpu()
        total, loss_denominator = all_bits.view(torch.float64).view(-1, 2).mean(dim=0).tolist()
        loss_denominator = max(loss_denominator, 1e-30)  # without any examples, the gradient is zero
        means.append(total / loss_denominator)
        if loss_sum is None:
            params.notify_all_buckets(on_bucket)
        else:
            with params.notify_buckets(on_bucket):
                (loss_sum / loss_denominator).backward()
        return StepResult(Lease(None, 0.0, 0.0, loss_denominator), examples, 0, lr, zero, zero)

    def _build(self, plan: PlacementPlan, state: dict[str, Any] | None = None) -> PartitionedModel:
        """Partitions the model and starts the servers, after loading the state of a checkpoint if there is one."""
        self.plan = plan
        self._partitioned = partition(self.model, plan, self.team, self._spec, self.config, self.counts, state)
        if self.team.rank == 0 and not plan.sparse and self.config.hybrid:
            log.info("no sparse parameters: this is synchronous SGD by all-reduce (strategy=sync)")
        self._optimizer.param_groups[0]["params"].clear()  # frees the original tensors
        return self._partitioned
