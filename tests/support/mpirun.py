"""The command of Open MPI's mpirun for tests, soaks and benchmarks: more processes than cores, also as root."""

from __future__ import annotations

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ULFM = "--with-ft", "ulfm"  # options with which the death of a process does not end the others


def mpirun_command(processes: int, *command: str, options: tuple[str, ...] = (), program: str = "mpirun") -> list[str]:
    """Returns the command that starts so many processes. It needs `ENVIRONMENT`.

    Args:
        options: more options of mpirun.
        program: mpirun, if it is not the first of the PATH.
    """
    return [program, *options, "--oversubscribe", "--bind-to", "none", "-n", str(processes), *command]
