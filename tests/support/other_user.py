"""Another user of the host, who attacks a run: python -m tests.support.other_user RUN DIR PORTS PIDS.

RUN is the run's folder, DIR its private directory, whose path every user can see in /proc/net/unix. PORTS and PIDS are
the TCP ports on which its processes listen, and the processes, as JSON lists. Must be started by root: it becomes the
user `nobody` after its imports. Prints what it tried and saw, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import zmq
from torch.distributed import FileStore, TCPStore

NOBODY = 65534
PTRACE_ATTACH = 16
SECONDS = 0.5  # to wait for an answer
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
FRAME = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)  # more frames follow
FRAMES = 200


def attempt(action: Callable[[], str]) -> str:
    """Returns what an action saw, or the name of its error. Torch's store does not respect its own timeout."""
    saw: list[str] = []

    def run() -> None:
        try:
            saw.append(action())
        except Exception as error:
            saw.append(f"refused ({type(error).__name__})")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5 * SECONDS)
    return saw[0] if saw else "no answer"


def sockets_in(folder: Path) -> list[str]:
    """Returns the Unix sockets in a directory, from what every user of the host can see."""
    paths = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({path for path in paths if Path(path).parent == folder})


def connect_unix(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    return "connected"


def hello(url: str) -> str:
    """Speaks to the control plane and the transports, as a learner would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(url)
    client.send(json.dumps({"op": "hello", "rank": 1, "incarnation": 1, "address": "tcp://127.0.0.1:1"}).encode())
    answered = client.poll(int(1000 * SECONDS))
    context.destroy(linger=0)
    return "answered" if answered else "no answer"


def garbage(port: int) -> str:
    """Sends garbage on many connections, and one message of many frames."""
    for data in (os.urandom(4096), bytes(8), b"GET / HTTP/1.0\r\n\r\n", struct.pack("<q", 3)):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
                client.sendall(data)
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        client.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        sent = 0
        try:
            for _ in range(FRAMES):
                client.sendall(FRAME)
                sent += 1
        except OSError:
            pass
    return f"{sent} MiB accepted"


def join_store(port: int) -> str:
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS), wait_for_workers=False)
    store.set("asr_am/0/learner/1", json.dumps([2, "tcp://127.0.0.1:1"]))
    return "wrote an address"


def file_store(path: Path) -> str:
    FileStore(str(path)).set("asr_am/learner/1", "me")
    return "wrote an address"


def enter(path: Path) -> str:
    return f"saw {len(list(path.iterdir()))} entries"


def read(path: Path) -> str:
    return f"read {len(path.read_bytes())} bytes"


def write(path: Path) -> str:
    path.write_bytes(b"mine")
    return "wrote"


def trace(pid: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    return "attached"


def stop(pid: int) -> str:
    os.kill(pid, signal.SIGSTOP)
    return "stopped"


def attack(run: Path, folder: Path, ports: list[int], pids: list[int]) -> list[tuple[str, str]]:
    """Returns (what was tried, what it saw)."""
    rows: list[tuple[str, Callable[[], str]]] = [
        ("list the private directory", lambda: enter(folder)),
        ("write an address into the store's file", lambda: file_store(folder / "store")),
        ("rename the private directory", lambda: str(folder.rename(folder.with_name("mine")))),
    ]
    for path in sockets_in(folder):
        name = Path(path).name.split("-")[0]
        rows += [
            (f"connect to the Unix socket of a {name}", lambda path=path: connect_unix(path)),
            (f"say hello to a {name}", lambda path=path: hello(f"ipc://{path}")),
        ]
    for port in ports:
        rows += [
            ("join torch's store on a port of the run", lambda port=port: join_store(port)),
            ("say hello on a port of the run", lambda port=port: hello(f"tcp://127.0.0.1:{port}")),
            ("send garbage and a message of 200 MiB to a port", lambda port=port: garbage(port)),
        ]
    for pid in pids:
        rows += [
            ("read a process' environment", lambda pid=pid: read(Path(f"/proc/{pid}/environ"))),
            ("read a process' memory", lambda pid=pid: read(Path(f"/proc/{pid}/mem"))),
            ("trace a process", lambda pid=pid: trace(pid)),
            ("stop a process", lambda pid=pid: stop(pid)),
        ]
    rows += [
        ("write into the run's folder", lambda: write(run / "mine")),
        ("overwrite a file of the run", lambda: write(run / "metrics.jsonl")),
        ("read a file of the run (its mode allows it)", lambda: read(run / "metrics.jsonl")),
    ]
    return [(what, attempt(action)) for what, action in rows]


if __name__ == "__main__":
    given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
    "".encode("idna")  # sockets import this encoding when they are first used
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print(json.dumps(attack(*given)), flush=True)
    os._exit(0)  # a client of torch's store may still wait
