"""The machines and devices of a run, from a file, and the program started on them over ssh.

    python -m asr_am.parallax.ssh_launch hosts.txt train.py --epochs 5

runs `torchrun ... train.py --epochs 5` on every machine, in the directory where this was started, with its devices
visible. A line of the file is a machine's name or address and the numbers of its devices, one learner for each:

    node1: 0,1,2,3
    node2: 0,1,4,5      # as many on each; the first machine is where the learners find each other
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

from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from asr_am.errors import InputError

log = logging.getLogger(__name__)

SSH = ("ssh", "-tt", "-o", "BatchMode=yes")  # with a terminal, so that what it started ends with it
PORT = 29511
LOOK = 0.2  # seconds between two looks at who has ended


@dataclass(frozen=True)
class Machine:
    """host: name or address. devices: numbers of its GPUs; of its learners, where it has none."""

    host: str
    devices: tuple[int, ...]


def read_resources(path: Path) -> tuple[Machine, ...]:
    """InputError names the line that is wrong."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a file of machines ({error})") from None
    machines: list[Machine] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        host, colon, devices = (part.strip() for part in content.rpartition(":")[:3])
        found = [device.strip() for device in devices.split(",")]
        if not colon or not host or any(c.isspace() for c in host) or not all(d.isdecimal() for d in found):
            raise InputError(f"{path}:{number}: {line.strip()!r}: a line is a machine and its devices, as node1: 0,1,2")
        if len(set(found)) < len(found) or host in (machine.host for machine in machines):
            raise InputError(f"{path}:{number}: {line.strip()!r}: this machine, or a device of it, comes twice")
        machines.append(Machine(host, tuple(map(int, found))))
    if not machines:
        raise InputError(f"{path}: there is no machine in it; a line is as node1: 0,1,2")
    if len({len(machine.devices) for machine in machines}) > 1:
        raise InputError(f"{path}: all machines must have as many devices; a learner finds its machine by its rank")
    return tuple(machines)


def command_of(machines: Sequence[Machine], node: int, program: Sequence[str], port: int) -> str:
    """What a machine's shell is to run."""
    machine = machines[node]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(machines)}", f"--node-rank={node}",
        f"--nproc-per-node={len(machine.devices)}", f"--master-addr={machines[0].host}", f"--master-port={port}",
    ]  # fmt: skip
    visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, machine.devices))}"
    return f"cd {shlex.quote(os.getcwd())} && exec env {visible} {shlex.join([*torchrun, *program])}"


def launch(machines: Sequence[Machine], program: Sequence[str], port: int = PORT, shell: Sequence[str] = SSH) -> None:
    """Run the program on all machines until it has ended. shell: runs `shell host command` on a machine.

    InputError where it ends with an error on one; the others are ended, too.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for node, machine in enumerate(machines):
            command = [*shell, machine.host, command_of(machines, node, program, port)]
            running[machine.host] = subprocess.Popen(command)
        while running:
            for host, process in list(running.items()):
                status = process.poll()
                if status:
                    raise InputError(f"{host}: {' '.join(program)} ended with status {status}; its messages are above")
                if status == 0:
                    del running[host]
            time.sleep(LOOK)
    except OSError as error:
        raise InputError(f"--shell {shlex.join(shell)}: cannot be run ({error})") from None
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("resources", type=Path)
    parser.add_argument("--port", type=int, default=PORT, help="of the first machine, where learners find each other")
    parser.add_argument("--shell", default=shlex.join(SSH), help="runs a command on a machine")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="and its arguments")
    arguments = parser.parse_args()
    if not arguments.program:
        parser.error("say which program to run")
    try:
        with ended_by_sigterm():
            launch(read_resources(arguments.resources), arguments.program, arguments.port, shlex.split(arguments.shell))
    except InputError as error:
        sys.exit(f"parallax: {error}")


if __name__ == "__main__":
    main()
