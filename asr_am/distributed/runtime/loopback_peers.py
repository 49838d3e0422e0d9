"""Finds another user's process at the other end of a TCP connection on this host.

The sockets of torch's collectives are open to all users of the host while a group is formed. gloo takes everyone for a
learner who connects first. The kernel knows to whom both ends of a loopback connection belong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from asr_am.errors import InputError

ESTABLISHED = "01"
IPV4_IN_IPV6 = "0000000000000000FFFF0000"


@dataclass(frozen=True)
class TcpSocket:
    """A line of /proc/net/tcp. Addresses are hexadecimal, ip:port."""

    local: str
    remote: str
    state: str
    uid: int
    inode: str


def tcp_sockets() -> list[TcpSocket]:
    """Returns all TCP sockets of this host."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                local, remote = local.removeprefix(IPV4_IN_IPV6), remote.removeprefix(IPV4_IN_IPV6)
                found.append(TcpSocket(local, remote, state, int(uid), inode))
    return found


def socket_inodes(process: int | str = "self") -> set[str]:
    """Returns the inodes of all sockets of a process."""
    links = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(entry))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


@contextmanager
def only_own_peers() -> Iterator[None]:
    """Raises InputError if this process has connected to another user's process on this host within the context."""
    before = socket_inodes()
    yield
    own = socket_inodes() - before
    table = tcp_sockets()
    peers = {(other.local, other.remote): other.uid for other in table if other.state == ESTABLISHED}
    for mine in table:
        uid = peers.get((mine.remote, mine.local))
        if mine.inode in own and uid not in (None, os.geteuid()):
            raise InputError(
                f"a process of the user with number {uid} has connected to a learner in place of another: start the "
                "run again, and find out who it is"
            )
