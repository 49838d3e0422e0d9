"""Learners in step: collectives of torch.distributed (NCCL between GPUs, gloo between CPUs).

What measuring and validating need (`gather`, `average`) goes over a gloo group of its own. gloo's waits cannot be
interrupted, so this waits for the futures of its work instead, together with the mail's news of a lost learner.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from asr_am.distributed.leases import LearnerLost, Leases, Rounds, Segment
from asr_am.distributed.process.group import GangGroup
from asr_am.distributed.process.roster import Roster
from asr_am.distributed.process.sockets import PATIENCE, interface_of
from asr_am.distributed.process.waiting import Waiting
from asr_am.distributed.team import Alone, Group, Usage, group_of
from asr_am.errors import InputError

LONG = timedelta(days=7)  # validation may be long; the dead are found by the mail
CLOSING = 5.0  # seconds


class Gang:
    """The team's collectives and control plane. address: of this host; all learners make this at the same time."""

    def __init__(self, store: dist.Store, roster: Roster, waiting: Waiting, usage: Usage, address: str) -> None:
        self._roster, self._waiting, self._usage = roster, waiting, usage
        name = interface_of(address)
        if name is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=roster.rank, world_size=roster.size, timeout=LONG)
        self._control = dist.new_group(backend="gloo", timeout=LONG)
        assert dist.group.WORLD is not None
        self._groups = [dist.group.WORLD, self._control]
        self.everybody: Group = GangGroup(dist.group.WORLD, range(roster.size), roster.rank, usage, self.complete)

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        """torch.distributed has all make all of them, in one order."""
        rank = self._roster.rank
        own = group_of(rank, self._roster.size, groups)
        for ranks in groups:
            if len(ranks) == 1:
                continue
            made = dist.new_group(list(ranks), timeout=LONG)
            if rank in ranks:
                self._groups.append(made)
        if own is None:
            return None
        if len(own) == 1:
            return Alone()
        return GangGroup(self._groups[-1], own, own.index(rank), self._usage, self.complete)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """Ragged: first the lengths, then rows of the greatest length."""
        own = values.detach().to("cpu", torch.float64).reshape(-1)
        lengths = [int(length) for length in self._all_gather(torch.tensor([len(own)], dtype=torch.float64))]
        row = torch.zeros(max(1, *lengths), dtype=torch.float64)
        row[: len(own)] = own
        rows = self._all_gather(row)
        return {rank: rows[rank][:length] for rank, length in enumerate(lengths)}

    def average(self, x: Tensor) -> Tensor:
        mean = x.detach().to("cpu", torch.float32, copy=True)
        self.complete(dist.all_reduce(mean, group=self._control, async_op=True))
        return mean.div_(self._roster.size).to(x.device, x.dtype)

    def leases(self, segment: Segment, in_step: bool) -> Leases:
        if not in_step:
            raise RuntimeError("a gang takes batches in step; start the others with a supervisor")
        return Rounds(segment, self._roster.rank, self._roster.size, self.gather)

    def complete(self, work: dist.Work) -> None:
        """Until a collective on the CPU is complete; LearnerLost where it never will be."""
        done = threading.Event()

        def tell(_: object) -> None:
            with self._waiting.change():
                done.set()

        work.get_future().add_done_callback(tell)
        self._waiting.wait_for(lambda: done.is_set() or bool(self._roster.left))
        try:
            if not done.is_set() and not self._waiting.wait_for(done.is_set, CLOSING):
                raise RuntimeError("it is not complete")
            work.wait()
        except RuntimeError as error:
            raise self.explain(error) from error

    def explain(self, error: RuntimeError) -> Exception:
        """Why a collective failed: wait for the mail to find out who is gone."""
        self._waiting.wait_for(lambda: bool(self._roster.left), 1.5 * PATIENCE)  # raises LearnerLost
        if self._roster.left:
            return LearnerLost(self._roster.left[0], "has ended while the others went on")
        return InputError(f"a collective failed, although all learners live: {str(error).partition(chr(10))[0]}")

    def close(self) -> None:
        """Without waiting for collectives that cannot be completed any more."""
        end = dist.destroy_process_group if self._waiting.failure is None else self._abort
        thread = threading.Thread(target=end, name="close", daemon=True)
        thread.start()
        thread.join(CLOSING)

    def lose(self) -> None:
        """A learner is gone: end the collectives between GPUs, which this process would wait for in CUDA for ever."""
        if torch.cuda.is_available():
            threading.Thread(target=self._abort, name="abort", daemon=True).start()

    def _abort(self) -> None:
        for group in self._groups:
            group.abort()

    def _all_gather(self, row: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(row) for _ in range(self._roster.size)]
        self.complete(dist.all_gather(rows, row, group=self._control, async_op=True))
        return rows
