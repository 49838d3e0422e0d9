"""Become a member of the team that this process' environment tells of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from asr_am.distributed.cluster_config import Faults, Workload
from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.runtime.control_client import RELIABLE, ControlLine, Supervised
from asr_am.distributed.runtime.event_loop import Reactor, Waiting
from asr_am.distributed.runtime.fault_injection import Fates, Pace, arm_crash
from asr_am.distributed.runtime.membership import Roster
from asr_am.distributed.runtime.messaging import PostOffice
from asr_am.distributed.runtime.security import address_towards, choose_key, is_loopback, split_address
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.runtime.wire import Header, Kind
from asr_am.distributed.runtime.worker_process import Environment, die_with
from asr_am.distributed.team import Usage
from asr_am.errors import InputError


def connect(
    faults: Faults | None = None, workload: Workload | None = None, *, device: str = "cpu", timeout: float = 60.0,
    key_file: str | None = None, encrypt: bool | None = None,
) -> ProcessTeam:  # fmt: skip
    """This process' end of its team: a gang of torch.distributed, or supervised, as the environment says.

    faults: to be injected here. workload: computing time to be emulated, with the figures of `device`.
    key_file, encrypt: as of `launch`, for learners that it has not started. InputError where the others cannot be
    reached within `timeout` seconds, or were started with something else.
    """
    who = Environment.read()
    faults = faults or Faults()
    faults.check(who.size)
    if torch.cuda.is_available():
        torch.cuda.set_device(who.local_rank % torch.cuda.device_count())
    usage = Usage()
    pace = Pace(faults, workload, device, who.rank, usage)
    if who.launcher is not None:
        die_with(who.launcher)
    elif who.key is None and who.master is not None:
        loopback = is_loopback(who.master[0])
        who = replace(who, key=choose_key(key_file, encrypt, loopback=loopback, one_start=who.size == 1))
    build = _connect_gang if who.supervisor is None else _connect_supervised
    team = build(who, faults, usage, pace, timeout)
    arm_crash(faults, who.rank, who.incarnation, usage)
    return team


def _connect_gang(who: Environment, faults: Faults, usage: Usage, pace: Pace, timeout: float) -> ProcessTeam:
    from asr_am.distributed.runtime.rendezvous import Rendezvous
    from asr_am.distributed.runtime.torch_group import Gang

    assert who.master is not None
    meeting = Rendezvous(who, timeout)
    host = address_towards(*who.master)
    me = Header(Kind.HELLO, meeting.agree_on_run(), who.rank, 0)
    waiting, roster = Waiting(usage), Roster(who.rank, who.size)
    reactor = Reactor(waiting)
    gang: Gang | None = None

    def on_loss(rank: int, reason: str) -> None:
        waiting.fail(LearnerLost(rank, reason))
        if gang is not None:
            gang.lose()

    fates = Fates(faults, who.rank, 0)
    office = PostOffice(reactor, me, host, roster, waiting, usage, fates, who.key, on_loss=on_loss)
    try:
        addresses = meeting.exchange(office.address)
        roster.fill({rank: (0, address) for rank, address in addresses.items()})
        office.connect_all()
        reactor.start()
        if not waiting.wait_for(lambda: not office.broken, timeout):
            rank = min(office.broken)
            raise InputError(f"no connection to the mail of learner {rank} at {addresses[rank]} in {timeout:g} s")
        gang = meeting.within(partial(Gang, meeting.store, roster, waiting, usage, host), "torch.distributed")
    except BaseException:
        reactor.stop()
        raise
    return ProcessTeam(0, who.hosts, usage, roster, waiting, reactor, office, gang, pace)


def _connect_supervised(who: Environment, faults: Faults, usage: Usage, pace: Pace, timeout: float) -> ProcessTeam:
    assert who.supervisor is not None and who.run is not None
    host = address_towards(*split_address(who.supervisor.removeprefix("tcp://"), "ASR_AM_SUPERVISOR"))
    me = Header(Kind.HELLO, bytes.fromhex(who.run), who.rank, who.incarnation)
    waiting, roster = Waiting(usage), Roster(who.rank, who.size)
    reactor = Reactor(waiting)
    fates = Fates(faults, who.rank, who.incarnation)
    office = PostOffice(reactor, me, host, roster, waiting, usage, fates, who.key, reliable=RELIABLE)
    greeted = False

    def on_news(message: dict[str, Any]) -> None:
        nonlocal greeted
        if message["news"] == "peers":
            with waiting.change():
                roster.fill({int(rank): (entry[0], entry[1]) for rank, entry in message["peers"].items()})
                greeted = True
        elif message["news"] == "born":
            office.born(message["rank"], message["incarnation"], message["address"])
        elif message["news"] == "died":
            office.died(message["rank"], message["incarnation"])

    line = ControlLine(reactor, who.supervisor, waiting, who.key, on_news)
    reactor.start()
    try:
        line.tell("hello", run=who.run, rank=who.rank, incarnation=who.incarnation, address=office.address)
        if not waiting.wait_for(lambda: greeted, timeout):
            raise InputError(
                f"within {timeout:g} s, the supervisor at {who.supervisor} has not answered, or not all learners came"
            )
    except BaseException:
        reactor.stop()
        raise
    together = Supervised(line, office, who.rank, who.incarnation)
    return ProcessTeam(who.incarnation, who.hosts, usage, roster, waiting, reactor, office, together, pace)
