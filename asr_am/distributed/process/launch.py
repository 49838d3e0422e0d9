"""Start a team of real processes on this host, and stay until it has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asr_am.distributed.cluster import Faults
from asr_am.distributed.process.agent import Agent
from asr_am.distributed.process.ending import ended_by_sigterm
from asr_am.distributed.process.key import choose_key, is_loopback
from asr_am.distributed.process.plan import Plan
from asr_am.distributed.process.sockets import split_address
from asr_am.distributed.process.supervisor import Supervisor


def launch(
    command: Sequence[str], learners: int, *, in_step: bool, nodes: int = 1, node_rank: int = 0,
    address: str | None = None, restart_after: float = 1.0, max_restarts: int = 3, timeout: float = 60.0,
    key_file: str | None = None, encrypt: bool | None = None, faults: Faults | None = None,
    env: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Run `learners` processes of `command` on this host, each of which calls `team.connect`, until all have ended.

    in_step: the first that dies ends the run: LearnerLost. Otherwise the others go on, and it is started again after
    `restart_after` seconds, at most `max_restarts` times; LearnerLost when nobody is left. InputError where a learner
    gives up (exit status 1, after its own message), and for hosts that do not come within `timeout` seconds.

    nodes, node_rank, address: the same call on several hosts, with host:port of the one that has node_rank 0.
    key_file: a secret that all hosts have (see key.py), for mail and supervision, not torch's collectives. encrypt:
    None where anything leaves this machine; then, as with True, several hosts need a key file. faults: says when
    injected crashes are followed by a restart.
    """
    loopback = address is None or is_loopback(split_address(address, "address")[0])
    key = choose_key(key_file, encrypt, loopback=loopback, one_start=nodes == 1)
    plan = Plan(
        command, learners, in_step, nodes, node_rank, address, restart_after, max_restarts, timeout,
        key, faults or Faults(), env or {},
    )  # fmt: skip
    with ended_by_sigterm():
        if node_rank == 0:
            Supervisor(plan).run()
        else:
            Agent(plan).run()
