"""The user at the other end of a connection on this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.loopback_peers import only_own_peers, socket_inodes, tcp_sockets
from asr_am.errors import InputError

NOBODY = 65534
SERVER = f"""
import os, socket, sys, time
if sys.argv[1] == "nobody": os.setuid({NOBODY})
ipv6 = {{"family": socket.AF_INET6, "dualstack_ipv6": True}}
listener = socket.create_server(("", 0), **(ipv6 if sys.argv[2] == "6" else {{}}))
print(listener.getsockname()[1], flush=True)
connection = listener.accept()[0]
print("accepted", flush=True)
time.sleep(600)
"""


@contextmanager
def server(user: str, family: str = "4") -> Iterator[tuple[int, IO[str]]]:
    """Starts a process of a user that accepts a connection. Yields its port and its output."""
    with subprocess.Popen([sys.executable, "-c", SERVER, user, family], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.stdout
        finally:
            process.kill()


def connect_to(user: str, family: str) -> None:
    """Connects to a process of a user, while connections are watched."""
    with server(user, family) as (port, said), only_own_peers():
        socket.create_connection(("127.0.0.1", port)).detach()
        assert said.readline() == "accepted\n"


@pytest.mark.parametrize("family", ["4", "6"])
def test_another_user_in_a_learners_place_is_found(family: str) -> None:
    connect_to("me", family)
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with pytest.raises(InputError, match=f"a process of the user with number {NOBODY} has connected to a learner"):
        connect_to("nobody", family)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_team_with_another_user_in_it_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.support.worker_scenarios", "intruded", str(tmp_path)]
    with server("nobody") as (port, _), pytest.raises(InputError, match=r"learner 0 on .* failed"):
        launch(command, 1, synchronous=True, env={"INTRUDER_PORT": str(port)})
    assert f"a process of the user with number {NOBODY} has connected to a learner" in capfd.readouterr().err


def test_sockets_are_listed_with_their_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        ending = f"{mine.getsockname()[1]:04X}"
        (found,) = [s for s in tcp_sockets() if s.inode in socket_inodes() and s.local.endswith(f":{ending}")]
        assert found.uid == os.geteuid() and found.local == f"0100007F:{ending}"
