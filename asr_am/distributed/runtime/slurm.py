"""Slurm's variables as those of torchrun, so that `srun` starts learners directly."""

from __future__ import annotations

import re
from collections.abc import Mapping

from asr_am.errors import InputError

FIRST_PORT, NUM_PORTS = 20000, 12000  # below the ports that Linux gives connections


def slurm_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task of `srun`.

    Variables that are set already are left out, so MASTER_ADDR and MASTER_PORT may be given. Outside of `srun`, and
    where torchrun has set RANK or mpirun has started this process, nothing is returned.

    Raises:
        InputError: the hosts have different numbers of tasks, or a list of hosts cannot be read.
    """
    started = any(name in variables for name in ("RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"))
    if started or "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables:
        return {}
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    step = int(variables.get("SLURM_JOB_ID", "0")) * 7 + int(variables["SLURM_STEP_ID"])
    found = {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS", "1"),
        "LOCAL_RANK": variables.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks_per_host(variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))),
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": str(FIRST_PORT + step % NUM_PORTS),  # equal in all tasks, different in steps of one host
    }
    return {name: value for name, value in found.items() if name not in variables}


def tasks_per_host(text: str) -> int:
    """Reads a list such as "4(x2)". Raises InputError if the hosts have different numbers of tasks."""
    counts = {re.sub(r"\(x\d+\)", "", part) for part in text.split(",")}
    if len(counts) != 1 or not (count := counts.pop()).isdecimal():
        raise InputError(
            f"SLURM_STEP_TASKS_PER_NODE={text}: hosts need the same number of learners; use srun --ntasks-per-node"
        )
    return int(count)


def first_host(hosts: str) -> str:
    """Returns the first host of a list such as "gpu[003-005,9],login1" or "rack[1-2]n[1-4]".

    Raises:
        InputError: it cannot be read.
    """
    match = re.match(r"((?:[^,\[\]]|\[\d[-,\d]*\])+)(?:,|$)", hosts)
    if match is None:
        raise InputError(f"SLURM_STEP_NODELIST={hosts!r}: holds no host; start learners with srun, or set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])
