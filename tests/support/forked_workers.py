"""Starts the workers of a test's team by forking a server process that has torch loaded already.

Importing torch takes two seconds of a core, and the tests start some hundreds of workers. A forked worker is a process
of its own, in a session of its own, with the environment, directory and output that `subprocess.Popen` would give it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

# torch.optim imports torch._dynamo when a first optimizer is made, which takes as long as torch.
PRELOADED = [
    "asr_am.train.trainer",
    "asr_am.distributed.simulator",
    "asr_am.distributed.strategies.gtc",
    "asr_am.parallax",
    "asr_am.distributed.runtime.connect",
    "torch._dynamo",
]
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(PRELOADED)


class ForkedPopen:
    """Implements what the launcher and some tests use of `subprocess.Popen`.

    Args:
        command: `[sys.executable, "-m", module, argument, ...]` or `[sys.executable, "program.py", argument, ...]`.
            Any other is started by `subprocess.Popen`.
        env: the complete environment.
        start_new_session: must be True, as the launcher has it.
        pass_fds: descriptors to inherit, under other numbers.
    """

    def __new__(
        cls, command: Sequence[str], env: Mapping[str, str], start_new_session: bool, pass_fds: Sequence[int] = ()
    ) -> Any:
        if command[0] != sys.executable or not (command[1] == "-m" or command[1].endswith(".py")):
            return subprocess.Popen(command, env=env, start_new_session=start_new_session, pass_fds=pass_fds)
        return super().__new__(cls)

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool, pass_fds: Sequence[int] = ()
    ) -> None:
        assert start_new_session
        inherited = [DupFd(descriptor) for descriptor in pass_fds]
        arguments = (list(command[1:]), dict(env), os.getcwd(), DupFd(1), DupFd(2), inherited)
        self._process = FORK_SERVER.Process(target=_run_python, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        return self._process.exitcode


def _run_python(
    arguments: list[str], env: dict[str, str], directory: str, stdout: Any, stderr: Any, inherited: list[Any]
) -> None:
    """Runs `python` with these arguments in this forked process."""
    os.setsid()
    for connection in inherited:
        connection.detach()
    for connection, number in ((stdout, 1), (stderr, 2)):
        os.dup2(connection.detach(), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    if arguments[0] == "-m":
        sys.path.insert(0, directory)
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(arguments[0]))
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")
