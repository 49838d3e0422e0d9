"""Plans and partitions a model on all learners together: `Runner` and the strategy `Parallax` share this."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from asr_am.distributed.strategy import LossFn
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from asr_am.parallax.config import Config
from asr_am.parallax.partitioned_model import PartitionedModel, first_names
from asr_am.parallax.placement import PlacementPlan, make_placement_plan
from asr_am.parallax.row_optimizer import OptimizerSpec
from asr_am.parallax.sparsity_probe import AccessStats, probe, trainable

log = logging.getLogger(__name__)


def plan_parameters(model: nn.Module, loss: LossFn, batch: Any | None, team: Team, config: Config) -> PlacementPlan:
    """Probes the model on a batch of each learner that has one, and selects a method for each parameter.

    All learners call it.

    Raises:
        InputError: The learners begin with different weights, or `Config.dense` names an unknown parameter.
    """
    _check_equal(model, team)
    parameters = trainable(model)
    names = [name for name, _ in parameters]
    stats = [AccessStats(0.0, False)] * len(names) if batch is None else probe(model, loss, batch)
    row = [float(batch is not None), *(float(x) for one in stats for x in one)]
    rows = team.gather(torch.tensor(row, dtype=torch.float64)).values()
    all_stats = torch.stack([row[1:].view(-1, 2) for row in rows if row[0]])
    alphas, lookups_only = all_stats[:, :, 0].mean(dim=0), all_stats[:, :, 1].min(dim=0).values
    first = first_names(model)
    if unknown := sorted(set(config.dense) - first.keys()):
        raise InputError(f"Config.dense: the model has no parameter {unknown[0]}; it has {', '.join(first)}")
    dense = {first[name] for name in config.dense}
    sparse = [name not in dense and bool(lookups_only[k]) and float(alphas[k]) < 1.0 for k, name in enumerate(names)]
    shapes = [(name, *_rows_and_width(p)) for name, p in parameters]
    return make_placement_plan(shapes, alphas.tolist(), sparse, team.size, config.path, config.hybrid)


def partition(
    model: nn.Module, plan: PlacementPlan, team: Team, spec: OptimizerSpec, config: Config, counts: Counter[str],
    state: dict[str, Any] | None = None,
) -> PartitionedModel:  # fmt: skip
    """Partitions the model, in place, and starts the servers, which load the `state` of a checkpoint before.

    All learners call it. The first one logs the plan.

    Raises:
        InputError: All parameters are sparse.
    """
    if len(plan.sparse) == len(plan.placements):
        raise InputError("all parameters are sparse: name a small one in Config.dense, for all-reduce")
    if team.rank == 0:
        log.info("bytes that a learner transfers in a step, by method:\n%s", plan)
    partitioned = PartitionedModel(model, plan, team, spec, config, counts)
    if state is not None:
        partitioned.load_state_dict(state)
    team.gather(torch.zeros(0, dtype=torch.float64))  # barrier: all servers exist and hold their state
    partitioned.start()
    return partitioned


def _check_equal(model: nn.Module, team: Team) -> None:
    """Raises InputError if learners begin with different weights or disagree about machines."""
    fingerprints = [_fingerprint(p.detach()) for p in model.parameters()]
    rows = team.gather(torch.tensor([*team.hosts, *fingerprints], dtype=torch.float64))
    for rank, row in rows.items():
        if not torch.equal(row[: team.size], rows[0][: team.size]):
            raise InputError(
                f"learner {rank} and learner 0 disagree about the machines that learners are on: start equally many "
                "learners on each machine"
            )
        if not torch.equal(row, rows[0]):
            raise InputError(
                f"learner {rank} begins with other weights than learner 0: make the model from the same seed, or load "
                "the same file, on all learners"
            )


def _rows_and_width(parameter: Tensor) -> tuple[int, int]:
    return (len(parameter), parameter[0].numel()) if parameter.dim() and len(parameter) else (1, parameter.numel())


def _fingerprint(values: Tensor) -> float:
    """Returns a weighted sum, with another weight for each row."""
    rows = values.reshape(len(values) if values.dim() else 1, -1).sum(dim=1, dtype=torch.float64)
    return float(rows @ torch.linspace(1, 2, len(rows), dtype=torch.float64, device=rows.device))
