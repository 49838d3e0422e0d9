"""The worker's end of parameter servers: pushes shards of gradients, and pulls shards of weights into its model.

Shards that arrive are kept aside until the worker applies them, because gradients are computed at `params.w`. A worker
that waits for longer than its timeout repeats its last push or its request, which a lost message or a dead server may
have left unanswered. Servers recognise a repeated push by its `PushId`. The messages are described in `weight_shards`.

Shapes: N elements of all parameters, n of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.param_server.server import POLL_INTERVAL, ParameterServer
from asr_am.distributed.param_server.weight_shards import (
    ANSWER_LEN,
    METADATA_LEN,
    NO_COPY,
    NO_PUSH,
    PushId,
    Shards,
    make_push,
    pack_metadata,
    read_answer,
)
from asr_am.distributed.team import LearnerLost, Team, rounds


class Worker:
    """One rank's worker.

    Args:
        timeout: seconds without an answer after which the worker asks again.
        fault_tolerant: wait for a dead server's replacement, instead of raising LearnerLost.

    Attributes:
        server: the server on this rank, set by its owner.
        versions: version t of each shard in `params.w`.
    """

    def __init__(self, team: Team, shards: Shards, params: FlatParams, timeout: float, fault_tolerant: bool) -> None:
        self._team, self._shards, self._params = team, shards, params
        self._timeout, self._fault_tolerant = timeout, fault_tolerant
        self.server: ParameterServer | None = None
        self.versions = [0] * len(shards)
        self._arrived: dict[int, tuple[int, Tensor]] = {}  # newest (t, w_i) of each shard that is not applied yet
        self._shard_arrived = team.event()
        self._lock = team.lock()  # guards versions, _arrived, _push_times, _restarted, answers, and writes to params.w
        self._g = torch.zeros(len(shards) * shards.size)
        self._metadata = torch.zeros(METADATA_LEN, dtype=torch.int32)
        self._pushed: list[int] | None = None  # t of each shard in the last push, None since the last drain
        self._push_id = NO_PUSH  # of the last push
        self._step = 0  # number of pushes in the segment, in a restarted worker beginning with those of the slowest
        self._acknowledged = [NO_PUSH] * len(shards)  # newest push that each server has acknowledged
        self._slowest = [0] * len(shards)  # steps of the slowest other worker, as each server answered last
        self._push_times: list[dict[int, float]] = [{} for _ in shards.ranks]  # by shard of another rank: t to time
        self._drain_announced: int | None = None  # number of the drain that this worker waits for
        self._drain_acked: set[int] = set()  # shards whose servers know that
        self._drain_changed = team.event()
        self._known = set() if team.rejoins else set(range(len(shards)))  # shards that are not just a checkpoint's
        self._restarted: set[int] = set()  # shards whose servers were restarted since the last retry
        self._rounded: set[int] = set()  # shards whose newest copy was rounded to `launcher.wire`
        self._rounds = rounds(team)
        team.register_tag("weights", shards.size, ANSWER_LEN)
        team.register_tag("lost")
        team.register_tag("heard")

    def start(self) -> None:
        """Starts the communication tasks."""
        self._team.spawn(self._receive, "worker: weights")
        self._team.spawn(self._serve_snapshots, "worker: lost")
        self._team.spawn(self._ack_loop, "worker: heard")
        self._team.spawn(self._retry_loop, "worker: away")

    def newest(self, shard: int) -> int:
        """Returns t of the newest copy of a shard at this worker."""
        return max(self.versions[shard], self._arrived[shard][0] if shard in self._arrived else -1)

    # pushing

    def push(
        self, segment: int, t: Sequence[int], frames: float, lr: float, batch: int, digest: int,
        skip: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Pushes `params.g`, shard by shard.

        Args:
            segment: number of drains before it.
            t: step or version of each shard that the gradient was taken at.
            skip: shards that are not pushed.
        """
        self._g[: len(self._params)].copy_(self._params.g)
        self._step += 1
        self._push_id = PushId(segment, self._team.incarnation, self._step)
        self._metadata, self._pushed = pack_metadata(frames, lr, batch, digest, self._push_id), list(t)
        for shard in self._server_order():
            if shard not in skip:
                if self._shards.ranks[shard] != self._team.rank:
                    with self._lock:
                        self._push_times[shard][t[shard]] = self._team.now()
                self._push(shard)

    def _server_order(self) -> list[int]:
        """Returns all shards, from the next server's after this rank on: workers do not all begin with the same."""
        rank, ranks = self._team.rank, self._shards.ranks
        return sorted(range(len(ranks)), key=lambda shard: (ranks[shard] - rank - 1) % self._team.size)

    def _push(self, shard: int) -> None:
        assert self._pushed is not None
        server, t, g = self._shards.ranks[shard], self._pushed[shard], self._shards.of(self._g, shard)
        if server != self._team.rank:
            self._team.send(server, "push", t, g, self._metadata)
            return
        assert self.server is not None
        self.server.push(make_push(server, t, g.clone(), self._metadata))

    # pulling

    def flush(self) -> None:
        """Waits until every server has acknowledged the last push."""
        if self._pushed is not None:
            self.wait([-1] * len(self._shards), len(self._shards), acknowledged=True)

    def wait_for_next_step(self) -> None:
        """Waits until every server is beyond the step of the last push, with or without its gradient."""
        if self._pushed is not None:
            self.wait([t + 1 for t in self._pushed], len(self._shards))

    def wait(self, versions: Sequence[int], num_required: int, acknowledged: bool = False, exact: bool = False) -> None:
        """Waits until enough shards are here.

        Args:
            versions: least version of each shard that counts.
            num_required: number of shards to wait for.
            acknowledged: a shard counts only if its server has acknowledged the last push.
            exact: a shard counts only if the copy here has not been rounded to `launcher.wire`.

        Raises:
            LearnerLost: a server died, and the strategy is not fault tolerant.
        """
        versions = list(versions)
        waiting_for: list[int] = []
        since, deadline = self._team.now(), 0.0
        while True:
            self._shard_arrived.clear()
            missing = [
                shard for shard in range(len(self._shards))
                if self.newest(shard) < versions[shard]
                or (acknowledged and self._acknowledged[shard] < self._push_id)
                or (exact and self._is_rounded(shard, versions))
            ]  # fmt: skip
            if len(self._shards) - len(missing) >= num_required:
                return
            if missing != waiting_for:  # other arrivals do not defer a retry
                waiting_for, deadline = missing, self._team.now() + self._timeout
            self._check_servers(missing)
            left = deadline - self._team.now()
            poll = max(POLL_INTERVAL, (self._team.now() - since) / 4)  # each costs a simulated learner an event
            if left > 0 and not self._restarted and not self._shard_arrived.wait(min(left, poll)):
                continue
            if self._team.now() >= deadline or self._restarted:
                deadline = self._team.now() + self._timeout
                with self._lock:
                    restarted, self._restarted = self._restarted, set()
                if self._pushed is None:
                    # Drained: no worker repeats the updates that a dead server lost, so any version of its replacement
                    # is the valid one.
                    alive = self._team.live_ranks()
                    replaced = [shard for shard in restarted if self._shards.ranks[shard] in alive]
                    for shard in replaced:
                        self._discard(shard)
                        versions[shard] = 0
                    missing = sorted({*missing, *replaced})
                self._retry(missing)

    def wait_extra(self, t: int, seconds: float) -> None:
        """Waits for at most so many seconds until all shards are of version t."""
        end = self._team.now() + seconds
        while (left := end - self._team.now()) > 0:
            self._shard_arrived.clear()
            if all(self.newest(shard) >= t for shard in range(len(self._shards))):
                return
            self._shard_arrived.wait(left)

    def apply_arrived(self, least: int = 0) -> int:
        """Copies the shards that arrived into `params.w`. Returns how many of a version below `least` it dropped."""
        with self._lock:
            arrived, self._arrived = self._arrived, {}
            for shard, (t, w) in arrived.items():
                if t >= least:
                    part = self._shards.of(self._params.w, shard)
                    part.copy_(w[: len(part)])
                    self.versions[shard] = t
        return sum(t < least for t, _ in arrived.values())

    def on_shard(
        self, shard: int, t: int, w: Tensor, acknowledged: PushId, slowest: int, exact: bool = True
    ) -> None:  # fmt: skip
        """Keeps a shard that arrived, unless a newer version is here.

        Args:
            acknowledged: newest push of this worker that the server has applied or dropped.
            slowest: steps of the slowest other worker.
            exact: it was not rounded to `launcher.wire`.
        """
        with self._lock:
            newest = self.newest(shard)
            if t > newest or (t == newest and exact and shard in self._rounded):
                self._arrived[shard] = t, w
                (self._rounded.discard if exact else self._rounded.add)(shard)
            self._known.add(shard)
            # messages may overtake each other
            self._acknowledged[shard] = max(self._acknowledged[shard], acknowledged)
            self._slowest[shard] = slowest
        self._shard_arrived.set()

    def pull(self, shards: Sequence[int]) -> None:
        """Asks the servers of these shards to send them."""
        for shard in shards:
            if self._shards.ranks[shard] != self._team.rank:
                self._team.send(self._shards.ranks[shard], "pull", self._team.incarnation)
            elif self.server is not None:
                with self.server.lock:
                    self.server.on_pull(self._team.rank, self._team.incarnation)

    def _discard(self, shard: int) -> None:
        """Makes any version of a shard count as newer than the copy here."""
        with self._lock:
            self._arrived.pop(shard, None)
            self.versions[shard] = -1

    def _retry(self, missing: Sequence[int]) -> None:
        """Repeats pushes or requests for missing shards."""
        alive = self._team.live_ranks()
        for shard in missing:
            server = self._shards.ranks[shard]
            if server in alive and self._pushed is not None:
                self._push(shard)
            elif server in alive:
                self.pull([shard])

    def _check_servers(self, missing: Sequence[int]) -> None:
        """Ends the run, or the team's present life, if a server that this worker waits for cannot come back."""
        for shard in missing:
            server = self._shards.ranks[shard]
            if self._team.is_gone(server) and self._fault_tolerant:
                self._team.restart_team(f"learner {server}, the server of shard {shard}, is gone for good")
            if not self._fault_tolerant and server not in self._team.live_ranks():
                raise LearnerLost(server, f"died, the server of shard {shard}")

    # draining, and rejoining

    def announce_drained(self, drain_count: int) -> None:
        """Tells all servers that this worker pushes nothing more before the next drain, and its first missing step."""
        self._drain_acked.clear()
        self._drain_announced = drain_count
        for shard in self._server_order():
            self._announce_drained_to(shard, drain_count)
        self._drain_changed.set()

    def _announce_drained_to(self, shard: int, drain_count: int) -> None:
        server, pushed = self._shards.ranks[shard], self._pushed
        t = 0 if pushed is None else pushed[shard] + 1
        if server != self._team.rank:
            self._team.send(server, "away", drain_count, torch.tensor([t], dtype=torch.int32))
        elif self.server is not None:
            self._drain_acked.add(shard)
            self.server.mark_drained(server, t, drain_count)

    def pull_versions(self, versions: Sequence[int]) -> None:
        """Pulls all shards in these versions, when the team is drained and no push waits for an answer.

        They are the servers' to the bit, also where weights are sent in 16 bits: a model is saved and validated.
        """
        self._pushed = self._drain_announced = None
        self._step = 0
        with self._lock:
            for times in self._push_times:
                times.clear()
        versions = list(versions)
        if self.server is not None:  # it may have been restarted since the versions were gathered
            versions[self.server.index] = min(versions[self.server.index], self.server.t)
        self.pull([
            shard for shard in range(len(self._shards))
            if self.newest(shard) < versions[shard] or self._is_rounded(shard, versions)
        ])  # fmt: skip
        self.wait(versions, len(self._shards), exact=True)
        self.apply_arrived()

    def _is_rounded(self, shard: int, versions: Sequence[int]) -> bool:
        """Returns whether the copy of a shard here was rounded on its way, and its server lives (version -1: dead)."""
        return shard in self._rounded and versions[shard] >= 0

    def pull_all(self) -> None:
        """Pulls the shard of every live server, in any version, and continues from the slowest worker's steps."""
        alive = self._team.live_ranks()
        live_shards = [shard for shard, server in enumerate(self._shards.ranks) if server in alive]
        for shard in live_shards:
            self._discard(shard)
        self.pull(live_shards)
        self.wait([0 if shard in live_shards else -1 for shard in range(len(self._shards))], len(self._shards))
        self.apply_arrived()
        self._step = max(self._slowest)

    # tasks

    def _receive(self) -> None:
        while True:
            message = self._team.recv("weights")
            if message is not None:
                shard = self._shards.ranks.index(message.source)
                self._record_latency(shard, message.clock)
                w, answer = message.tensors[0], read_answer(message.tensors[1])
                exact = w.dtype == torch.int32 or not self._rounds
                self.on_shard(shard, message.clock, w.view(torch.float32), *answer, exact=exact)

    def _record_latency(self, shard: int, t: int) -> None:
        """Records the latency of a pull. Version t answers the newest push below t, and supersedes earlier ones."""
        with self._lock:
            answered = {step: self._push_times[shard].pop(step) for step in list(self._push_times[shard]) if step < t}
        if answered:
            self._team.comm_stats.pull_latency[f"{self._team.now() - answered[max(answered)]:.2g}"] += 1

    def _serve_snapshots(self) -> None:
        """Sends this worker's newest copy of a shard to its server, which was restarted."""
        while True:
            message = self._team.recv("lost")
            if message is None or message.source not in self._shards.ranks:
                continue
            shard = self._shards.ranks.index(message.source)
            with self._lock:
                t, copy = self._arrived.get(shard) or (
                    self.versions[shard], self._shards.padded(self._params.w, shard)
                )  # fmt: skip
            self._team.send(message.source, "copy", max(t, 0) if shard in self._known else NO_COPY, copy)
            self._drain_acked.discard(shard)
            if (announced := self._drain_announced) is not None:  # which the restarted server does not know
                self._announce_drained_to(shard, announced)
            self._drain_changed.set()
            with self._lock:
                self._restarted.add(shard)
            self._shard_arrived.set()

    def _ack_loop(self) -> None:
        while True:
            message = self._team.recv("heard")
            if message is not None and message.clock == self._drain_announced:
                self._drain_acked.add(self._shards.ranks.index(message.source))

    def _retry_loop(self) -> None:
        """While this worker is drained, repeats the announcement to servers that have not acknowledged it."""
        while True:
            self._drain_changed.wait()
            self._drain_changed.clear()
            while (announced := self._drain_announced) is not None and len(self._drain_acked) < len(self._shards):
                self._team.sleep(self._timeout)
                for shard in set(range(len(self._shards))) - self._drain_acked:
                    if self._drain_announced == announced:
                        self._announce_drained_to(shard, announced)
