"""The launcher of one host, for tests that disturb it: `python -m tests.support.soak_launcher OPTIONS`.

OPTIONS is a JSON object: `command` (that of a learner), optional `pids` (folder where the processes of the learners
are noted), `namespace` (path of a network namespace to enter), `user` (to become) and `lock` (a target to lock), and
the keyword arguments of `launch`.

With `pids` the learners are forked from this process, which has torch loaded. So they start within milliseconds, and
are children of their launcher.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asr_am.distributed.launch_spec import EXIT_FAILURE
from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.runtime import worker_process
from asr_am.distributed.runtime.launcher import launch
from asr_am.errors import InputError
from asr_am.stages.target import _locked
from tests.support.other_user import become

CLONE_NEWNET = 0x40000000
FIRST_FILE, LAST_FILE = 3, 1 << 12


class ForkedLearner:
    """Implements what the launcher uses of `subprocess.Popen`, with a fork of this process.

    Args:
        command: `[sys.executable, "-m", module, argument, ...]`.
        env: the complete environment.
        pids: folder where the process is noted as `<rank>`, and each start as a line of `starts`.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], pids: Path) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(list(command[2:]), env)
        with (pids / "starts").open("a") as file:
            file.write(f"{env['RANK']}\n")
        (pids / ".new").write_text(str(self.pid))
        (pids / ".new").rename(pids / env["RANK"])

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked learner", timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


def _run(argv: list[str], env: Mapping[str, str]) -> None:
    """Runs `python -m argv` in this forked process, and ends it."""
    status = EXIT_FAILURE
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.closerange(FIRST_FILE, LAST_FILE)  # the launcher's sockets
        os.environ.clear()
        os.environ.update(env)
        sys.argv = argv
        with suppress(SystemExit):
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            status = 0
    except Exception:
        logging.exception("a learner failed")
    finally:
        os._exit(status)


def enter_namespace(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) < 0:
        raise OSError(ctypes.get_errno(), f"setns {path}")
    os.close(descriptor)


def main() -> int:
    options: dict[str, Any] = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    command = options.pop("command")
    pids, namespace, user, lock = (options.pop(name, None) for name in ("pids", "namespace", "user", "lock"))
    if namespace is not None:
        enter_namespace(namespace)
    if user is not None:
        become(user)

    def start(command: Sequence[str], env: Mapping[str, str], **_: object) -> ForkedLearner:
        return ForkedLearner(command, env, Path(pids))

    if pids is not None:
        worker_process.subprocess = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[assignment]
    try:
        with _locked(Path(lock)) if lock else nullcontext():
            launch(command, **options)
    except (InputError, LearnerLost) as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
