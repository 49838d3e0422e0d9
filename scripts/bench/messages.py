"""Compares messages between two processes on this machine with a plain ZeroMQ pair and torch.distributed's gloo.

    python scripts/bench/messages.py [--megabytes 165] [--rounds 7]

In each round, each of the three in turn carries a message from one learner to the other and a short answer back. Our
messages include the sender's snapshot and the receiver's assembly of the tensor. Prints GB/s, medians over the rounds.
The last line is the ratio of our messages to the other two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.team import ProcessTeam

WARM_UP = 2  # rounds

Exchange = Callable[[int], None]  # of round n, at both learners


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=165.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--encrypt", action="store_true", help="encrypt our messages, not the others")
    parser.add_argument("--learner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        learner(int(options.megabytes * 1e6 / 4), options.rounds)
    else:
        launch([sys.executable, *sys.argv, "--learner"], 2, synchronous=True, encrypt=options.encrypt)


def learner(elements: int, rounds: int) -> None:
    torch.set_num_threads(1)
    team = connect()
    x = torch.full((elements,), float(team.rank))
    ways = {"messages": messages(team, x), "ZeroMQ pair": plain_pair(team, x), "gloo": gloo(team, x)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(WARM_UP + rounds):
        for name, exchange in ways.items():
            team.gather(torch.zeros(0))
            begin = time.perf_counter()
            exchange(n)
            seconds[name].append(time.perf_counter() - begin)
    if team.rank == 0:
        rates = {name: 4e-9 * elements / statistics.median(values[WARM_UP:]) for name, values in seconds.items()}
        for name, values in seconds.items():
            print(f"{name:12} {rates[name]:5.2f} GB/s   ms: {' '.join(f'{1000 * s:.0f}' for s in values[WARM_UP:])}")
        pair, other = rates["messages"] / rates["ZeroMQ pair"], rates["messages"] / rates["gloo"]
        print(f"messages: {pair:.2f} of a plain ZeroMQ pair, {other:.2f} of gloo", flush=True)
    team.close()


def messages(team: ProcessTeam, x: Tensor) -> Exchange:
    team.register_tag("weights", len(x))
    team.register_tag("answer")

    def exchange(n: int) -> None:
        if team.rank == 0:
            team.send(1, "weights", n, x)
            assert team.recv("answer", 1) is not None
        else:
            message = team.recv("weights", 0)
            assert message is not None and message.tensors[0][-1] == 0
            team.send(0, "answer", n)

    return exchange


def plain_pair(team: ProcessTeam, x: Tensor) -> Exchange:
    """Sends without copies at both ends, the upper limit of ZeroMQ."""
    pair = zmq.Context.instance().socket(zmq.PAIR)
    port = pair.bind_to_random_port("tcp://127.0.0.1") if team.rank == 1 else 0
    port = int(team.gather(torch.tensor([float(port)]))[1])
    if team.rank == 0:
        pair.connect(f"tcp://127.0.0.1:{port}")

    def exchange(n: int) -> None:
        if team.rank == 0:
            pair.send(x.numpy(), copy=False)
            pair.recv()
        else:
            received = torch.frombuffer(pair.recv(copy=False).buffer, dtype=torch.float32)
            assert received[-1] == 0
            pair.send(b"")

    return exchange


def gloo(team: ProcessTeam, x: Tensor) -> Exchange:
    received, answer = torch.empty_like(x), torch.zeros(1)

    def exchange(n: int) -> None:
        if team.rank == 0:
            dist.send(x, 1)
            dist.recv(answer, 1)
        else:
            dist.recv(received, 0)
            assert received[-1] == 0
            dist.send(answer, 0)

    return exchange


if __name__ == "__main__":
    main()
