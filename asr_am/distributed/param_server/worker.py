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
from asr_am.distributed.param_server.server import Server
from asr_am.distributed.param_server.weight_shards import NOTE, Blocks, Push, write_note
from asr_am.distributed.team import LearnerLost, Team

FOUND_DEAD = 5  # times, until a server is given up


class Worker:
    """versions: t of each block in `params.w`. timeout: seconds after which a worker asks again.

    forgiving: wait for a dead server's replacement; else LearnerLost.
    """

    def __init__(self, team: Team, blocks: Blocks, params: FlatParams, timeout: float, forgiving: bool) -> None:
        self._team, self._blocks, self._params = team, blocks, params
        self._timeout, self._forgiving = timeout, forgiving
        self.server: Server | None = None  # of this rank
        self.versions = [0] * len(blocks)
        self._arrived: dict[int, tuple[int, Tensor]] = {}
        self._answered = team.event()
        self._lock = team.lock()  # of versions, what was asked for and has arrived, and writing to params.w
        self._g = torch.zeros(len(blocks) * blocks.size)
        self._note = torch.zeros(NOTE)
        self._pushed: list[int] | None = None  # t of each block, since the last rest
        self._asked: list[dict[int, float]] = [{} for _ in blocks.ranks]  # others' blocks: when pushed, by t
        self._left: int | None = None  # the rest that this worker is away before
        self._heard: set[int] = set()  # blocks whose servers know
        self._leaving = team.event()
        self._reborn: set[int] = set()  # blocks whose servers were restarted, since this worker asked last
        team.accept("weights", blocks.size)
        team.accept("lost")
        team.accept("heard")

    def start(self) -> None:
        self._team.spawn(self._receive, "worker: weights")
        self._team.spawn(self._lend, "worker: lost")
        self._team.spawn(self._hear, "worker: heard")
        self._team.spawn(self._insist, "worker: away")

    def newest(self, block: int) -> int:
        """t of a block's newest copy here."""
        return max(self.versions[block], self._arrived[block][0] if block in self._arrived else -1)

    # pushing

    def push(self, t: Sequence[int], frames: float, rate: float, batch: int, silent: Sequence[int] = ()) -> None:
        """`params.g`, the gradient of a batch, block by block with timestamps t, but for some."""
        self._g[: len(self._params)].copy_(self._params.g)
        self._note, self._pushed = write_note(frames, rate, batch), list(t)
        for block in self._around():
            if block not in silent:
                if self._blocks.ranks[block] != self._team.rank:
                    with self._lock:
                        self._asked[block][t[block]] = self._team.now()
                self._push(block)

    def _around(self) -> list[int]:
        """All blocks, from that of the next server after this rank to this rank's own: not all begin with the same."""
        rank, ranks = self._team.rank, self._blocks.ranks
        return sorted(range(len(ranks)), key=lambda block: (ranks[block] - rank - 1) % self._team.size)

    def _push(self, block: int) -> None:
        assert self._pushed is not None
        server, t, g = self._blocks.ranks[block], self._pushed[block], self._blocks.of(self._g, block)
        if server != self._team.rank:
            self._team.post(server, "push", t, g, self._note)
            return
        assert self.server is not None
        frames, rate, batch = self._note.view(torch.float64).tolist()
        self.server.push(Push(server, t, g.clone(), frames, rate, int(batch)))

    # pulling

    def settle(self) -> None:
        """Wait until every server has answered what was pushed last."""
        if self._pushed is not None:
            self.wait([t + 1 for t in self._pushed], len(self._blocks))

    def wait(self, wanted: Sequence[int], need: int) -> None:
        """Until `need` blocks are here in the version `wanted` of each, or newer. LearnerLost: a server is gone.

        At rest nobody makes the updates again that a server took along, so its replacement's block is what counts.
        """
        wanted, gone = list(wanted), Counter[int]()
        while True:
            self._answered.clear()
            missing = [block for block in range(len(self._blocks)) if self.newest(block) < wanted[block]]
            if len(self._blocks) - len(missing) >= need:
                return
            if not self._answered.wait(self._timeout) or self._reborn:
                with self._lock:
                    reborn, self._reborn = self._reborn, set()
                if self._pushed is None:
                    alive = self._team.alive()
                    back = [block for block in reborn if self._blocks.ranks[block] in alive]
                    for block in back:
                        self._forget(block)
                        wanted[block] = 0
                    missing = sorted({*missing, *back})
                self._ask_again(missing, gone)

    def linger(self, t: int, seconds: float) -> None:
        """Wait for so many seconds at most until all blocks are of version t."""
        end = self._team.now() + seconds
        while (left := end - self._team.now()) > 0:
            self._answered.clear()
            if all(self.newest(block) >= t for block in range(len(self._blocks))):
                return
            self._answered.wait(left)

    def take(self, least: int = 0) -> int:
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

    def arrive(self, block: int, t: int, w: Tensor) -> None:
        """A block has come: the newest counts."""
        with self._lock:
            if t > self.newest(block):
                self._arrived[block] = t, w
        self._answered.set()

    def ask(self, blocks: Sequence[int]) -> None:
        """Have servers send their blocks."""
        for block in blocks:
            if self._blocks.ranks[block] != self._team.rank:
                self._team.post(self._blocks.ranks[block], "pull", 0)
            elif self.server is not None:
                with self.server.lock:
                    self.server.asked(self._team.rank)

    def _forget(self, block: int) -> None:
        with self._lock:
            self._arrived.pop(block, None)
            self.versions[block] = -1

    def _ask_again(self, missing: Sequence[int], gone: Counter[int]) -> None:
        """gone: how often the server of a block was found dead."""
        alive = self._team.alive()
        for block in missing:
            server = self._blocks.ranks[block]
            gone[block] = 0 if server in alive else gone[block] + 1
            if server in alive and self._pushed is not None:
                self._push(block)
            elif server in alive:
                self.ask([block])
            elif not self._forgiving or gone[block] == FOUND_DEAD:
                raise LearnerLost(server, f"died, the server of block {block}")

    # rest, and joining

    def leave(self, rests: int) -> None:
        """Tell all servers that nothing more comes from here before the next rest, and what did not."""
        self._heard.clear()
        self._left = rests
        for block in self._around():
            self._leave(block, rests)
        self._leaving.set()

    def _leave(self, block: int, rests: int) -> None:
        server, pushed = self._blocks.ranks[block], self._pushed
        t = 0 if pushed is None else pushed[block] + 1
        if server != self._team.rank:
            self._team.post(server, "away", rests, torch.tensor([float(t)]))
        elif self.server is not None:
            self._heard.add(block)
            self.server.go_away(server, t, rests)

    def complete(self, versions: Sequence[int]) -> None:
        """Pull all blocks in these versions, at rest, where nothing that was pushed waits for an answer."""
        self._pushed = self._left = None
        with self._lock:
            for asked in self._asked:
                asked.clear()
        wanted = list(versions)
        if self.server is not None:  # which may have come back since they agreed
            wanted[self.server.index] = min(wanted[self.server.index], self.server.t)
        self.ask([block for block in range(len(self._blocks)) if self.newest(block) < wanted[block]])
        self.wait(wanted, len(self._blocks))
        self.take()

    def refresh(self) -> None:
        """Pull the block of every living server, whatever is here."""
        alive = self._team.alive()
        living = [block for block, server in enumerate(self._blocks.ranks) if server in alive]
        for block in living:
            self._forget(block)
        self.ask(living)
        self.wait([0 if block in living else -1 for block in range(len(self._blocks))], len(self._blocks))
        self.take()

    # tasks

    def _receive(self) -> None:
        while True:
            letter = self._team.collect("weights")
            if letter is not None:
                block = self._blocks.ranks.index(letter.source)
                self._count_delay(block, letter.clock)
                self.arrive(block, letter.clock, letter.tensors[0])

    def _count_delay(self, block: int, t: int) -> None:
        """Version t of a block answers the newest older push; the ones before that are not answered any more."""
        with self._lock:
            pushed = {step: self._asked[block].pop(step) for step in list(self._asked[block]) if step < t}
        if pushed:
            self._team.usage.pull_seconds[f"{self._team.now() - pushed[max(pushed)]:.2g}"] += 1

    def _lend(self) -> None:
        while True:
            letter = self._team.collect("lost")
            if letter is None or letter.source not in self._blocks.ranks:
                continue
            block = self._blocks.ranks.index(letter.source)
            with self._lock:
                t, copy = self._arrived.get(block) or (
                    self.versions[block], self._blocks.padded(self._params.w, block)
                )  # fmt: skip
            self._team.post(letter.source, "copy", max(t, 0), copy)
            self._heard.discard(block)
            self._leaving.set()
            with self._lock:
                self._reborn.add(block)
            self._answered.set()

    def _hear(self) -> None:
        while True:
            letter = self._team.collect("heard")
            if letter is not None and letter.clock == self._left:
                self._heard.add(self._blocks.ranks.index(letter.source))

    def _insist(self) -> None:
        """While this worker is away, tell servers again that do not know."""
        while True:
            self._leaving.wait()
            self._leaving.clear()
            while (left := self._left) is not None and len(self._heard) < len(self._blocks):
                self._team.sleep(self._timeout)
                for block in set(range(len(self._blocks))) - self._heard:
                    if self._left == left:
                        self._leave(block, left)
