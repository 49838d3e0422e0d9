"""mpirun's variables as those of torchrun."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = {  # of Open MPI, then of MPICH and Intel MPI
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def mpi_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of torchrun that are not set yet, for a process that mpirun has started."""
    return {
        name: variables[other]
        for name, others in VARIABLES.items() for other in others if other in variables and name not in variables
    }  # fmt: skip
