"""A worker's end of the parameter servers: it pushes blocks of gradients, and pulls blocks of weights into its model.

Blocks that come are kept aside until the worker asks for them, as it computes gradients of `params.w`. A worker that
waits for long sends its last gradients and its question again: what a letter that was lost, or a server that died, has
left undone. Servers know gradients that they have had by their t. Letters are those of `blocks`; two more, when a
server was restarted:  lost  asks a worker for its copy of the server's block;  copy  ⟨w_i, t⟩ is that [n].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.param_server.server import ParameterServer
from asr_am.distributed.param_server.weight_shards import METADATA_LEN, Push, Shards, pack_metadata
from asr_am.distributed.team import LearnerLost, Team

MAX_DEAD_CHECKS = 5  # times, until a server is given up


class Worker:
    """versions: t of each block in `params.w`. timeout: seconds after which a worker asks again.

    forgiving: wait for a dead server's replacement; else LearnerLost.
    """

    def __init__(self, team: Team, blocks: Shards, params: FlatParams, timeout: float, fault_tolerant: bool) -> None:
        self._team, self._blocks, self._params = team, blocks, params
        self._timeout, self._fault_tolerant = timeout, fault_tolerant
        self.server: ParameterServer | None = None  # of this rank
        self.versions = [0] * len(blocks)
        self._arrived: dict[int, tuple[int, Tensor]] = {}
        self._shard_arrived = team.event()
        self._lock = team.lock()  # of versions, what was asked for and has arrived, and writing to params.w
        self._g = torch.zeros(len(blocks) * blocks.size)
        self._metadata = torch.zeros(METADATA_LEN)
        self._pushed: list[int] | None = None  # t of each block, since the last rest
        self._push_times: list[dict[int, float]] = [{} for _ in blocks.ranks]  # others' blocks: when pushed, by t
        self._drain_announced: int | None = None  # the rest that this worker is away before
        self._acked: set[int] = set()  # blocks whose servers know
        self._drain_changed = team.event()
        self._restarted: set[int] = set()  # blocks whose servers were restarted, since this worker asked last
        team.register_tag("weights", blocks.size)
        team.register_tag("lost")
        team.register_tag("heard")

    def start(self) -> None:
        self._team.spawn(self._receive, "worker: weights")
        self._team.spawn(self._serve_snapshots, "worker: lost")
        self._team.spawn(self._ack_loop, "worker: heard")
        self._team.spawn(self._retry_loop, "worker: away")

    def newest(self, block: int) -> int:
        """t of a block's newest copy here."""
        return max(self.versions[block], self._arrived[block][0] if block in self._arrived else -1)

    # pushing

    def push(self, t: Sequence[int], frames: float, lr: float, batch: int, silent: Sequence[int] = ()) -> None:
        """`params.g`, the gradient of a batch, block by block with timestamps t, but for some."""
        self._g[: len(self._params)].copy_(self._params.g)
        self._metadata, self._pushed = pack_metadata(frames, lr, batch), list(t)
        for block in self._server_order():
            if block not in silent:
                if self._blocks.ranks[block] != self._team.rank:
                    with self._lock:
                        self._push_times[block][t[block]] = self._team.now()
                self._push(block)

    def _server_order(self) -> list[int]:
        """All blocks, from that of the next server after this rank to this rank's own: not all begin with the same."""
        rank, ranks = self._team.rank, self._blocks.ranks
        return sorted(range(len(ranks)), key=lambda block: (ranks[block] - rank - 1) % self._team.size)

    def _push(self, block: int) -> None:
        assert self._pushed is not None
        server, t, g = self._blocks.ranks[block], self._pushed[block], self._blocks.of(self._g, block)
        if server != self._team.rank:
            self._team.send(server, "push", t, g, self._metadata)
            return
        assert self.server is not None
        frames, lr, batch = self._metadata.view(torch.float64).tolist()
        self.server.push(Push(server, t, g.clone(), frames, lr, int(batch)))

    # pulling

    def flush(self) -> None:
        """Wait until every server has answered what was pushed last."""
        if self._pushed is not None:
            self.wait([t + 1 for t in self._pushed], len(self._blocks))

    def wait(self, wanted: Sequence[int], need: int) -> None:
        """Until `need` blocks are here in the version `wanted` of each, or newer. LearnerLost: a server is gone.

        At rest nobody makes the updates again that a server took along, so its replacement's block is what counts.
        """
        wanted, gone = list(wanted), Counter[int]()
        while True:
            self._shard_arrived.clear()
            missing = [block for block in range(len(self._blocks)) if self.newest(block) < wanted[block]]
            if len(self._blocks) - len(missing) >= need:
                return
            if not self._shard_arrived.wait(self._timeout) or self._restarted:
                with self._lock:
                    reborn, self._restarted = self._restarted, set()
                if self._pushed is None:
                    alive = self._team.live_ranks()
                    back = [block for block in reborn if self._blocks.ranks[block] in alive]
                    for block in back:
                        self._forget(block)
                        wanted[block] = 0
                    missing = sorted({*missing, *back})
                self._retry(missing, gone)

    def wait_extra(self, t: int, seconds: float) -> None:
        """Wait for so many seconds at most until all blocks are of version t."""
        end = self._team.now() + seconds
        while (left := end - self._team.now()) > 0:
            self._shard_arrived.clear()
            if all(self.newest(block) >= t for block in range(len(self._blocks))):
                return
            self._shard_arrived.wait(left)

    def apply_arrived(self, least: int = 0) -> int:
        """Copy the blocks that have come into `params.w`, if they are of version `least` at least; how many were not,
        and were dropped.
        """
        with self._lock:
            arrived, self._arrived = self._arrived, {}
            for block, (t, w) in arrived.items():
                if t >= least:
                    part = self._blocks.of(self._params.w, block)
                    part.copy_(w[: len(part)])
                    self.versions[block] = t
        return sum(t < least for t, _ in arrived.values())

    def on_shard(self, block: int, t: int, w: Tensor) -> None:
        """A block has come: the newest counts."""
        with self._lock:
            if t > self.newest(block):
                self._arrived[block] = t, w
        self._shard_arrived.set()

    def pull(self, blocks: Sequence[int]) -> None:
        """Have servers send their blocks."""
        for block in blocks:
            if self._blocks.ranks[block] != self._team.rank:
                self._team.send(self._blocks.ranks[block], "pull", 0)
            elif self.server is not None:
                with self.server.lock:
                    self.server.on_pull(self._team.rank)

    def _forget(self, block: int) -> None:
        with self._lock:
            self._arrived.pop(block, None)
            self.versions[block] = -1

    def _retry(self, missing: Sequence[int], gone: Counter[int]) -> None:
        """gone: how often the server of a block was found dead."""
        alive = self._team.live_ranks()
        for block in missing:
            server = self._blocks.ranks[block]
            gone[block] = 0 if server in alive else gone[block] + 1
            if server in alive and self._pushed is not None:
                self._push(block)
            elif server in alive:
                self.pull([block])
            elif not self._fault_tolerant or gone[block] == MAX_DEAD_CHECKS:
                raise LearnerLost(server, f"died, the server of block {block}")

    # rest, and joining

    def announce_drained(self, drain_count: int) -> None:
        """Tell all servers that nothing more comes from here before the next rest, and what did not."""
        self._acked.clear()
        self._drain_announced = drain_count
        for block in self._server_order():
            self._announce_drained_to(block, drain_count)
        self._drain_changed.set()

    def _announce_drained_to(self, block: int, drain_count: int) -> None:
        server, pushed = self._blocks.ranks[block], self._pushed
        t = 0 if pushed is None else pushed[block] + 1
        if server != self._team.rank:
            self._team.send(server, "away", drain_count, torch.tensor([float(t)]))
        elif self.server is not None:
            self._acked.add(block)
            self.server.mark_drained(server, t, drain_count)

    def pull_versions(self, versions: Sequence[int]) -> None:
        """Pull all blocks in these versions, at rest, where nothing that was pushed waits for an answer."""
        self._pushed = self._drain_announced = None
        with self._lock:
            for asked in self._push_times:
                asked.clear()
        wanted = list(versions)
        if self.server is not None:  # which may have come back since they agreed
            wanted[self.server.index] = min(wanted[self.server.index], self.server.t)
        self.pull([block for block in range(len(self._blocks)) if self.newest(block) < wanted[block]])
        self.wait(wanted, len(self._blocks))
        self.apply_arrived()

    def pull_all(self) -> None:
        """Pull the block of every living server, whatever is here."""
        alive = self._team.live_ranks()
        living = [block for block, server in enumerate(self._blocks.ranks) if server in alive]
        for block in living:
            self._forget(block)
        self.pull(living)
        self.wait([0 if block in living else -1 for block in range(len(self._blocks))], len(self._blocks))
        self.apply_arrived()

    # tasks

    def _receive(self) -> None:
        while True:
            message = self._team.recv("weights")
            if message is not None:
                block = self._blocks.ranks.index(message.source)
                self._count_delay(block, message.clock)
                self.on_shard(block, message.clock, message.tensors[0])

    def _count_delay(self, block: int, t: int) -> None:
        """Version t of a block answers the newest older push; the ones before that are not answered any more."""
        with self._lock:
            pushed = {step: self._push_times[block].pop(step) for step in list(self._push_times[block]) if step < t}
        if pushed:
            self._team.comm_stats.pull_latency[f"{self._team.now() - pushed[max(pushed)]:.2g}"] += 1

    def _serve_snapshots(self) -> None:
        while True:
            message = self._team.recv("lost")
            if message is None or message.source not in self._blocks.ranks:
                continue
            block = self._blocks.ranks.index(message.source)
            with self._lock:
                t, copy = self._arrived.get(block) or (
                    self.versions[block], self._blocks.padded(self._params.w, block)
                )  # fmt: skip
            self._team.send(message.source, "copy", max(t, 0), copy)
            self._acked.discard(block)
            self._drain_changed.set()
            with self._lock:
                self._restarted.add(block)
            self._shard_arrived.set()

    def _ack_loop(self) -> None:
        while True:
            message = self._team.recv("heard")
            if message is not None and message.clock == self._drain_announced:
                self._acked.add(self._blocks.ranks.index(message.source))

    def _retry_loop(self) -> None:
        """While this worker is away, tell servers again that do not know."""
        while True:
            self._drain_changed.wait()
            self._drain_changed.clear()
            while (left := self._drain_announced) is not None and len(self._acked) < len(self._blocks):
                self._team.sleep(self._timeout)
                for block in set(range(len(self._blocks))) - self._acked:
                    if self._drain_announced == left:
                        self._announce_drained_to(block, left)
