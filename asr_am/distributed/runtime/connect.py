"""`connect`: joins the team that the environment variables of this process describe."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asr_am import disk
from asr_am.distributed.cluster_config import Faults, Workload
from asr_am.distributed.coordinated_backend import RELIABLE, CoordinatedBackend
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.membership import Membership, apply_event
from asr_am.distributed.runtime.control_client import ControlClient
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.fault_injection import ComputeEmulator, MessageFaults, arm_crash
from asr_am.distributed.runtime.gpu_placement import collectives_by, gpu_name, place
from asr_am.distributed.runtime.messaging import Transport
from asr_am.distributed.runtime.private_dir import check_private_dir
from asr_am.distributed.runtime.security import address_towards, choose_key, split_address
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.runtime.wire import Kind, WireHeader
from asr_am.distributed.runtime.worker_process import LOCALHOST, WorkerEnv, set_parent_death_signal
from asr_am.distributed.team import CommStats
from asr_am.distributed.wire_dtype import WIRE_DTYPES
from asr_am.errors import InputError


def connect(
    faults: Faults | None = None, workload: Workload | None = None, *, device: str = "cpu", timeout: float = 60.0,
    key_file: str | None = None, encrypt: bool | None = None, wire: WireDtype = "float32",
) -> ProcessTeam:  # fmt: skip
    """Connects this process to its team. The environment selects torch.distributed or the supervisor.

    Args:
        workload: model whose computing time is emulated.
        device: device whose figures of the workload are used.
        timeout: seconds in which all learners must connect.
        key_file: file with the run's secret. For learners that `launch` has not started.
        encrypt: as for `launch`. For learners that `launch` has not started.
        wire: type in which weights and gradients travel, the same at all learners.

    Raises:
        InputError: the others cannot be reached in time, or were started with different values.
    """
    env = WorkerEnv.read()
    faults = faults or Faults()
    faults.check(env.size)
    if torch.cuda.is_available():
        torch.cuda.set_device(place(env.local_rank, torch.cuda.device_count(), share=True))  # the trainer may refuse
    comm_stats = CommStats()
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    compute_emulator = ComputeEmulator(faults, workload, device, env.rank, comm_stats, synchronize)
    if env.launcher is not None:
        set_parent_death_signal(env.launcher)
    elif env.key is None and env.master is not None:
        env = replace(env, key=choose_key(key_file, encrypt, private=env.one_host, one_start=env.size == 1))
    build = _connect_torch if env.supervisor is None else _connect_coordinated
    team = build(env, faults, comm_stats, compute_emulator, timeout, WIRE_DTYPES[wire])
    if team.rejoins or env.incarnation == 0:  # else this learner was restarted with its team
        arm_crash(faults, env.rank, env.incarnation, comm_stats)
    return team


def _connect_torch(
    env: WorkerEnv, faults: Faults, comm_stats: CommStats, compute_emulator: ComputeEmulator, timeout: float,
    wire: torch.dtype,
) -> ProcessTeam:  # fmt: skip
    from asr_am.distributed.runtime.rendezvous import Rendezvous
    from asr_am.distributed.runtime.torch_group import TorchBackend

    rendezvous = Rendezvous(env, timeout)
    host = LOCALHOST if env.master is None or env.one_host else address_towards(*env.master)
    hello = WireHeader(Kind.HELLO, rendezvous.agree_on_run(), env.rank, env.incarnation)
    wait_monitor, membership = WaitMonitor(comm_stats), Membership(env.rank, env.size)
    event_loop = EventLoop(wait_monitor)
    backend: TorchBackend | None = None

    def on_loss(rank: int, reason: str) -> None:
        wait_monitor.fail(LearnerLost(rank, reason))
        if backend is not None:
            backend.lose()

    message_faults = MessageFaults(faults, env.rank, env.incarnation)
    transport = Transport(
        event_loop, hello, _listen(rendezvous.private_dir, host, hello), membership, wait_monitor, comm_stats,
        message_faults, env.key, neighbours=env.neighbours, on_loss=on_loss, wire=wire,
    )  # fmt: skip
    if rendezvous.made_dir is not None:
        event_loop.at_stop(partial(disk.remove, rendezvous.made_dir))
    try:
        peers = rendezvous.exchange(transport.address, gpu_name())
        addresses = {rank: peer.address for rank, peer in peers.items()}
        membership.fill({rank: (env.incarnation, address) for rank, address in addresses.items()})
        transport.connect_all()
        event_loop.start()
        if not wait_monitor.wait_for(lambda: not transport.broken, timeout):
            rank = min(transport.broken)
            raise InputError(
                f"no connection to learner {rank} at {addresses[rank]} within {timeout:g} s: check that its process "
                "runs and no firewall blocks that port"
            )
        backend = rendezvous.within(
            partial(
                TorchBackend, rendezvous.store, membership, wait_monitor, comm_stats, host,
                collectives_by(peer.gpu for peer in peers.values()), env.launcher is not None, wire,
            ), "torch.distributed",
        )  # fmt: skip
    except BaseException:
        event_loop.stop()
        raise
    return ProcessTeam(
        hello.run.hex(), env.incarnation, env.hosts, comm_stats, membership, wait_monitor, event_loop, transport,
        backend, compute_emulator, wire, env.restarts + env.incarnation,
    )  # fmt: skip


def _connect_coordinated(
    env: WorkerEnv, faults: Faults, comm_stats: CommStats, compute_emulator: ComputeEmulator, timeout: float,
    wire: torch.dtype,
) -> ProcessTeam:  # fmt: skip
    assert env.supervisor is not None and env.run is not None
    host = LOCALHOST
    if env.private_dir is None:
        host = address_towards(*split_address(env.supervisor.removeprefix("tcp://"), "ASR_AM_SUPERVISOR"))
    else:
        check_private_dir(env.private_dir)
    hello = WireHeader(Kind.HELLO, bytes.fromhex(env.run), env.rank, env.incarnation)
    wait_monitor, membership = WaitMonitor(comm_stats), Membership(env.rank, env.size)
    event_loop = EventLoop(wait_monitor)
    message_faults = MessageFaults(faults, env.rank, env.incarnation)
    transport = Transport(
        event_loop, hello, _listen(env.private_dir, host, hello), membership, wait_monitor, comm_stats, message_faults,
        env.key, reliable=RELIABLE, neighbours=env.neighbours, wire=wire,
    )  # fmt: skip

    def on_event(event: dict[str, Any]) -> None:
        with wait_monitor.change():
            apply_event(membership, event, transport)

    control = ControlClient(event_loop, env.supervisor, wait_monitor, env.key, on_event)
    event_loop.start()
    try:
        control.notify("hello", run=env.run, rank=env.rank, incarnation=env.incarnation, address=transport.address)
        control.start_heartbeats()
        if not wait_monitor.wait_for(lambda: membership.complete, timeout):
            raise InputError(
                f"within {timeout:g} s the supervisor at {env.supervisor} has not answered, or not all learners have "
                "connected: see the messages of the others"
            )
    except BaseException:
        event_loop.stop()
        raise
    backend = CoordinatedBackend(control, transport, env.rank, env.incarnation)
    return ProcessTeam(
        env.run, env.incarnation, env.hosts, comm_stats, membership, wait_monitor, event_loop, transport, backend,
        compute_emulator, wire,
    )  # fmt: skip


def _listen(private_dir: Path | None, host: str, hello: WireHeader) -> str:
    """Returns where the transport of a learner listens. Each incarnation has a socket of its own."""
    return f"ipc://{private_dir}/learner-{hello.source}-{hello.incarnation}" if private_dir else f"tcp://{host}"
