"""Work on all lattices of a set, in parallel and a part of them in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TypeVar

from asr_am.decode.lattice import Lattice, read_lattices
from asr_am.errors import InputError
from asr_am.parallel import parallel_map

BATCH = 256  # lattices in memory at once

Result = TypeVar("Result")


def map_lattices(
    decoded: Path, subset: str, function: Callable[[Lattice], Result], jobs: int, description: str
) -> dict[str, Result]:
    """Calls a function for each lattice of a set.

    Args:
        decoded: folder of the decoding run.
        subset: name of the set.
        function: is called in forked processes, see `parallel_map`.
        jobs: number of processes.
        description: label of the progress bar.

    Returns:
        The results by utterance.

    Raises:
        InputError: the set has no lattices, or the archive is damaged.
    """
    path = decoded / "lattices" / f"{subset}.ark"
    found: dict[str, Result] = {}
    lattices = read_lattices(path)
    while part := list(islice(lattices, BATCH)):
        results = parallel_map(function, [lattice for _, lattice in part], jobs, description, here=True)
        found |= zip((name for name, _ in part), results, strict=True)
    if not found:
        raise InputError(f"{path}: has no lattices; run stage 7 (decode) again")
    return found
