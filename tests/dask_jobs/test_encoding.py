from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

from asr_am.dask_jobs.encoding import NotSent, encode
from asr_am.errors import one_line
from asr_am.features.spectral import SpectralOptions


@dataclass(frozen=True)
class Opened:
    """Cannot be pickled with what it has opened."""

    path: Path

    @cached_property
    def lock(self) -> threading.Lock:
        return threading.Lock()


def test_values_and_functions_survive() -> None:
    opened = Opened(Path("a"))
    assert opened.lock
    value = [partial(one_line, message="a\nb"), SpectralOptions(8000, 23, 13), {("a", 1): 0.1 + 0.2}, opened]
    function, *others = pickle.loads(encode(value))
    assert function() == "a b" and others == value[1:]


def in_main() -> FunctionType:
    """Returns a function as a program has it that is started by `python -m`."""
    function = FunctionType(one_line.__code__, {"__name__": "__main__"}, "one_line")
    assert function.__module__ == "__main__"
    return function


def test_what_a_worker_cannot_have_is_not_sent(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    for value in (
        threading.Lock(), lambda: None, in_main(), partial(in_main()), np.load(tmp_path / "a.npy", mmap_mode="r"),
        [np.zeros(1 << 25), np.zeros(1 << 25, np.int8)],
    ):  # fmt: skip
        with pytest.raises(NotSent):
            encode(value)
