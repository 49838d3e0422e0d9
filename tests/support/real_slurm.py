"""A real Slurm with nodes on this host, where it is installed."""

from __future__ import annotations

import os
import shutil

import pytest

LAB = "scripts/slurm_lab.sh"
INSTALLED = shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is not None
NEEDS_SLURM = pytest.mark.skipif(not INSTALLED or os.getuid() != 0, reason="no slurmctld, or not root")
