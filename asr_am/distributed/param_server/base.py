"""The strategy base class of the algorithms with parameter servers: placement, draining, checkpoints, and rejoining.

W is cut into shards of equal size. Each is held by a server, a task with the shard's optimizer and momentum, either
beside the learner of some rank or on a dedicated rank. Learners are workers: they push gradients and pull weights. When
drained, all of them hold the servers' weights, which are the consensus.

A learner that dies takes down the server on its rank. The replacement takes the newest copy of the shard that a worker
holds, with its version. The shard's momentum is lost, and so are updates that no worker had pulled. If no worker holds
a copy, or the rank is not restarted, the team starts again from the last checkpoint, with the momentum in it. In the
latter case the server moves to another rank, or there is one server less, with larger shards. The replacement does not
know which batches the copy contains: a push that the dead server had applied but not acknowledged, or a batch that is
computed again, may act twice on it. Servers that live on drop the second
gradient of a batch of the segment (`metrics["duplicate_gradients"]`).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import SegmentRecord, StepResult
from asr_am.distributed.optimizer import Optimizer, clip
from asr_am.distributed.param_server.server import ParameterServer, ServerContext
from asr_am.distributed.param_server.weight_shards import Shards, place_servers
from asr_am.distributed.param_server.worker import Worker
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError

log = logging.getLogger(__name__)


class ParameterServerStrategy(Strategy):
    """A strategy with parameter servers. Subclasses define `step` and the kind of server.

    Args:
        optimizer: the update rule. Servers apply it to their shards.
        servers: number of servers, each beside a learner. None: one on each host.
        timeout: seconds without an answer after which a worker asks again.
        apart: the servers are dedicated ranks, the last of the team, which compute no gradients.
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
        self.shards = Shards(len(params), place_servers(team.hosts, servers, apart, team.ranks))
        self.dedicated_servers = servers if apart and servers is not None else 0
        self.workers = tuple(rank for rank in team.ranks if rank < team.size - self.dedicated_servers)
        self.worker = Worker(team, self.shards, params, timeout, self.fault_tolerant)
        self.server: ParameterServer | None = None
        self._context = ServerContext(
            team, self.shards, self.workers, self.metrics, self.staleness, self.worker.on_shard
        )
        if team.rank in self.shards.ranks:
            self.server = self._make_server(self._context, self.shards.ranks.index(team.rank))
            self.worker.server = self.server
        self._drain_count = 0
        self._started = False
        self._has_momentum = True  # of the checkpoint, if there is one

    @abstractmethod
    def _make_server(self, context: ServerContext, index: int) -> ParameterServer:
        """Returns the server of this rank."""

    def _start(self) -> None:
        """Starts the communication tasks. Not before the first step, as a checkpoint may be loaded before it."""
        if not self._started:
            self._started = True
            self.worker.start()
            if self.server is not None:
                self.server.start()

    def _push(self, step_result: StepResult, t: Sequence[int], skip: Sequence[int] = ()) -> None:
        """Pushes the gradient of a batch to the servers.

        Args:
            t: step or version of each shard that the gradient was taken at.
            skip: shards that are not pushed.
        """
        assert step_result.lease.batch is not None, "a LeaseQueue has no idle turns"
        frames, lr, batch = step_result.num_frames, step_result.lr, step_result.lease.batch
        self.worker.push(self._drain_count, t, frames, lr, batch, step_result.digest, skip)

    def _flush(self) -> None:
        """Waits until the servers have answered the last push."""
        self.worker.wait_for_next_step()

    def _clip(self) -> None:
        """Clips this worker's own gradient: a server that does not wait for the others sees only its shard."""
        limit = self.optimizer.options.clip_norm
        if limit > 0:
            clip(self.params.g, torch.linalg.vector_norm(self.params.g), limit)

    def drain(self) -> None:
        self._start()
        if self.team.rank in self.workers:
            self.worker.announce_drained(self._drain_count)
            self._flush()
        self.team.gather(torch.zeros(0, dtype=torch.float64))  # barrier: all that was pushed is applied or dropped
        self._drain_count += 1
        if self.server is not None:
            self.server.drain(self._drain_count)
        self._pull_final(self._gather_versions())

    def consensus(self) -> Tensor:
        """Returns the servers' weights. Of a shard whose server is dead, learners may have copies of other versions.

        The default's result must be the same at all learners (`gather_comm_metrics`), so this is not the default.
        """
        return self.params.w

    def unapplied(self, record: SegmentRecord) -> tuple[int, list[int]] | None:
        return None if self.server is None else (self.server.index, self.server.unapplied(record))

    def _gather_versions(self) -> list[int]:
        """Returns the servers' versions by shard, when drained. -1 for a dead server: the copies at hand will do."""
        version = -1 if self.server is None else self.server.t
        rows = self.team.gather(torch.tensor([float(version)], dtype=torch.float64))
        return [int(rows[rank]) if rank in rows else -1 for rank in self.shards.ranks]

    def _pull_final(self, versions: Sequence[int]) -> None:
        """Pulls all shards in these versions, when drained."""
        self.worker.pull_versions(versions)

    def rejoin(self) -> None:
        self._started = True
        self.worker.start()  # before the server recovers: another one that was restarted may ask for copies
        if self.server is not None:
            self.server.recover()
            self.server.start()
        self.worker.pull_all()
        log.info("learner %d rejoined with the servers' weights", self.team.rank)

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
        self._drain_count, versions, own = state["rests"], state["versions"], state["server"]
        if len(versions) != len(self.shards):
            if len(self.team.ranks) == self.team.size:
                raise InputError(
                    f"the checkpoint has {len(versions)} servers, this run {len(self.shards)}: set "
                    f"strategy.servers={len(versions)}"
                )
            versions, own = [max(versions)] * len(self.shards), None  # a rank is gone: other shards, of the same W
        self.worker.versions[:] = versions
        self._has_momentum = self.server is None or self.server.load(
            own, self.params.w, versions[self.server.index], self._drain_count
        )

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged = super().merge([{**state, "server": None} for state in states])
        return merged | {"versions": [max(merged["versions"])] * len(self.shards)}  # `load_moved` cuts the momentum

    def load_moved(self, states: Callable[[], Iterable[dict[str, Any]]]) -> None:
        if self.server is not None and not self._has_momentum:
            loaded = list(states())
            servers = [state["server"] for state in loaded if state["server"] is not None]
            self.server.take_over(servers, len(loaded[0]["versions"]))
