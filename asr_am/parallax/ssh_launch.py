"""Starts a program on the machines of a hosts file, over ssh and torchrun.

    python -m asr_am.parallax.ssh_launch hosts.txt train.py --epochs 5

runs `torchrun ... train.py --epochs 5` on every machine, in the current directory, with the listed devices visible. A
line of the file holds the name or address of a machine and the numbers of its devices, one learner for each:

    node1: 0,1,2,3
    node2: 0,1,4,5      # as many as on node1, which is the master of the rendezvous
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asr_am.distributed.runtime.worker_process import ended_by_sigterm, signals_later
from asr_am.errors import InputError

log = logging.getLogger(__name__)

SSH = ("ssh", "-tt", "-o", "BatchMode=yes")  # -tt: the remote program ends with the connection
PORT = 29511
POLL_INTERVAL = 0.2  # seconds


@dataclass(frozen=True)
class Machine:
    """A machine of the hosts file.

    Attributes:
        host: Name or address.
        devices: Numbers of its GPUs. On a machine without GPUs, one number for each learner.
    """

    host: str
    devices: tuple[int, ...]


def read_hosts(path: Path) -> tuple[Machine, ...]:
    """Reads a hosts file. Raises InputError with the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a hosts file ({error})") from None
    machines: list[Machine] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        host, colon, devices = (part.strip() for part in content.rpartition(":")[:3])
        found = [device.strip() for device in devices.split(",")]
        if not colon or not host or any(c.isspace() for c in host) or not all(d.isdecimal() for d in found):
            raise InputError(f"{path}:{number}: {line.strip()!r}: expected a machine and its devices, as node1: 0,1,2")
        if len(set(found)) < len(found) or host in (machine.host for machine in machines):
            raise InputError(f"{path}:{number}: {line.strip()!r}: this machine, or one of its devices, is listed twice")
        machines.append(Machine(host, tuple(map(int, found))))
    if not machines:
        raise InputError(f"{path}: lists no machines; write lines such as node1: 0,1,2")
    if len({len(machine.devices) for machine in machines}) > 1:
        raise InputError(f"{path}: all machines must have equally many devices, as ranks are assigned by machine")
    return tuple(machines)


def node_command(machines: Sequence[Machine], node: int, program: Sequence[str], port: int) -> str:
    """Returns the shell command that runs torchrun on one machine.

    Args:
        machines: All machines. The first one is the master.
        node: Index of the machine.
        program: The program and its arguments.
        port: Port of the master.
    """
    machine = machines[node]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(machines)}", f"--node-rank={node}",
        f"--nproc-per-node={len(machine.devices)}", f"--master-addr={machines[0].host}", f"--master-port={port}",
    ]  # fmt: skip
    visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, machine.devices))}"
    return f"cd {shlex.quote(os.getcwd())} && exec env {visible} {shlex.join([*torchrun, *program])}"


def launch(machines: Sequence[Machine], program: Sequence[str], port: int = PORT, shell: Sequence[str] = SSH) -> None:
    """Runs a program on all machines and waits until it has ended on all.

    Args:
        machines: The machines.
        program: The program and its arguments.
        port: Port of the first machine for the rendezvous.
        shell: Command that runs another on a machine, as `shell host command`.

    Raises:
        InputError: The program failed on a machine, which terminates it on the others, or the shell cannot be run.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for node, machine in enumerate(machines):
            command = [*shell, machine.host, node_command(machines, node, program, port)]
            with signals_later():
                running[machine.host] = subprocess.Popen(command)
        while running:
            for host, process in list(running.items()):
                status = process.poll()
                if status:
                    raise InputError(f"{host}: {' '.join(program)} ended with status {status}; see its messages above")
                if status == 0:
                    del running[host]
            time.sleep(POLL_INTERVAL)
    except OSError as error:
        raise InputError(f"--shell {shlex.join(shell)}: cannot be run ({error})") from None
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", type=Path, help="hosts file")
    parser.add_argument("--port", type=int, default=PORT, help="port of the first machine for the rendezvous")
    parser.add_argument("--shell", default=shlex.join(SSH), help="command that runs another on a machine")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="program and its arguments")
    arguments = parser.parse_args()
    if not arguments.program:
        parser.error("no program given: name one after the hosts file")
    try:
        with ended_by_sigterm():
            launch(read_hosts(arguments.hosts), arguments.program, arguments.port, shlex.split(arguments.shell))
    except InputError as error:
        sys.exit(f"parallax: {error}")


if __name__ == "__main__":
    main()
