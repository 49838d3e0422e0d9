"""Splitting the input between learners.

Runs a single-device training program on a team: `get_runner` and what it returns (table 2 of the paper).

The first batch is run dry: it shows which parameters are sparse (`dry`), from which each gets its way (`plan`). Dense
ones become a `FlatParams`, averaged while the backward pass goes on; sparse ones leave the model, which finds in their
place what looks rows up (`lookup`) on the servers (`server`, `worker`) or in a copy of its own (`replicated`).

Staleness 0: the steps of one device on the batches of all learners, which updates touched rows of sparse parameters
only, as torch.optim.SparseAdam does.
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
from asr_am.distributed.team import SingleProcess, Team, Work
from asr_am.errors import InputError
from asr_am.parallax.config import Config
from asr_am.parallax.partitioned_model import PartitionedModel, first_names
from asr_am.parallax.placement import PlacementPlan, make_placement_plan
from asr_am.parallax.row_optimizer import OptimizerSpec
from asr_am.parallax.sparsity_probe import AccessStats, LossFn, probe, trainable

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Shard(Generic[Batch]):
    """Every `size`th batch from the `rank`th on. In an incomplete last round, learners without a batch get None, so
    that all take the same number of steps: `Runner.run` takes a None as a batch without examples.
    """

    dataset: Iterable[Batch]
    rank: int
    size: int

    def __iter__(self) -> Iterator[Batch | None]:
        batches = iter(self.dataset)
        while own := list(islice(batches, self.size)):
            yield own[self.rank] if self.rank < len(own) else None


def shard(dataset: Iterable[Batch], team: Team | None = None) -> Shard[Batch]:
    """This learner's part of a dataset of batches, which must come in the same order for all (table 2 of the paper).

    team: None for that which RANK and WORLD_SIZE tell of, as torchrun sets them; without these, one learner.
    """
    if team is not None:
        return Shard(dataset, team.rank, team.size)
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise InputError(f"RANK and WORLD_SIZE: must be whole numbers ({error})") from None
    if not 0 <= rank < size:
        raise InputError(f"RANK={rank}, WORLD_SIZE={size}: the rank must be below the size")
    return Shard(dataset, rank, size)


log = logging.getLogger(__name__)


def get_runner(
    model: nn.Module, loss: LossFn, optimizer: torch.optim.Optimizer, resources: Team | None = None,
    config: Config | None = None,
) -> Runner:  # fmt: skip
    """model, loss, optimizer: of a program for one device; the optimizer's rule is applied where parameters live, and
    its learning rate read in each step, so that schedules go on to work. All learners begin with the same weights.

    resources: the team, as `connect` or a virtual cluster makes it; None: this process alone. A team has one runner in
    its life where parameters are on servers, as those go on to listen.

    The model, its loss and its batches stay as they are; `Runner.run` takes the place of zero_grad, backward, clipping
    and step. Frozen parameters stay as they are on every learner. InputError where the optimizer's rule is not known,
    it lacks one of the others or has some that are not the model's, or has done steps.
    """
    return Runner(model, loss, optimizer, resources or SingleProcess(), config or Config())


class Runner(AbstractContextManager["Runner"]):
    """plan: after the first step. counts: bytes by kind, as `worker` and `replicated` count them, and "all-reduce"."""

    def __init__(
        self, model: nn.Module, loss: LossFn, optimizer: torch.optim.Optimizer, team: Team, config: Config
    ) -> None:
        alone = team.size == 1  # nobody to serve
        self.model, self.team = model, team
        self.config = replace(config, hybrid=True, path=None, servers=None) if alone else config
        self.plan: PlacementPlan | None = None
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self._loss, self._optimizer, self._rule = loss, optimizer, OptimizerSpec(optimizer, model)
        self._split: PartitionedModel | None = None

    def run(self, batch: Any | None) -> float:
        """One step on the batches of all learners; the mean loss over all their examples. None: no batch here."""
        split = self._split or self._prepare(batch)
        rate = self._rule.rate(self._optimizer)
        under_way: list[Work] = []
        means: list[float] = []

        def average(begin: int, end: int) -> None:
            under_way.append(self.team.start_all_reduce_mean(split.params.g[begin:end]))

        closure = self.team.timed(lambda on_bucket: self._gradient(split, batch, means, on_bucket))
        split.pull()
        closure(average if self.config.hybrid else None)
        split.push(rate)
        for work in under_way:
            work.wait()
        split.update(rate)
        self.counts["all-reduce"] += split.reduced_bytes
        self.steps += 1
        return means[0]

    def weights(self, average: bool = False) -> dict[str, Tensor]:
        """The whole model's `state_dict`, on the CPU; called by all learners. average: moving averages instead."""
        return self._built.weights(average)

    def drain(self) -> None:
        """Until all updates are done everywhere; called by all learners."""
        if self._split is not None:
            self._split.drain()

    def state_dict(self) -> dict[str, Any]:
        """This learner's part of a checkpoint: tensors and plain values; called by all learners."""
        split = self._built
        self.drain()
        assert self.plan is not None  # it was built from one
        return {
            "steps": self.steps, "made_with": self._made_with(), "counts": dict(self.counts),
            "plan": self.plan.state_dict(), "split": split.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, with the same bits, from this learner's part; before the first step, called by all learners. What the
        program keeps is its own to restore: schedules, its place in the data, frozen parameters, random streams.

        InputError where other learners, other options or another optimizer go on.
        """
        made_with = state.get("made_with", {})
        for what, now in self._made_with().items():
            if (then := made_with.get(what)) != now:
                raise InputError(f"the checkpoint was made with {what} {then}, not {now}; go on with the same")
        self._build(PlacementPlan.of_state(state["plan"]), state["split"])
        self.steps = state["steps"]
        self.counts.update(state["counts"])

    def __exit__(self, *exception: object) -> None:
        """No learner leaves while others may still need its server."""
        if exception[0] is None and self._split is not None:
            self._split.end()

    def _made_with(self) -> dict[str, Any]:
        options = {f"parallax.{name}": value for name, value in vars(self.config).items()}
        return {"learners on machines": list(self.team.hosts), "the optimizer": self._rule.described(), **options}

    @property
    def _built(self) -> PartitionedModel:
        if self._split is None:
            raise RuntimeError("no step was done")
        return self._split

    def _gradient(
        self, split: PartitionedModel, batch: Any | None, means: list[float], on_bucket: BucketHook | None
    ) -> StepResult:  # fmt: skip
        """The backward pass, so that the mean over learners is the gradient of the mean over all examples.

        means: filled with the mean loss.
        """
        params, zero = split.params, torch.zeros(())
        params.rebind_grads()  # which a zero_grad that was left in the program undoes
        params.g.zero_()
        loss_sum, examples = (None, 0.0) if batch is None else self._loss(self.model, batch)
        both = torch.tensor([0.0 if loss_sum is None else float(loss_sum.detach()), examples])
        both = both.to(params.g.device)
        self.team.start_all_reduce_mean(both).wait()
        total, loss_denominator = both.tolist()
        loss_denominator = max(loss_denominator, 1e-30)  # no examples at all: a gradient of zero
        means.append(total / loss_denominator)
        if loss_sum is None:
            params.notify_all_buckets(on_bucket)
        else:
            with params.notify_buckets(on_bucket):
                (loss_sum / loss_denominator).backward()
        return StepResult(Lease(None, 0.0, 0.0, loss_denominator), examples, 0, 0.0, zero, zero)

    # once

    def _prepare(self, batch: Any | None) -> PartitionedModel:
        """The dry step, and what follows from it."""
        self._check_equal()
        parameters = trainable(self.model)
        names = [name for name, _ in parameters]
        seen = [AccessStats(0.0, False)] * len(names) if batch is None else probe(self.model, self._loss, batch)
        own = [float(batch is not None), *(x for one in seen for x in (one.alpha, float(one.lookups)))]
        rows = self.team.gather(torch.tensor(own, dtype=torch.float64)).values()
        all_seen = torch.stack([row[1:].view(-1, 2) for row in rows if row[0]])
        alphas, looked_up = all_seen[:, :, 0].mean(dim=0), all_seen[:, :, 1].min(dim=0).values
        first = first_names(self.model)
        if unknown := sorted(set(self.config.dense) - first.keys()):
            raise InputError(f"Config.dense: the model has no parameter {unknown[0]}; it has {', '.join(first)}")
        dense = {first[name] for name in self.config.dense}
        sparse = [
            name not in dense and bool(looked_up[k]) and float(alphas[k]) < 1.0 for k, name in enumerate(names)
        ]  # fmt: skip
        shapes = [(name, *_rows_and_width(p)) for name, p in parameters]
        return self._build(
            make_placement_plan(shapes, alphas.tolist(), sparse, self.team.size, self.config.path, self.config.hybrid)
        )

    def _build(self, plan: PlacementPlan, state: dict[str, Any] | None = None) -> PartitionedModel:
        """state: of a checkpoint, which servers have before anybody can ask them."""
        self.plan = plan
        if len(plan.sparse) == len(plan.choices):
            raise InputError("all parameters are sparse: name a small one in Config.dense, for all-reduce")
        if self.team.rank == 0:
            log.info("bytes a learner transfers in a step, by the way its gradient goes:\n%s", plan)
            if not plan.sparse and self.config.hybrid:
                log.info("no sparse parameters: this is synchronous SGD by all-reduce (strategy=sync)")
        split = PartitionedModel(self.model, plan, self.team, self._rule, self.config, self.counts)
        self._optimizer.param_groups[0]["params"].clear()  # or they would be kept here, too
        if state is not None:
            split.load_state_dict(state)
        self._split = split
        self.team.gather(torch.zeros(0, dtype=torch.float64))  # all servers listen
        split.start()
        return split

    def _check_equal(self) -> None:
        """InputError where learners begin with different weights, or see different machines."""
        own = [_fingerprint(p.detach()) for p in self.model.parameters()]
        rows = self.team.gather(torch.tensor([*self.team.hosts, *own], dtype=torch.float64))
        for rank, row in rows.items():
            if not torch.equal(row[: self.team.size], rows[0][: self.team.size]):
                raise InputError(
                    f"learner {rank} and learner 0 do not agree which machines learners are on: start as many on each"
                )
            if not torch.equal(row, rows[0]):
                raise InputError(
                    f"learner {rank} begins with other weights than learner 0: make the model from the same seed, or "
                    "load the same file, on all"
                )


def _rows_and_width(parameter: Tensor) -> tuple[int, int]:
    return (len(parameter), parameter[0].numel()) if parameter.dim() and len(parameter) else (1, parameter.numel())


def _fingerprint(values: Tensor) -> float:
    """A sum in which each row has its own weight."""
    rows = values.reshape(len(values) if values.dim() else 1, -1).sum(dim=1, dtype=torch.float64)
    return float(rows @ torch.linspace(1, 2, len(rows), dtype=torch.float64, device=rows.device))
