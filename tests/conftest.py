"""What all tests share: their order, and workers that need not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest first, so that both of two test processes are busy to the end."""
    items.sort(key=lambda item: item.path.name != "test_recipe.py")


@pytest.fixture(autouse=True, scope="session")  # before fixtures of a module that launch teams
def forked_workers() -> Iterator[None]:
    """Forks the workers of teams that a test launches. FORK_WORKERS=0 starts them as users do."""
    if os.environ.get("FORK_WORKERS") != "0":
        from asr_am.distributed.runtime import worker_process
        from tests.support.forked_workers import ForkedPopen

        shim = SimpleNamespace(Popen=ForkedPopen, TimeoutExpired=subprocess.TimeoutExpired)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_process, "subprocess", shim)
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def arithmetic_threads() -> Iterator[None]:
    """Undoes `torch.set_num_threads` of a test: sums of later tests would be rounded otherwise."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None:
        sys.modules["torch"].set_num_threads(before)
