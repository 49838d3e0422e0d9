"""Parallax (Kim et al., 2018) as a strategy of the training loop.

Dense parameters are averaged as in `sync`. Sparse ones leave `params` and the model for servers or replicated tables,
where their touched rows are updated. A model without sparse parameters trains as with `sync`.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer, make_rule
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategy import LossFn
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from asr_am.parallax.config import Config
from asr_am.parallax.indexed_rows import WireDtype
from asr_am.parallax.partitioned_model import PartitionedModel
from asr_am.parallax.placement import Method
from asr_am.parallax.planning import partition, plan_parameters
from asr_am.parallax.row_optimizer import OptimizerSpec
from asr_am.parallax.sparsity_probe import trainable

log = logging.getLogger(__name__)


class Parallax(Sync):
    """Synchronous SGD that exchanges only the touched rows of sparse parameters, with options of `Config`.

    `params` are those of the whole model. `attach` replaces them by those of the dense parameters.
    """

    name = "parallax"
    nestable = False

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, path: Method | None = None,
        wire: WireDtype = "float32", local_aggregation: bool = True, average_dense: bool = True,
        average_sparse: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, optimizer, team)
        path = None if team.size == 1 else path  # a single learner needs no servers
        self._config = Config(
            path=path, wire=wire, local_aggregation=local_aggregation, clip_norm=optimizer.options.clip_norm,
            average_dense=average_dense, average_sparse=average_sparse,
        )  # fmt: skip
        self._partitioned: PartitionedModel | None = None
        self._plan: dict[str, Any] = {}
        self._names: list[str] = []
        self._whole: Tensor | None = None  # the complete weights, until the next update

    def check(self, faults: Faults) -> None:
        if faults.lost_share:
            raise InputError("cluster.faults.lost_share: strategy=parallax waits for every message; set it to 0")

    def attach(self, model: nn.Module, loss: LossFn, first_batch: Callable[[], Any]) -> None:
        self._names = [name for name, _ in trainable(model)]
        plan = plan_parameters(model, loss, first_batch(), self.team, self._config)
        self.params.rebind_grads()  # the probe unbinds them
        if not plan.sparse and self._config.average_dense:
            if self.team.rank == 0:
                log.info("strategy=parallax: no sparse parameters, so this is strategy=sync")
            return
        spec = OptimizerSpec(make_rule(self.optimizer.options, [p for _, p in trainable(model)]), model)
        self._partitioned = partition(model, plan, self.team, spec, self._config, self.metrics)
        self._plan = {"hosts": list(self.team.hosts), **plan.state_dict()}
        self.params = self._partitioned.params
        self.equal_replicas = False  # a server has rows that no other learner has

    def step(self, gradient: GradientFn) -> StepResult | None:
        if self._partitioned is None:
            return super().step(gradient)
        self._partitioned.open()
        step_result = self._partitioned.step(gradient)
        if step_result is not None:
            self.staleness[0] += 1
            self._whole = None
        return step_result

    def drain(self) -> None:
        if self._partitioned is not None:
            self._partitioned.close()

    def consensus(self) -> Tensor:
        if self._partitioned is None:
            return super().consensus()
        if self._whole is None:
            weights = self._partitioned.weights(average=False)
            self._whole = torch.cat([weights[name].reshape(-1) for name in self._names]).to(self.params.w.device)
        return self._whole

    def replica(self) -> Tensor:
        return self.consensus()

    def state_dict(self) -> dict[str, Any]:
        if self._partitioned is None:
            return super().state_dict()
        return {
            "plan": self._plan, "model": self._partitioned.state_dict(), "staleness": dict(self.staleness),
            "counts": dict(self.metrics),
        }  # fmt: skip

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return super().merge(states) if self._partitioned is None else states[0]  # which `load_state_dict` refuses

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._partitioned is None:
            super().load_state_dict(state)
            return
        if state.get("plan") != self._plan:
            raise InputError(
                "the checkpoint has other sparse parameters, methods or hosts; resume with the same learners"
            )
        self._partitioned.load_state_dict(state["model"])
        self._whole = None
