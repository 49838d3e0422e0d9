"""`ForkServer`: a process that has imported what learners need, and forks them. A learner starts in milliseconds.

So a learner that dies is replaced, and a team is started again, without seconds of imports. The server starts no thread
and uses no GPU. It ends with its launcher, and learners end with it.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import count

from asr_am.signals import signal_on_parent_death

ASKS_TO_END = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
MAX_PACKET = 1 << 16  # bytes of a learner's own variables, or of a report
FORK_SAFE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # looking for GPUs starts no CUDA, which learners could not use then


class ForkedProcess:
    """A forked learner, with what a launcher uses of `subprocess.Popen`.

    Attributes:
        returncode: as of `Popen`.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """The process. Waits until the server has imported everything, and forked it."""
        while self._pid is None and self.returncode is None:
            self._server.receive(None)
        if self._pid is None:
            raise ProcessLookupError("the server has ended before it has forked this learner")
        return self._pid

    def poll(self) -> int | None:
        self._server.receive(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a learner", timeout or 0.0)
            self._server.receive(left)
        return self.returncode

    def report(self, pid: int | None, returncode: int | None) -> None:
        self._pid, self.returncode = pid or self._pid, returncode


class ForkServer:
    """The launcher's end. The server is started with the first learner, and again should it have ended.

    Args:
        command: `[sys.executable, "-m", module, argument, ...]`. The server calls `prepare(argument, ...)` of the
            module, which may start no thread, and each learner calls `main()`.
        inherited_files: descriptors that the learners keep open.
    """

    def __init__(self, command: Sequence[str], inherited_files: Sequence[int] = ()) -> None:
        self._command, self._inherited_files = list(command), inherited_files
        self._process: subprocess.Popen[bytes] | None = None
        self._learners: list[ForkedProcess] = []  # of this server, in the order of their starts
        self._connection: socket.socket
        self._environment: Mapping[str, str]

    def fork(self, environment: Mapping[str, str]) -> ForkedProcess:
        """Starts a learner in a session of its own, with the names of the first one in its environment."""
        self.receive(0.0)
        if self._process is None:
            self._start(environment)
        own = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        learner = ForkedProcess(self)
        self._learners.append(learner)
        with suppress(BrokenPipeError):  # the next `receive` finds out
            self._connection.send(json.dumps(own).encode())
        return learner

    def receive(self, seconds: float | None) -> None:
        """Notes what the server has reported. Waits `seconds` for the first report, None for as long as it takes."""
        while self._process is not None:
            self._connection.settimeout(seconds)
            report = b""
            try:
                report = self._connection.recv(MAX_PACKET)
            except (TimeoutError, BlockingIOError):
                return
            except ConnectionResetError:
                pass
            if not report:
                self.close()
                return
            number, pid, status = json.loads(report)
            self._learners[number].report(pid, status)
            seconds = 0.0

    def descriptor(self) -> int | None:
        """Returns what can be read when `receive` has something to note. None if there is no server."""
        return None if self._process is None else self._connection.fileno()

    def close(self) -> None:
        """Ends the server, and its learners with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None
        for learner in self._learners:
            if learner.returncode is None:
                learner.report(None, -signal.SIGKILL)
        self._learners.clear()

    def _start(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *self._command[2:]],
                env={**environment, **FORK_SAFE}, start_new_session=True,
                pass_fds=(*self._inherited_files, theirs.fileno()),
            )  # fmt: skip


def serve(connection: socket.socket) -> dict[str, str] | None:
    """Forks a learner for each request, and reports [number of the request, process, exit status or null].

    Returns:
        In a learner its own variables. In the server, when the launcher has ended, None.
    """
    server, numbers, next_number = os.getpid(), dict[int, int](), count()  # numbers by process
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            ended.recv(MAX_PACKET)
            while numbers and (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found[0], os.waitstatus_to_exitcode(found[1])
                connection.send(json.dumps([numbers.pop(pid), pid, status]).encode())
        if connection not in ready:
            continue
        if not (request := connection.recv(MAX_PACKET)):
            return None
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKS_TO_END)  # a learner must not ignore one that comes at once
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *ASKS_TO_END):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)
            for end in (connection, ended, wake):
                end.close()
            os.setsid()
            signal_on_parent_death(signal.SIGKILL)
            return dict(json.loads(request)) if os.getppid() == server else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)
        numbers[pid] = next(next_number)
        connection.send(json.dumps([numbers[pid], pid, None]).encode())


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal_on_parent_death(signal.SIGKILL)
    for number in ASKS_TO_END:  # Slurm may send them to all processes: learners that save a checkpoint need this one
        signal.signal(number, signal.SIG_IGN)
    module = import_module(sys.argv[2])
    del sys.argv[1:3]
    with suppress(Exception):  # a learner will find the same, and report it
        module.prepare(*sys.argv[1:])
    gc.freeze()  # learners share the memory of what is imported
    if (variables := serve(connection)) is not None:
        os.environ.update(variables)
        module.main()


if __name__ == "__main__":
    main()
