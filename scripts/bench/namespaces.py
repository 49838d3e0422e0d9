"""Runs a command on hosts with a slow network, emulated by network namespaces of this machine joined by a bridge.

    python scripts/bench/namespaces.py HOSTS GBITS COMMAND...        `{node}` in the command is the number of the host

Each host sends and receives at most so many Gbit/s (tc tbf). TCP is the same on every machine: Reno, and no slow start
after a pause, as BBR reaches other rates from run to run at a token bucket. Namespaces belong only to their processes,
so the kernel removes them with the last process, however it ends. Needs unshare, ip and tc, and root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asr_am.distributed.runtime.launcher import launch

NETWORK, LINK, LOOPBACK, PORT = "10.213.79", "between", "lo", 29416
ADDRESS = f"{NETWORK}.1"  # of host 0
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}  # in net.ipv4
BURST = "256kb"  # sent at full speed, more than one packet of a veth


def run_on_hosts(command: Sequence[str], hosts: int, gbits: float, output: int | None = None) -> int:
    """Runs a command on each host. Returns the exit status of host 0's.

    Args:
        command: `{node}` in it is replaced by the number of the host.
        hosts: number of hosts.
        gbits: speed of each host's link in each direction.
        output: where all of them print, as of `subprocess.run`.

    Raises SystemExit without the required rights.
    """
    missing = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if missing:
        sys.exit(f"{', '.join(missing)}: not found; install util-linux and iproute2")
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        sys.exit("no right to make network namespaces: run this as root")
    inside = ["unshare", "-n", sys.executable, __file__, str(hosts), str(gbits), *command]
    return subprocess.run(inside, check=False, stdout=output).returncode


def run_on_two_hosts(command: Sequence[str], learners: int, gbits: float) -> int:
    """Runs one synchronous team with `learners` processes of `command` on each host. Returns its exit status."""
    return run_on_hosts([sys.executable, __file__, "learners", "{node}", str(learners), *command], 2, gbits)


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


def join_hosts(hosts: int, gbits: float, command: Sequence[str]) -> int:
    """Starts the hosts, and links each to a bridge in this namespace. Returns the exit status of host 0."""
    own = os.readlink("/proc/self/ns/net")
    run("ip link add bridge type bridge")
    run("ip link set bridge up")
    started = []
    try:
        for node in range(hosts):
            words = [word.replace("{node}", str(node)) for word in command]
            process = subprocess.Popen(
                ["unshare", "-n", sys.executable, __file__, "host", str(node), str(gbits), *words]
            )
            started.append(process)
            wait_for(lambda pid=process.pid: os.readlink(f"/proc/{pid}/ns/net") != own, f"host {node} has not started")
            run(f"ip link add to{node} type veth peer name {LINK} netns {process.pid}")
            run(f"ip link set to{node} master bridge up")
            limit(f"to{node}", gbits)
        return started[0].wait()
    finally:
        for process in started:
            process.terminate()  # also ends its learners
            process.wait()


def be_host(node: int, gbits: float, command: Sequence[str]) -> None:
    """Sets up this end of the link, and becomes the command."""
    wait_for(lambda: sent_bytes(LINK) is not None, f"host {node} got no link")
    run(f"ip address add {NETWORK}.{node + 1}/24 dev {LINK}")
    limit(LINK, gbits)
    run(f"ip link set {LINK} up")
    run(f"ip link set {LOOPBACK} up")
    for name, value in TCP.items():
        Path("/proc/sys/net/ipv4", name).write_text(value, encoding="utf-8")
    os.execvp(command[0], command)


def limit(interface: str, gbits: float) -> None:
    run(f"tc qdisc add dev {interface} root tbf rate {gbits * 1000:.0f}mbit burst {BURST} latency 100ms")


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def wait_for(ready: Callable[[], bool], problem: str) -> None:
    """Waits up to 10 s, then raises SystemExit."""
    deadline = time.monotonic() + 10
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(problem)
        time.sleep(0.02)


def main() -> None:
    first, second, *rest = sys.argv[1:]
    if first == "host":
        be_host(int(second), float(rest[0]), rest[1:])
    elif first == "learners":
        launch(
            rest[1:], int(rest[0]), synchronous=True, nodes=2, node_rank=int(second), address=f"{ADDRESS}:{PORT}",
            encrypt=False,
        )  # fmt: skip
    else:
        sys.exit(join_hosts(int(first), float(second), rest))


if __name__ == "__main__":
    main()
