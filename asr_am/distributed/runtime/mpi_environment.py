"""mpirun's variables as those of torchrun."""

from __future__ import annotations

from collections.abc import Mapping

from asr_am.errors import InputError

COMMAND = "mpirun -n 4 python -m asr_am.stages train launcher=mpi learners=4 ..."
VARIABLES = {  # of Open MPI, then of MPICH and Intel MPI
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def mpi_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of torchrun for a process that mpirun has started, without those that are set already.

    Raises:
        InputError: mpirun has not started this process.
    """
    found = {
        name: variables[other] for name, others in VARIABLES.items() for other in others if other in variables
    }  # fmt: skip
    if "RANK" not in found and "RANK" not in variables:
        raise InputError(f"launcher=mpi: mpirun has not started this process; use {COMMAND}")
    return {name: value for name, value in found.items() if name not in variables}
