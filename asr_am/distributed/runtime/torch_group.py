"""Backend of synchronous learners: collectives of torch.distributed (NCCL between GPUs, gloo between CPUs).

Where learners share a GPU, gloo carries its tensors, too, as copies on the CPU.

The control plane (`gather`, `average`) uses a gloo group of its own. gloo's waits cannot be interrupted, so the
training task waits for the futures of gloo's work and for the transport's notice of a lost learner at the same time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from asr_am.distributed.launch_spec import EXIT_LOST, HEARTBEAT_TIMEOUT
from asr_am.distributed.leases import LearnerLost, Leases, RoundRobinLeases, Segment
from asr_am.distributed.membership import Membership
from asr_am.distributed.runtime.event_loop import WaitMonitor
from asr_am.distributed.runtime.loopback_peers import only_own_peers
from asr_am.distributed.runtime.security import interface_of, is_loopback
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.distributed.team import CommStats, Group, SingleProcess, Work, find_group
from asr_am.distributed.wire_dtype import mean_in_order, rounded, travels_as
from asr_am.errors import ConnectionLost, InputError

log = logging.getLogger(__name__)
Complete = Callable[[dist.Work, Tensor], None]
"""Waits for a collective of a tensor. Raises LearnerLost if it cannot complete any more."""


class TorchGroup:
    """The `Group` of this process in one torch process group.

    Args:
        ranks: ranks of its members in the team.
        rank: rank of this process in the group.
        through_cpu: send copies on the CPU.
        wire: type in which float32 tensors are sent.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, comm_stats: CommStats, complete: Complete,
        through_cpu: bool = False, wire: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, len(ranks)
        self._group, self._ranks, self._comm_stats, self._complete = group, ranks, comm_stats, complete
        self._through_cpu, self._wire = through_cpu, wire

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> Work:
        self._count(self.rank + 1, round(2 * (self.size - 1) / self.size * len(x) * self._wire.itemsize))
        if self._wire != torch.float32:
            return self._start_rounded_mean(x)
        sent = self._sendable(x)
        averages = sent.is_cuda  # NCCL does, gloo does not
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        work = dist.all_reduce(sent, op, group=self._group, async_op=True)
        return MeanWork(PendingWork(work, sent, self._complete), sent, x, 1 if averages else self.size)

    def _start_rounded_mean(self, x: Tensor) -> RoundedMeanWork:
        """Each member sends a part of `x` to each other, and later the mean of its own part (`RoundedMeanWork`)."""
        length = -(-len(x) // self.size)
        sent = x.new_zeros(self.size * length, dtype=self._wire, device="cpu" if self._through_cpu else x.device)
        sent[: len(x)] = x
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        return RoundedMeanWork(PendingWork(work, sent, self._complete), received.view(self.size, -1), x, self._gather)

    def _gather(self, part: Tensor, parts: Tensor) -> None:
        """Gathers `part` [n] of each member into `parts` [size * n]."""
        work = dist.all_gather_into_tensor(parts, part, group=self._group, async_op=True)
        PendingWork(work, part, self._complete).wait()

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> GatherWork:
        """Gathers ragged tensors by all-to-all, so that no padding is sent."""
        sizes = [len(x)] * self.size if lengths is None else list(lengths)
        sent = self._sendable(x).repeat(self.size)
        received = sent.new_empty(sum(sizes))
        for other in range(1, self.size):
            self._count(self.rank + other, sent.nbytes // self.size)
        work = dist.all_to_all_single(received, sent, sizes, [len(x)] * self.size, group=self._group, async_op=True)
        return GatherWork(PendingWork(work, sent, self._complete), received, x.device, sizes)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        if (self.rank + 1) % self.size != source:
            self._count(self.rank + 1, len(x) * travels_as(x, self._wire).itemsize)
        sent = self._sendable(x)
        work = dist.broadcast(sent, self._ranks[source], group=self._group, async_op=True)
        PendingWork(work, sent, self._complete).wait()
        if sent is not x:
            x.copy_(sent)

    def _sendable(self, x: Tensor) -> Tensor:
        """Returns `x` in the type and on the device of sending, `x` itself if it has them."""
        x = x.to(travels_as(x, self._wire))
        return x.to("cpu", copy=True) if self._through_cpu else x

    def _count(self, to: int, count: int) -> None:
        """Counts bytes that this member sends to another."""
        if self.size > 1:
            self._comm_stats.bytes_sent[self._ranks[to % self.size]] += count


class PendingWork:
    """A collective in progress, which still reads or writes `x`."""

    def __init__(self, work: dist.Work, x: Tensor, complete: Complete) -> None:
        self._work, self._x, self._complete = work, x, complete

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._complete(self._work, self._x)


class MeanWork:
    """An all-reduce in progress, whose result becomes a mean in `x` in `wait`."""

    def __init__(self, sum_work: PendingWork, total: Tensor, x: Tensor, divisor: int) -> None:
        self._sum, self._total, self._x, self._divisor = sum_work, total, x, divisor
        self._complete = False

    def done(self) -> bool:
        return self._complete or self._sum.done()

    def wait(self) -> None:
        if self._complete:
            return
        self._sum.wait()
        if self._divisor > 1:
            self._total.div_(self._divisor)
        if self._total is not self._x:
            self._x.copy_(self._total)
        self._complete = True


class RoundedMeanWork:
    """An all-reduce whose members send a type of 16 bits and add float32.

    This member adds its part of all members' tensors in the order of ranks, and sends the mean to all in `wait`.

    Args:
        received: this member's part of each member's tensor, [members, n].
        x: float32 [N] that becomes the mean.
    """

    def __init__(
        self, exchange: PendingWork, received: Tensor, x: Tensor, gather: Callable[[Tensor, Tensor], None]
    ) -> None:
        self._exchange, self._received, self._x, self._gather = exchange, received, x, gather
        self._complete = False

    def done(self) -> bool:
        """Returns whether the first step is complete. The second is left to `wait`."""
        return self._complete or self._exchange.done()

    def wait(self) -> None:
        if self._complete:
            return
        self._exchange.wait()
        mean = mean_in_order(self._received).to(self._received.dtype)
        parts = mean.new_empty(self._received.numel())
        self._gather(mean, parts)
        self._x.copy_(parts[: len(self._x)])
        self._complete = True


class GatherWork:
    """An all-gather in progress."""

    def __init__(self, work: PendingWork, received: Tensor, device: torch.device, lengths: Sequence[int]) -> None:
        self._work, self._received, self._device, self._lengths = work, received, device, lengths

    def wait(self) -> list[Tensor]:
        self._work.wait()
        received = rounded(self._received.to(self._device), self._received.dtype)
        return list(torch.split(received, list(self._lengths)))


NO_TIMEOUT = timedelta(days=7)  # validation may take long, and the transport detects dead learners
SHORT = 7  # values of a row that are gathered with its length
ABORT_TIMEOUT = 5.0  # seconds for collectives and process groups to end


class TorchBackend:
    """Collectives and control plane by torch.distributed. All learners create it at the same time.

    Args:
        address: IPv4 address of this host, which selects the network interface.
        gpu_collectives: what carries the collectives of tensors on GPUs, see `gpu_placement`.
        supervised: a launcher of this package has started the learners, and starts them again.
        wire: type in which weights and gradients are sent.
    """

    def __init__(
        self, store: dist.Store, membership: Membership, wait_monitor: WaitMonitor, comm_stats: CommStats, address: str,
        gpu_collectives: Literal["nccl", "gloo"], supervised: bool, wire: torch.dtype,
    ) -> None:  # fmt: skip
        self._supervised, self._wire = supervised, wire
        self._store = store  # torch keeps the C++ part only, which cannot sign: `split` needs it
        self._membership, self._wait_monitor, self._comm_stats = membership, wait_monitor, comm_stats
        name = interface_of(address)
        for variable, exactly in (("GLOO_SOCKET_IFNAME", ""), ("NCCL_SOCKET_IFNAME", "=")):  # else a prefix to NCCL
            if name is not None and (is_loopback(address) or variable not in os.environ):
                os.environ[variable] = exactly + name  # on one host nothing listens elsewhere, whatever is set
        self._nccl = gpu_collectives == "nccl"
        self.waits_on_host = not self._nccl
        self._through_cpu = torch.cuda.is_available() and not self._nccl
        # The transport finds lost learners, and `lose` ends their collectives. NCCL would end the process instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        backend = "cpu:gloo,cuda:nccl" if self._nccl else "gloo"
        try:
            with only_own_peers():
                dist.init_process_group(
                    backend, store=store, rank=membership.rank, world_size=membership.size, timeout=NO_TIMEOUT
                )
                self._control = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        except RuntimeError as error:  # of gloo or of the store
            reason = str(error).partition("\n")[0]
            raise ConnectionLost(
                f"not all learners could connect ({reason}): one may have ended, see the messages of the others"
            ) from error
        assert dist.group.WORLD is not None
        self._groups = [dist.group.WORLD, self._control]
        self.world: Group = TorchGroup(
            dist.group.WORLD, range(membership.size), membership.rank, comm_stats, self.complete, self._through_cpu,
            wire,
        )  # fmt: skip

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        """Creates all groups: torch.distributed needs all processes to create all groups in the same order."""
        rank = self._membership.rank
        members = find_group(rank, self._membership.size, groups)
        for ranks in groups:
            if len(ranks) == 1:
                continue
            with only_own_peers():
                group = dist.new_group(list(ranks), timeout=NO_TIMEOUT)
            if rank in ranks:
                self._groups.append(group)
        if members is None:
            return None
        if len(members) == 1:
            return SingleProcess()
        return TorchGroup(
            self._groups[-1], members, members.index(rank), self._comm_stats, self.complete, self._through_cpu,
            self._wire,
        )  # fmt: skip

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """Gathers ragged rows: first their lengths and, if no row is longer than `SHORT`, their values. Otherwise rows
        padded to the greatest length follow.
        """
        own = values.detach().to("cpu", torch.float64).reshape(-1)
        first = torch.zeros(1 + SHORT, dtype=torch.float64)
        first[0] = len(own)
        first[1 : 1 + len(own)] = own[:SHORT]
        received = self._all_gather(first)
        lengths = [int(row[0]) for row in received]
        rows = [row[1:] for row in received]
        if (longest := max(lengths)) > SHORT:
            padded = torch.zeros(longest, dtype=torch.float64)
            padded[: len(own)] = own
            rows = self._all_gather(padded)
        return {rank: row[:length] for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))}

    def average(self, x: Tensor) -> Tensor:
        mean = x.detach().to("cpu", torch.float32, copy=True)
        self.complete(dist.all_reduce(mean, group=self._control, async_op=True), mean)
        return mean.div_(self._membership.size).to(x.device, x.dtype)

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        if not synchronous:
            raise InputError(
                "the strategy is asynchronous, and a team that torchrun starts serves synchronous ones only; start the "
                "learners by asr_am.api.launch(command, learners, synchronous=False), or recipes with launcher=process"
            )
        return RoundRobinLeases(segment, self._membership.rank, self._membership.size, self.gather)

    def complete(self, work: dist.Work, x: Tensor) -> None:
        """Waits for a collective of `x`. Raises LearnerLost if it cannot complete any more.

        On a GPU the CUDA stream waits, and not this thread. It may then go on with half a sum if a learner is lost.
        The failure is set before the collectives are aborted, so what follows from such a sum is never saved: each
        checkpoint needs a gather after the weights were read, and that raises the failure.
        """
        if x.is_cuda:
            work.wait()
            self._wait_monitor.check()
            return
        done = threading.Event()

        def on_done(_: object) -> None:
            with self._wait_monitor.change():
                done.set()

        work.get_future().add_done_callback(on_done)
        self._wait_monitor.wait_for(lambda: done.is_set() or bool(self._membership.left))
        try:
            if not done.is_set() and not self._wait_monitor.wait_for(done.is_set, ABORT_TIMEOUT):
                raise RuntimeError("the collective is not complete")
            work.wait()
        except RuntimeError as error:
            raise self.explain(error) from error

    def explain(self, error: RuntimeError) -> Exception:
        """Returns why a collective failed. Waits until the transport has found out which learner is lost."""
        self._wait_monitor.wait_for(lambda: bool(self._membership.left), 1.5 * HEARTBEAT_TIMEOUT)  # raises LearnerLost
        if self._membership.left:
            return LearnerLost(self._membership.left[0], "has ended while the others went on")
        return InputError(f"a collective failed although all learners are alive: {str(error).partition(chr(10))[0]}")

    def restart_team(self, reason: str, lost: int | None) -> NoReturn:
        if self._supervised:
            log.debug("learner %d: %s", self._membership.rank, reason)  # its launcher says who died
            end_process(EXIT_LOST)
        raise LearnerLost(self._membership.rank, f"cannot go on: {reason}")

    def confirm(self) -> None:
        pass  # without a supervisor the loss of a learner ends the others

    def close(self) -> None:
        """Destroys the process groups, without waiting for collectives that cannot complete any more."""
        end = dist.destroy_process_group if self._wait_monitor.failure is None else self._abort
        thread = threading.Thread(target=end, name="close", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT)

    def lose(self) -> None:
        """Aborts the collectives after a loss. Otherwise CUDA would wait forever for those between GPUs."""
        if self._nccl:
            threading.Thread(target=self._abort, name="abort", daemon=True).start()

    def _abort(self) -> None:
        for group in self._groups:
            group.abort()

    def _all_gather(self, row: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(row) for _ in range(self._membership.size)]
        self.complete(dist.all_gather(rows, row, group=self._control, async_op=True), row)
        return rows
