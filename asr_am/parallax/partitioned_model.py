"""A model whose parameters are placed by a plan, with the work that each step does for dense and sparse ones.

Shapes: N elements of all dense parameters, V rows of D elements of a sparse one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import clip
from asr_am.distributed.param_server.weight_shards import place_servers
from asr_am.distributed.team import Team, Work
from asr_am.errors import InputError
from asr_am.parallax.config import Config
from asr_am.parallax.indexed_rows import IndexedRows
from asr_am.parallax.placement import PlacementPlan
from asr_am.parallax.replicated_table import ReplicatedTable
from asr_am.parallax.row_messages import Table, make_messenger
from asr_am.parallax.row_optimizer import OptimizerSpec
from asr_am.parallax.row_server import RowServer
from asr_am.parallax.row_worker import RowWorker
from asr_am.parallax.sparse_weight import SparseWeight
from asr_am.parallax.sparsity_probe import trainable

DENSE = "all dense parameters"  # name of their table on servers, with hybrid=False


class PartitionedModel:
    """A model in parts: dense parameters in one flat tensor `params` [N], sparse ones on servers or replicated."""

    def __init__(
        self, model: nn.Module, plan: PlacementPlan, team: Team, spec: OptimizerSpec, config: Config,
        counts: Counter[str],
    ) -> None:  # fmt: skip
        """Takes the sparse parameters out of the model, in place, and makes servers and replicas for them."""
        self._model, self._team, self._config, self._counts = model, team, config, counts
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._first_names = first_names(model)
        on_servers = [one for one in plan.sparse if one.method == "servers"]
        initial = {one.name: dict(model.named_parameters())[one.name].detach() for one in plan.sparse}
        self._replicas = {
            one.name: ReplicatedTable(
                team, one.method, initial[one.name].reshape(one.rows, -1).clone(), spec, counts, config.moving_average
            )
            for one in plan.sparse if one.method != "servers"
        }  # fmt: skip
        tables = [Table(one.name, one.rows, one.width) for one in on_servers]
        fetch: dict[str, Callable[[Tensor], Tensor]] = {name: r.fetch for name, r in self._replicas.items()}
        fetch |= {one.name: partial(self._fetch, k) for k, one in enumerate(on_servers)}
        self._sparse_weights = {name: _replace_parameter(model, name, fetch[name]) for name in initial}
        self.params = FlatParams(model)
        flat = nn.Parameter(self.params.w)
        flat.grad = self.params.g
        self._dense = spec.make(flat)
        self._average = self.params.w.clone() if config.moving_average else None
        weights = [initial[one.name].reshape(one.rows, -1).cpu() for one in on_servers]
        if not config.hybrid:
            tables.append(Table(DENSE, len(self.params), 1))
            weights.append(self.params.w.view(-1, 1).cpu())
        self._tables = tables
        self._server: RowServer | None = None
        self._worker: RowWorker | None = None
        self._ranks = place_servers(team.hosts, config.servers)
        if tables:
            self._make_server_and_worker(weights, spec, counts)
        share = 2 * (team.size - 1) / team.size  # that a learner sends in the all-reduce of one step
        self.reduced_bytes = round(share * self.params.g.nbytes) if config.hybrid else 0

    def _make_server_and_worker(self, weights: list[Tensor], spec: OptimizerSpec, counts: Counter[str]) -> None:
        team, tables, ranks, config = self._team, self._tables, self._ranks, self._config
        messenger = make_messenger(team, tables, len(ranks))
        hosts = team.hosts
        chiefs = tuple(rank for rank in range(team.size) if hosts[rank] not in hosts[:rank])
        sources = chiefs if config.local_aggregation else tuple(range(team.size))
        if team.rank in ranks:
            self._server = RowServer(messenger, tables, ranks, sources, spec, config, weights)
        self._worker = RowWorker(messenger, tables, ranks, self._server, config, counts)

    def start(self) -> None:
        """Starts this learner's server, if it has one."""
        if self._server is not None:
            self._server.start()

    def step(self, gradient: GradientFn) -> StepResult | None:
        """Does one step, with the gradient and the learning rate of the closure. Returns None if it has no data."""
        pending: list[Work] = []

        def average(begin: int, end: int) -> None:
            pending.append(self._team.start_all_reduce_mean(self.params.g[begin:end]))

        self.pull()
        step_result = gradient(average if self._config.hybrid else None)
        if step_result is None:
            return None
        self.push(step_result.lr)
        for work in pending:
            work.wait()
        if self._config.hybrid and not self._config.average_dense:
            self.params.g.mul_(self._team.size)
        self.update(step_result.lr)
        self._counts["all-reduce"] += self.reduced_bytes
        return step_result

    # Parts of a step, in their order.

    def pull(self) -> None:
        """Pulls dense parameters that live on servers. Sparse ones are pulled as they are looked up."""
        if not self._config.hybrid:
            assert self._worker is not None
            self.params.w.copy_(self._worker.fetch(len(self._tables) - 1, self._dense_rows()).view(-1))

    def push(self, lr: float) -> None:
        """Pushes or exchanges the gradients of sparse parameters, scaled for a mean or a sum over learners."""
        config, mean = self._config, 1 / self._team.size
        scaled = {name: weight.gradient() for name, weight in self._sparse_weights.items()}
        for rows in scaled.values():
            rows.values.mul_(mean if config.average_sparse else 1.0)
        if not config.hybrid:
            g = self.params.g.view(-1, 1) * (mean if config.average_dense else 1.0)
            scaled[DENSE] = IndexedRows(self._dense_rows(), g)
        if self._worker is not None:
            self._worker.push([scaled[table.name] for table in self._tables], lr)
        for name, replica in self._replicas.items():
            replica.exchange(scaled[name])

    def update(self, lr: float) -> None:
        """Clips and updates replicated parameters. Servers update theirs on their own."""
        if self._config.clip_norm > 0:
            self._clip()
        if self._config.hybrid:
            self._dense.param_groups[0]["lr"] = lr
            self._dense.step()
            if self._average is not None:
                self._average.lerp_(self.params.w, 1 - self._config.moving_average)
        for replica in self._replicas.values():
            replica.update(lr)
        if self._worker is not None:
            self._worker.t += 1

    def _clip(self) -> None:
        """Clips replicated gradients by the norm of the whole gradient, which includes the servers' part."""
        g = [self.params.g] if self._config.hybrid else []
        g += [replica.merged.values for replica in self._replicas.values()]
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in g]
        square = sum((norm.square() for norm in norms), torch.zeros((), dtype=torch.float64))
        norm = square.sqrt() if self._worker is None else self._worker.norm(square)
        limit = norm.to(self.params.g.device, torch.float32), self._config.clip_norm
        if self._config.hybrid:
            clip(self.params.g, *limit)
        for replica in self._replicas.values():
            replica.clip(*limit)

    def _fetch(self, table: int, numbers: Tensor) -> Tensor:
        assert self._worker is not None
        return self._worker.fetch(table, numbers)

    def _dense_rows(self) -> Tensor:
        return torch.arange(len(self.params), device=self.params.w.device)

    # Between steps. All learners call these together.

    def drain(self) -> None:
        """Waits until every server has applied all updates."""
        if self._server is not None and self._worker is not None:
            self._server.wait(self._worker.t)
        self._team.gather(torch.zeros(0, dtype=torch.float64))

    def open(self) -> None:
        """Notes that a push follows: no learner may leave before the next `close`."""
        if self._server is not None:
            self._server.closing = False

    def close(self) -> None:
        """Drains. Returns once every server accepts that learners leave."""
        self.drain()
        if self._server is not None:
            self._server.closing = True
        self._team.gather(torch.zeros(0, dtype=torch.float64))

    def weights(self, average: bool) -> dict[str, Tensor]:
        """Assembles the model's `state_dict` on the CPU, with moving averages instead of weights if `average`."""
        if average and not self._config.moving_average:
            raise InputError("parallax.moving_average=0: no moving averages were kept; set a decay above 0")
        self.drain()
        persistent = self._model.state_dict().keys()
        state = {name: buffer.cpu().clone() for name, buffer in self._model.named_buffers() if name in persistent}
        tables = {table.name: self._assemble(k, average) for k, table in enumerate(self._tables)}
        if DENSE in tables:
            flat = tables.pop(DENSE).view(-1)
        else:
            flat = (self._average if average and self._average is not None else self.params.w).cpu().clone()
        state |= {name: p.detach().cpu().clone() for name, p in self._model.named_parameters()}  # the frozen ones
        dense = trainable(self._model)
        for (name, p), values in zip(dense, flat.split([p.numel() for _, p in dense]), strict=True):
            state[name] = values.view(p.shape)
        for name, replica in self._replicas.items():
            tables[name] = (replica.average if average and replica.average is not None else replica.w).cpu().clone()
        state |= {name: values.view(self._shapes[name]) for name, values in tables.items()}
        return state | {name: state[first] for name, first in self._first_names.items()}

    def _assemble(self, k: int, average: bool) -> Tensor:
        """Collects table k [V, D] from all servers."""
        table, count = self._tables[k], len(self._ranks)
        values = torch.empty(table.rows, table.width)
        for server, rank in enumerate(self._ranks):
            part = torch.empty_like(values[server::count])
            if self._server is not None and rank == self._team.rank:
                part.copy_((self._server.average if average else self._server.w)[k])
            if self._team.size > 1:
                self._team.broadcast(part.view(-1).view(torch.int32), rank)  # not rounded to launcher.wire
            values[server::count] = part
        return values

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self.params.w, "optimizer": self._dense.state_dict(), "average": self._average,
            "buffers": dict(self._model.named_buffers()), "server": self._server and self._server.state_dict(),
            "replicas": {name: replica.state_dict() for name, replica in self._replicas.items()},
            "t": 0 if self._worker is None else self._worker.t,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.params.w.copy_(state["weights"])
        self._dense.load_state_dict(state["optimizer"])
        if self._average is not None:
            self._average.copy_(state["average"])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(state["buffers"][name])
        for name, replica in self._replicas.items():
            replica.load_state_dict(state["replicas"][name])
        if self._server is not None:
            self._server.load_state_dict(state["server"])
        if self._worker is not None:
            self._worker.t = state["t"]


def first_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of a parameter to its first name. Tied parameters have several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _replace_parameter(model: nn.Module, name: str, fetch: Callable[[Tensor], Tensor]) -> SparseWeight:
    """Replaces a parameter by a `SparseWeight` in every module that holds it."""
    parameter = dict(model.named_parameters())[name]
    weight = SparseWeight(name, parameter, fetch)
    for module in model.modules():
        for key, held in list(module.named_parameters(recurse=False)):
            if held is parameter:
                delattr(module, key)
                object.__setattr__(module, key, weight)
    return weight
