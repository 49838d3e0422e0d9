"""A model whose parameters have gone the ways of a plan: what each step does with the dense and the sparse ones.

Shapes: N elements of all dense parameters; V rows of D elements of a sparse one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import clip
from asr_am.distributed.param_server.weight_shards import place_servers
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from asr_am.parallax.config import Config
from asr_am.parallax.indexed_rows import IndexedRows
from asr_am.parallax.placement import Placement, PlacementPlan
from asr_am.parallax.replicated_table import ReplicatedTable
from asr_am.parallax.row_messages import Table, make_messenger
from asr_am.parallax.row_optimizer import OptimizerSpec
from asr_am.parallax.row_server import RowServer
from asr_am.parallax.row_worker import RowWorker
from asr_am.parallax.sparse_weight import SparseWeight
from asr_am.parallax.sparsity_probe import trainable

DENSE = "all dense parameters"  # as one table, where they are on servers


class PartitionedModel:
    """params: the dense parameters. reduced_bytes: that a learner sends of them in a step's all-reduce."""

    def __init__(
        self,
        model: nn.Module,
        plan: PlacementPlan,
        team: Team,
        rule: OptimizerSpec,
        config: Config,
        counts: Counter[str],
    ) -> None:
        self._model, self._team, self._config = model, team, config
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._first_names = first_names(model)
        served = [choice for choice in plan.sparse if choice.path == "servers"]
        whole = {choice.name: dict(model.named_parameters())[choice.name].detach() for choice in plan.sparse}
        self._replicas = {
            choice.name: ReplicatedTable(
                team, _table(choice), choice.path, whole[choice.name].reshape(choice.rows, -1), rule, counts,
                config.moving_average,
            )
            for choice in plan.sparse if choice.path != "servers"
        }  # fmt: skip
        tables = [_table(choice) for choice in served]
        fetch: dict[str, Callable[[Tensor], Tensor]] = {name: r.fetch for name, r in self._replicas.items()}
        fetch |= {choice.name: partial(self._fetch, k) for k, choice in enumerate(served)}
        self._lookups = {name: _take_out(model, name, fetch[name]) for name in whole}
        self.params = FlatParams(model)
        flat = nn.Parameter(self.params.w)
        flat.grad = self.params.g
        self._dense = rule.make(flat)
        self._average = self.params.w.clone() if config.moving_average else None
        weights = [whole[choice.name].reshape(choice.rows, -1).cpu() for choice in served]
        if not config.hybrid:
            tables.append(Table(DENSE, len(self.params), 1))
            weights.append(self.params.w.view(-1, 1).cpu())
        self._tables = tables
        self._server: RowServer | None = None
        self._worker: RowWorker | None = None
        self._ranks = place_servers(team.hosts, config.servers)
        if tables:
            self._serve(weights, rule, counts)
        share = 2 * (team.size - 1) / team.size
        self.reduced_bytes = round(share * self.params.g.nbytes) if config.hybrid else 0

    def _serve(self, weights: list[Tensor], rule: OptimizerSpec, counts: Counter[str]) -> None:
        team, tables, ranks, config = self._team, self._tables, self._ranks, self._config
        messenger = make_messenger(team, tables, len(ranks))
        hosts = team.hosts
        chiefs = tuple(rank for rank in range(team.size) if hosts[rank] not in hosts[:rank])
        sources = chiefs if config.local_aggregation else tuple(range(team.size))
        if team.rank in ranks:
            self._server = RowServer(messenger, tables, ranks, sources, rule, config, weights)
        self._worker = RowWorker(messenger, tables, ranks, self._server, config, counts)

    def start(self) -> None:
        if self._server is not None:
            self._server.start()

    # a step

    def pull(self) -> None:
        """Dense parameters, where they are on servers; sparse ones are pulled as they are looked up."""
        if not self._config.hybrid:
            assert self._worker is not None
            self.params.w.copy_(self._worker.fetch(len(self._tables) - 1, self._numbers()).view(-1))

    def push(self, rate: float) -> None:
        """The gradients of sparse parameters; the mean over learners is theirs, too."""
        share = 1 / self._team.size
        scaled = {name: lookup.gradient() for name, lookup in self._lookups.items()}
        for rows in scaled.values():
            rows.values.mul_(share)
        if not self._config.hybrid:
            scaled[DENSE] = IndexedRows(self._numbers(), self.params.g.view(-1, 1) * share)
        if self._worker is not None:
            self._worker.push([scaled[table.name] for table in self._tables], rate)
        for name, replica in self._replicas.items():
            replica.exchange(scaled[name])

    def update(self, rate: float) -> None:
        """What is replicated, with all of the gradient limited together; the servers do the rest by themselves."""
        if self._config.clip_norm > 0:
            self._clip()
        if self._config.hybrid:
            self._dense.param_groups[0]["lr"] = rate
            self._dense.step()
            if self._average is not None:
                self._average.lerp_(self.params.w, 1 - self._config.moving_average)
        for replica in self._replicas.values():
            replica.update(rate)
        if self._worker is not None:
            self._worker.t += 1

    def _clip(self) -> None:
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

    def _numbers(self) -> Tensor:
        return torch.arange(len(self.params), device=self.params.w.device)

    # at rest

    def drain(self) -> None:
        if self._server is not None and self._worker is not None:
            self._server.wait(self._worker.t)
        self._team.gather(torch.zeros(0, dtype=torch.float64))

    def end(self) -> None:
        """Rest, and then let learners leave: nobody does before all servers know that it may."""
        self.drain()
        if self._server is not None:
            self._server.ended = True
        self._team.gather(torch.zeros(0, dtype=torch.float64))

    def weights(self, average: bool) -> dict[str, Tensor]:
        if average and not self._config.moving_average:
            raise InputError("parallax.moving_average=0: there are no moving averages of the weights")
        self.drain()
        own = self._model.state_dict().keys()  # without what the model does not save
        found = {name: buffer.cpu().clone() for name, buffer in self._model.named_buffers() if name in own}
        tables = {table.name: self._assemble(k, average) for k, table in enumerate(self._tables)}
        if DENSE in tables:
            flat = tables.pop(DENSE).view(-1)
        else:
            flat = (self._average if average and self._average is not None else self.params.w).cpu().clone()
        found |= {name: p.detach().cpu().clone() for name, p in self._model.named_parameters()}  # the frozen ones
        dense = trainable(self._model)
        for (name, p), values in zip(dense, flat.split([p.numel() for _, p in dense]), strict=True):
            found[name] = values.view(p.shape)
        for name, replica in self._replicas.items():
            tables[name] = (replica.average if average and replica.average is not None else replica.w).cpu().clone()
        found |= {name: values.view(self._shapes[name]) for name, values in tables.items()}
        return found | {name: found[first] for name, first in self._first_names.items()}

    def _assemble(self, k: int, average: bool) -> Tensor:
        """A table [V, D] from all servers."""
        table, count = self._tables[k], len(self._ranks)
        whole = torch.empty(table.rows, table.width)
        for server, rank in enumerate(self._ranks):
            part = torch.empty_like(whole[server::count])
            if self._server is not None and rank == self._team.rank:
                part.copy_((self._server.average if average else self._server.w)[k])
            if self._team.size > 1:
                self._team.broadcast(part.view(-1), rank)
            whole[server::count] = part
        return whole

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
    """Of each parameter by each of its names, which are several in a tied model, the first."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _table(choice: Placement) -> Table:
    return Table(choice.name, choice.rows, choice.width)


def _take_out(model: nn.Module, name: str, fetch: Callable[[Tensor], Tensor]) -> SparseWeight:
    """Put what looks rows up in the place of a parameter, in every module that has it."""
    parameter = dict(model.named_parameters())[name]
    lookup = SparseWeight(name, parameter, fetch)
    for module in model.modules():
        for key, own in list(module.named_parameters(recurse=False)):
            if own is parameter:
                delattr(module, key)
                object.__setattr__(module, key, lookup)
    return lookup
