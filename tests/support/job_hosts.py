"""Hosts of this machine that `ssh` and `srun` on the search path reach. They run the real commands."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = """#!/bin/sh
# The host is the last word but one of ssh, and any name for srun. The last word is a shell line.
host=srun
[ "${0##*/}" = srun ] || eval host=\\${$(($# - 1))}
eval line=\\${$#}
cd "%s" || exit
echo "$*" >> "${0##*/}.calls"
echo "welcome to $host"
[ ! -e "$host.down" ] || { echo "no route to host $host" >&2; exit 255; }
echo $$ >> "$host.pids"
[ ! -e "/run/netns/%s$host" ] || exec ip netns exec "%s$host" sh -c "$line"
exec sh -c "$line"
"""


class FakeHosts:
    """Hosts, any number with any names.

    Args:
        folder: for the programs, and the processes of each host.
        patch: puts the programs on the search path.
        prefix: of the network namespace of a host. A host without a namespace has none of its own.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, prefix: str = "asr-am-none-") -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("ssh", "srun"):
            (folder / name).write_text(SCRIPT % (folder, prefix, prefix))
            (folder / name).chmod(0o755)
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def calls(self, program: str) -> list[str]:
        """Returns the arguments of each call of a program."""
        return (self.folder / f"{program}.calls").read_text().splitlines()

    def processes(self, host: str) -> list[int]:
        """Returns the workers that were started on a host."""
        path = self.folder / f"{host}.pids"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def send(self, host: str, number: int) -> None:
        """Sends a signal to the workers of a host, not to the processes of their functions."""
        for process in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def shut_down(self, host: str) -> None:
        """Kills the workers of a host, which cannot be reached afterwards."""
        (self.folder / f"{host}.down").touch()
        self.send(host, signal.SIGKILL)
