"""What all tests share: their order, and workers that need not import torch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO

import omegaconf.omegaconf
import pytest
import yaml
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # the first example may compile, and machines differ
settings.load_profile("untimed")


# end-to-end tests and others of many seconds, which a slow machine may not reach before TESTS_UNTIL
LAST = {
    "test_any_model.py", "test_api.py", "test_disk.py", "test_extend.py", "test_gpu_check.py", "test_hosts.py",
    "test_kaldi_recipe.py", "test_overrides.py", "test_page.py", "test_slurm.py", "test_swbd.py", "test_sweeps.py",
    "test_table.py", "test_unlike_runs.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the recipe first, whose fixture takes longest of all, and `LAST` last."""
    items.sort(key=lambda item: (item.path.name != "test_recipe.py") + (item.path.name in LAST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skips tests that begin after TESTS_UNTIL (seconds since 1970), which .ci/run sets."""
    if time.time() > float(os.environ.get("TESTS_UNTIL", "inf")):
        pytest.skip("TESTS_UNTIL is over; scripts/test.sh runs all tests")


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


@pytest.fixture(autouse=True, scope="session")
def files_of_conf_parsed_once() -> Iterator[None]:
    """Keeps what YAML's slow parser makes of a file: each configuration is composed of some thirty files."""

    known: dict[tuple[str, str], object] = {}

    def load(source: str | IO[str], Loader: type) -> object:
        if isinstance(source, str):
            return yaml.load(source, Loader=Loader)
        key = source.name, source.read()
        if key not in known:
            source.seek(0)
            known[key] = yaml.load(source, Loader=Loader)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omegaconf.omegaconf, "yaml", SimpleNamespace(load=load, dump=yaml.dump))
        yield


@pytest.fixture(autouse=True)
def arithmetic_threads() -> Iterator[None]:
    """Undoes `torch.set_num_threads` of a test: sums of later tests would be rounded otherwise."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None:
        sys.modules["torch"].set_num_threads(before)


def pytest_collection_finish() -> None:
    """Leaves all modules and test items out of garbage collection, which would walk them again and again."""
    gc.collect()
    gc.freeze()
