"""Start a team of real processes on this host, and stay until it has finished."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import zmq

from asr_am.distributed.cluster import Faults
from asr_am.distributed.process.agent import Agent
from asr_am.distributed.process.plan import Plan
from asr_am.distributed.process.sockets import KEY_REMEDY, check_key
from asr_am.distributed.process.supervisor import Supervisor
from asr_am.errors import InputError


def launch(
    command: Sequence[str], learners: int, *, in_step: bool, nodes: int = 1, node_rank: int = 0,
    address: str | None = None, restart_after: float = 1.0, max_restarts: int = 3, timeout: float = 60.0,
    encrypt: bool = False, faults: Faults | None = None, env: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Run `learners` processes of `command` on this host, each of which calls `team.connect`, until all have ended.

    in_step: the first that dies ends the run: LearnerLost. Otherwise the others go on, and it is started again after
    `restart_after` seconds, at most `max_restarts` times; LearnerLost when nobody is left. InputError where a learner
    gives up (exit status 1, after its own message), and for hosts that do not come within `timeout` seconds.

    nodes, node_rank, address: the same call on several hosts, with host:port of the one that has node_rank 0. encrypt:
    mail and supervision, not torch's collectives; on several hosts, with the key that all find in ASR_AM_KEY. faults:
    says when injected crashes are followed by a restart.
    """
    plan = Plan(
        command, learners, in_step, nodes, node_rank, address, restart_after, max_restarts, timeout,
        _key(nodes) if encrypt else None, faults or Faults(), env or {},
    )  # fmt: skip
    with _ended_by_sigterm():
        if node_rank == 0:
            Supervisor(plan).run()
        else:
            Agent(plan).run()


def _key(nodes: int) -> str:
    key = check_key(os.environ.get("ASR_AM_KEY"))
    if key is None and nodes > 1:
        raise InputError(f"encrypt on several hosts needs ASR_AM_KEY in the environment, the same on all; {KEY_REMEDY}")
    return key or zmq.curve_keypair()[1].decode()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the learners are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
