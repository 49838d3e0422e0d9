"""Runs a command on two hosts with a slow network, emulated by network namespaces of this machine joined by a veth.

Each end of the veth is limited to the given Gbit/s (tc tbf). Namespaces belong only to their processes, so the kernel
removes them with the last process, however it ends. Needs unshare, ip and tc, and root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asr_am.distributed.runtime.launcher import launch

ADDRESSES, LINK, LOOPBACK, PORT = ("10.213.79.1", "10.213.79.2"), "between", "lo", 29416
BURST = "256kb"  # sent at full speed, more than one packet of a veth


def run_on_two_hosts(command: Sequence[str], learners: int, gbits: float) -> int:
    """Runs one team with `learners` processes of `command` on each host and returns its exit status.

    Raises SystemExit without the required rights.
    """
    missing = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if missing:
        sys.exit(f"{', '.join(missing)}: not found; install util-linux and iproute2")
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        sys.exit("no right to make network namespaces: run this as root")
    return subprocess.run(["unshare", "-n", *host(0, learners, gbits), *command], check=False).returncode


def host(node: int, learners: int, gbits: float) -> list[str]:
    return [sys.executable, __file__, str(node), str(learners), str(gbits)]


def sent_bytes(interface: str) -> int | None:
    """Returns the bytes that this host has sent over LINK or LOOPBACK, with headers. None if the interface does not
    exist.
    """
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    return None


# inside a namespace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("node", type=int)
    parser.add_argument("learners", type=int)
    parser.add_argument("gbits", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.node == 0:
        run_both(options)
    else:
        wait_for(lambda: sent_bytes(LINK) is not None, "no link from host 0")
        run_host(options)


def run_both(options: argparse.Namespace) -> None:
    """Starts host 1, creates the link to it, and runs the learners of both."""
    own = os.readlink("/proc/self/ns/net")
    other = subprocess.Popen(["unshare", "-n", *host(1, options.learners, options.gbits), *options.command])
    try:
        wait_for(lambda: os.readlink(f"/proc/{other.pid}/ns/net") != own, "host 1 has not started")
        run(f"ip link add {LINK} type veth peer name {LINK} netns {other.pid}")
        run_host(options)
    finally:
        other.terminate()  # also ends its learners
        other.wait()


def run_host(options: argparse.Namespace) -> None:
    """Sets up this end of the link and runs this host's learners to the end."""
    run(f"ip address add {ADDRESSES[options.node]}/24 dev {LINK}")
    run(f"tc qdisc add dev {LINK} root tbf rate {options.gbits}gbit burst {BURST} latency 100ms")
    run(f"ip link set {LINK} up")
    run(f"ip link set {LOOPBACK} up")
    launch(
        options.command, options.learners, synchronous=True, nodes=2, node_rank=options.node,
        address=f"{ADDRESSES[0]}:{PORT}", encrypt=False,
    )  # fmt: skip


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def wait_for(ready: Callable[[], bool], problem: str) -> None:
    """Waits up to 10 s, then raises SystemExit."""
    deadline = time.monotonic() + 10
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(problem)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
