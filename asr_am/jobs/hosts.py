"""The options of jobs, and the processes that start workers on other hosts."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from asr_am.errors import InputError

HOST = "{host}"
POLL, GRACE = 0.2, 1.0  # seconds
WORKER_EXIT_TIMEOUT = 10.0  # seconds in which workers end with their input. Slurm takes one or two
SIGNS = 6  # of life within the time after which a worker counts as lost
READY = b"asr_am.jobs.worker is ready\n"  # before a worker's first answer. A login shell may print something earlier
FUNCTION, ITEMS = b"f", b"i"  # first byte of a message to a worker


@dataclass(frozen=True)
class JobOptions:
    """The options of group `jobs`. They are explained in its files.

    Attributes:
        name: of the file.
        command: runs the shell line that follows it, on the host that takes the place of {host}. "": no other hosts.
        arguments: those of the user, which are a part of `command`.
        hosts: names for {host}.
        timeout: seconds without a sign of life after which a worker counts as lost.
    """

    name: str
    command: str = ""
    arguments: str = ""
    hosts: Sequence[str] = ()
    timeout: float = 60.0

    def __post_init__(self) -> None:
        """Raises InputError if hosts are missing, a value is out of range, or there is no such program."""
        if not self.timeout > 0:
            raise InputError(f"jobs.timeout={self.timeout}: must be above 0")
        if HOST in self.command and not self.hosts:
            raise InputError(f"jobs={self.name}: needs hosts; give e.g. jobs.hosts=[node1,node2]")
        if self.hosts and HOST not in self.command:
            raise InputError(f"jobs.hosts: jobs={self.name} takes none; leave them out, or choose jobs=ssh")
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise InputError(f"jobs.command={self.command}: {error}; correct the quotes") from None
        if words and shutil.which(words[0]) is None:
            raise InputError(f"jobs={self.name}: this host has no program {words[0]}; install it, or use jobs=local")

    def worker(self, index: int, logs: Path) -> Worker:
        """Returns the worker with this index. Workers take the hosts in turn. `logs` is the folder of their logs."""
        turn, which = divmod(index, len(self.hosts)) if self.hosts else (0, index)
        host = self.hosts[which] if self.hosts else f"{self.name}{index + 1}"
        command = shlex.split(self.command.replace(HOST, shlex.quote(host)))
        return Worker(host, [*command, shell_line(self.timeout / SIGNS)], logs / f"{host}.{turn + 1}.log", self.timeout)


def shell_line(interval: float) -> str:
    """Returns the shell line of a worker: the same Python, modules and folder as here, one arithmetic thread.

    Args:
        interval: seconds between signs of life.
    """
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    command = ["env", f"PYTHONPATH={paths}", "OMP_NUM_THREADS=1", sys.executable, "-m", "asr_am.jobs.worker"]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*command, str(interval)])}"


class WorkerLost(Exception):
    """A worker has ended, or gives no sign of life."""


class Worker:
    """A worker that is started when it is needed, and again after it was lost.

    One thread calls it. Others may call `check` and `end`.

    Attributes:
        host: its host, or a name of its own where Slurm chooses the host.
        log_file: what it prints.
        failures: how often it was lost since its last answer.
    """

    # of a started worker: connections, what it printed before its first answer, and the function it has
    _requests: Connection
    _answers: Connection
    _printed: bytes
    _function: bytes

    def __init__(self, host: str, command: Sequence[str], log_file: Path, timeout: float) -> None:
        self.host, self.log_file, self.failures = host, log_file, 0
        self._command, self._timeout, self._heard, self._ended = command, timeout, 0.0, ""
        self._process: subprocess.Popen[bytes] | None = None

    def ready(self) -> bool:
        """Starts the worker if need be, and waits a moment for it. Raises WorkerLost, or OSError without a start."""
        if self._process is None:
            self._start()
        assert self._process is not None
        if self._process.poll() is not None:
            raise self._lost()
        if not self._printed.endswith(READY) and self._answers.poll(POLL):
            if not (data := os.read(self._answers.fileno(), 1 << 16)):  # no messages: nothing was asked yet
                raise self._lost()
            self._printed += data
        return self._printed.endswith(READY)

    def run(self, function: bytes, items: bytes) -> bytes:
        """Returns the answer to an encoded list of items. Raises WorkerLost."""
        self._heard = time.monotonic()
        try:
            if self._function is not function:
                self._requests.send_bytes(FUNCTION + function)
                self._function = function
            self._requests.send_bytes(ITEMS + items)
            while not (answer := self._answers.recv_bytes()):
                self._heard = time.monotonic()
        except (EOFError, OSError):
            raise self._lost() from None
        finally:
            self._heard = 0.0
        return answer

    def check(self) -> None:
        """Ends the worker if it should have given a sign of life."""
        if self._heard and time.monotonic() - self._heard > self._timeout:
            self.end(f"gave no sign of life for {self._timeout:g} s")

    def end(self, reason: str) -> None:
        """Ends the worker's command while it runs items, so that `run` raises WorkerLost.

        On the other host the worker ends with the connection. A second call kills the command.
        """
        if self._heard and self._process is not None:
            _send(self._process, signal.SIGKILL if self._ended else signal.SIGTERM)
            self._ended = self._ended or reason

    def disconnect(self) -> None:
        """Closes the input of the worker, on which it ends by itself. Slurm then counts its job as completed."""
        if self._process is not None:
            self._requests.close()

    def close(self, deadline: float = 0.0) -> None:
        """Ends the worker. It can be started again.

        Args:
            deadline: value of time.monotonic() until which a worker that has started may end by itself.
        """
        if self._process is not None:
            self.disconnect()
            if self._printed.endswith(READY):
                _wait(self._process, max(deadline - time.monotonic(), 0))
            self._answers.close()
            _stop(self._process)
            self._process = None

    def _start(self) -> None:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._printed, self._function, self._ended = b"", b"", ""
        stdin, self._requests = Pipe(duplex=False)
        self._answers, stdout = Pipe(duplex=False)
        with self.log_file.open("ab") as log, stdin, stdout:
            self._process = subprocess.Popen(
                self._command, stdin=stdin.fileno(), stdout=stdout.fileno(), stderr=log,
                start_new_session=True,  # Ctrl-C reaches the stage's process only, which ends its workers
            )  # fmt: skip

    def _lost(self) -> WorkerLost:
        assert self._process is not None
        _wait(self._process, GRACE)  # its output ends a moment before it does
        _stop(self._process)
        return WorkerLost(self._ended or f"ended with status {self._process.returncode}")


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a command and its children, which would hold its output open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits for a command to end by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates a command, as srun then leaves Slurm's queue, and kills it if that does not help."""
    _send(process, signal.SIGTERM)
    _wait(process, GRACE)
    if process.poll() is None:
        _send(process, signal.SIGKILL)
        process.wait()
