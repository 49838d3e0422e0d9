"""What the strategies with parameter servers share: who serves, rest, checkpoints, and taking the place of the dead.

W is cut into blocks by bytes; each is held by a server, a task with the optimizer and its momentum, beside the learner
of some rank or on a rank of its own. Learners are workers: they push gradients, and pull weights. At rest all have the
servers' weights, which are the consensus.

A learner that dies takes its server along, if it has one. Its replacement takes the newest copy of the block that a
worker has, with its version; lost are the momentum of the block, and updates that no worker had pulled.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import StepResult
from asr_am.distributed.optimizer import Optimizer, clip
from asr_am.distributed.param_server.server import ParameterServer, ServerContext
from asr_am.distributed.param_server.weight_shards import Shards, place_servers
from asr_am.distributed.param_server.worker import Worker
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError

log = logging.getLogger(__name__)


class ParameterServerStrategy(Strategy):
    """servers: how many, beside as many learners; None: one on each host. apart: not beside learners, but on the last
    ranks of the team, which do nothing else. timeout: seconds without an answer after which a worker asks again.
    """

    synchronous = False
    fault_tolerant = True

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, servers: int | None = None, timeout: float = 60.0,
        apart: bool = False,
    ) -> None:  # fmt: skip
        if timeout <= 0:
            raise InputError(f"strategy.timeout={timeout}: must be above 0")
        super().__init__(params, optimizer, team)
        self.blocks = Shards(len(params), place_servers(team.hosts, servers, apart))
        self.workers = range(team.size - len(self.blocks) if apart else team.size)
        self.worker = Worker(team, self.blocks, params, timeout, self.fault_tolerant)
        self.server: ParameterServer | None = None
        self._context = ServerContext(
            team, self.blocks, self.workers, self.metrics, self.staleness, self.worker.on_shard
        )
        if team.rank in self.blocks.ranks:
            self.server = self._make_server(self._context, self.blocks.ranks.index(team.rank))
            self.worker.server = self.server
        self._drain_count = 0
        self._started = False

    @abstractmethod
    def _make_server(self, context: ServerContext, index: int) -> ParameterServer:
        """The server of this rank."""

    def _start(self) -> None:
        """Begin to answer letters, not before the first step: a checkpoint may have been loaded before that."""
        if not self._started:
            self._started = True
            self.worker.start()
            if self.server is not None:
                self.server.start()

    def _push(self, step_result: StepResult, t: Sequence[int], silent: Sequence[int] = ()) -> None:
        """The gradient of a batch, taken at versions t of the blocks, to all servers but those of some blocks."""
        assert step_result.lease.batch is not None, "a table has no idle turns"
        self.worker.push(t, step_result.num_frames, step_result.lr, step_result.lease.batch, silent)

    def _clip(self) -> None:
        """Limit the norm of this worker's own gradient: servers that do not wait for each other see blocks only."""
        limit = self.optimizer.options.clip_norm
        if limit > 0:
            clip(self.params.g, torch.linalg.vector_norm(self.params.g), limit)

    def drain(self) -> None:
        self._start()
        if self.team.rank in self.workers:
            self.worker.announce_drained(self._drain_count)
            self.worker.flush()
        self.team.gather(torch.zeros(0, dtype=torch.float64))  # all that was pushed is applied, or dropped
        self._drain_count += 1
        if self.server is not None:
            self.server.drain(self._drain_count)
        self._pull_final(self._gather_versions())

    def _gather_versions(self) -> list[int]:
        """The servers' versions at rest, by block; of one that is dead at present, what is here is enough."""
        own = -1 if self.server is None else self.server.t
        rows = self.team.gather(torch.tensor([float(own)], dtype=torch.float64))
        return [int(rows[rank]) if rank in rows else -1 for rank in self.blocks.ranks]

    def _pull_final(self, versions: Sequence[int]) -> None:
        """Pull all blocks in these versions, at rest."""
        self.worker.pull_versions(versions)

    def rejoin(self) -> None:
        if self.server is not None:
            self.server.recover()
        self._start()
        self.worker.pull_all()
        log.info("learner %d is back, with the servers' weights", self.team.rank)

    def state_dict(self) -> dict[str, Any]:
        server = None if self.server is None else self.server.state_dict()
        return {
            **super().state_dict(),
            "versions": list(self.worker.versions),
            "rests": self._drain_count,
            "server": server,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if len(state["versions"]) != len(self.worker.versions):
            raise InputError(
                f"the checkpoint has {len(state['versions'])} servers, this run {len(self.worker.versions)}; set "
                f"strategy.servers={len(state['versions'])}"
            )
        self.worker.versions[:] = state["versions"]
        self._drain_count = state["rests"]
        if self.server is not None:
            self.server.load(state["server"], self.params.w, self.worker.versions[self.server.index], self._drain_count)
