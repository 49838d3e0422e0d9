"""Runs a command until it ends, or until the connection by ssh that has started it does.

    python -m asr_am.dask_jobs.ssh_child COMMAND ...

When a connection ends, also by the death of its client, sshd closes standard input but leaves the processes alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    if os.getpgrp() != os.getpid():  # the leader of a session, as sshd may make it, has its own
        os.setpgrp()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    sys.exit(child.wait())


def end_with_stdin() -> None:
    """Kills this process and all that it has started when standard input ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
