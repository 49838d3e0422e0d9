"""A real Slurm with nodes on this host, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LAB = str(Path(__file__).resolve().parents[2] / "scripts/slurm_lab.sh")
INSTALLED = shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is not None
NEEDS_SLURM = pytest.mark.skipif(not INSTALLED or os.getuid() != 0, reason="no slurmctld, or not root")


@contextmanager
def real_slurm(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has Slurm's commands find a new Slurm."""
    command = [LAB, "sh", "-c", "echo $SLURM_CONF; cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lab:
        assert lab.stdin is not None and lab.stdout is not None
        conf = lab.stdout.readline().strip()
        assert conf, "Slurm did not start"
        patch.setenv("SLURM_CONF", conf)
        yield
        lab.stdin.close()


def show_jobs() -> str:
    """Returns what Slurm says of all jobs."""
    return subprocess.run(["scontrol", "show", "jobs"], check=True, capture_output=True, text=True).stdout
