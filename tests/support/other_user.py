"""Another user of the host, who attacks a run: python -m tests.support.other_user UID RUN DIR PORTS PIDS.

UID is the number of the user, RUN the run's folder, DIR its private directory, whose path every user can see in
/proc/net/unix. PORTS and PIDS are the TCP ports on which its processes listen, and the processes, as JSON lists. Must
be started by root: it becomes the other user after its imports. Prints what it tried and saw, as JSON.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import zmq
from torch.distributed import FileStore, TCPStore

PTRACE_ATTACH = 16
PR_SET_DUMPABLE = 4
CLONE_NEWNS = 0x20000
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
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
    paths = [line.split()[-1] for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
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


def send_signal(pid: int, number: int) -> str:
    os.kill(pid, number)
    return "sent"


def checked(result: int, what: str) -> None:
    """Raises OSError if a system call has failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), what)


class Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(pid: int) -> str:
    """Reads the first mapping of a process by process_vm_readv."""
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(64)
    mine, theirs = Vector(ctypes.addressof(buffer), 64), Vector(0x400000, 64)
    checked(libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0), "process_vm_readv")
    return "read memory"


def take_file(pid: int) -> str:
    """Takes an open file of a process, such as a socket or the run's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.syscall(SYS_PIDFD_OPEN, pid, 0)
    checked(handle, "pidfd_open")
    checked(libc.syscall(SYS_PIDFD_GETFD, handle, 3, 0), "pidfd_getfd")
    return "took a file"


def open_files(pid: int) -> str:
    return f"saw {len(os.listdir(f'/proc/{pid}/fd'))} open files"


def limit(pid: int) -> str:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
    return "limited"


def slow_down(pid: int) -> str:
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    return "slowed down"


def command_line(pid: int) -> str:
    """Every user can read it, so it must have no secret: a key is 40 characters long."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return "a secret" if any(len(word) == 40 and b"/" not in word for word in words) else "no secret in it"


def lock(path: Path) -> str:
    """Locks a lock file, so that its owner has to wait."""
    with path.open(encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "locked"


def plant(path: Path) -> str:
    """Plants a symbolic link where the run writes."""
    path.symlink_to("/tmp/target-of-another-user")
    return "planted"


def shared_memory(owner: int) -> str:
    found = [path for path in Path("/dev/shm").iterdir() if path.stat().st_uid == owner]
    return f"read {sum(len(path.read_bytes()) for path in found)} bytes" if found else "no answer"


def attack(run: Path, folder: Path, ports: list[int], pids: list[int]) -> list[tuple[str, str]]:
    """Returns (what was tried, what it saw)."""
    rows: list[tuple[str, Callable[[], str]]] = [
        ("list the private directory", lambda: enter(folder)),
        ("write an address into the store's file", lambda: file_store(folder / "store")),
        ("rename the private directory", lambda: str(folder.rename(folder.with_name("mine")))),
        ("put a symbolic link in its place in /tmp", lambda: plant(folder)),
        ("lock the private directory", lambda: lock(folder)),
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
        for name in ("environ", "mem", "maps", "syscall", "stack"):
            rows.append((f"read /proc/PID/{name} of a process", lambda p=f"/proc/{pid}/{name}": read(Path(p))))
        rows += [
            ("read a process' command line (every user may)", lambda pid=pid: command_line(pid)),
            ("trace a process (ptrace)", lambda pid=pid: trace(pid)),
            ("read its memory (process_vm_readv)", lambda pid=pid: read_memory(pid)),
            ("list its open files", lambda pid=pid: open_files(pid)),
            ("take one of them (pidfd_getfd)", lambda pid=pid: take_file(pid)),
            ("stop or end a process", lambda pid=pid: send_signal(pid, signal.SIGSTOP)),
            ("stop or end a process", lambda pid=pid: send_signal(pid, signal.SIGTERM)),
            ("change its limits", lambda pid=pid: limit(pid)),
            ("change its priority", lambda pid=pid: slow_down(pid)),
        ]
    rows += [
        ("read the run's shared memory", lambda: shared_memory(run.stat().st_uid)),
        ("write into the run's folder", lambda: write(run / "mine")),
        ("overwrite a file of the run", lambda: write(run / "metrics.jsonl")),
        ("put a symbolic link where a checkpoint is written", lambda: plant(run / "checkpoints/learner-9.pt")),
        ("remove a checkpoint", lambda: str(next((run / "checkpoints").iterdir()).rename(run / "mine"))),
        ("lock the lock file of the run", lambda: lock(run.with_name(f".{run.name}.lock"))),
        ("read the key file", lambda: read(run.with_name("team.key"))),
        ("read a file of the run (its mode allows it)", lambda: read(run / "metrics.jsonl")),
    ]
    return [(what, attempt(action)) for what, action in rows]


def show_python() -> None:
    """Shows Python and this checkout to other users, if they are in a home directory that others cannot enter.

    Changes only what this process and its children see: they get a mount namespace of their own.
    """
    needed = {Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]}
    hidden = {p for path in needed for p in [path, *path.parents] if not p.stat().st_mode & 0o001}
    if not hidden:
        return
    mount_privately()
    home = min(hidden)
    shown = [path for path in sorted(needed) if home in path.parents]
    kept = [tempfile.mkdtemp() for _ in shown]
    for path, copy in zip(shown, kept, strict=True):
        run("mount", "--bind", path, copy)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", home)
    for path, copy in zip(shown, kept, strict=True):
        path.mkdir(parents=True, exist_ok=True)
        run("mount", "--move", copy, path)
        os.rmdir(copy)


def mount_privately() -> None:
    """Gives this process and its children a mount namespace, so that mounts are theirs only and end with them."""
    checked(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS), "unshare")
    run("mount", "--make-rprivate", "/")


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def become(user: int) -> None:
    """Makes this process one of another user, which can be traced as any process of that user."""
    show_python()
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


if __name__ == "__main__":
    given = Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5])
    become(int(sys.argv[1]))
    print(json.dumps(attack(*given)), flush=True)
    os._exit(0)  # a client of torch's store may still wait
