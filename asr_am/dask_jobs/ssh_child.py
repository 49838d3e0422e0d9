"""Runs a command of a host until it ends, or until the connection by ssh is gone: `python -m asr_am.dask_jobs.ssh_child
COMMAND ...`.

sshd closes standard input with the connection, but leaves processes alone, also those of a client that was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    if os.getpgrp() != os.getpid():  # sshd may have started it as the leader of a session
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
