"""What a Dask worker does: the items of a map, in the stage's folder, with nothing cached from another map.

A worker has one thread, since decoders hold Python's lock and readers are not made for threads.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import pickle
import platform
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import asr_am
from asr_am.errors import InputError
from asr_am.progress import mute

CACHE = type(functools.lru_cache(lambda: None))


def installed_software() -> dict[str, str]:
    """Returns the versions of what decides results: Python, the packages that asr_am requires, and its own files."""
    digest = hashlib.sha256()
    for path in sorted(Path(asr_am.__path__[0]).rglob("*.py")):
        digest.update(path.read_bytes())
    names = [re.match(r"[\w.-]+", line) for line in metadata.requires("asr-am") or () if "extra ==" not in line]
    packages = {name[0]: metadata.version(name[0]) for name in names if name}
    return {"Python": platform.python_version(), "asr_am": digest.hexdigest()[:12], **packages}


SOFTWARE = installed_software()  # when this process began: files may change while a worker runs


@dataclass(frozen=True)
class StageProcess:
    """The process of a stage, and what a worker must share with it, such as the sight of a file that it has made."""

    folder: str
    paths: list[str]
    software: dict[str, str]
    seen: Path

    def enter(self) -> None:
        """Prepares this worker for a map of the stage. Raises InputError if it cannot do the same as the stage."""
        name = socket.gethostname()
        for package, version in self.software.items():
            if (found := SOFTWARE.get(package)) != version:
                raise InputError(
                    f"the Dask worker on {name} has {package} {found}, this stage {version}; start it again with the "
                    "same software"
                )
        if not self.seen.exists():
            raise InputError(
                f"the Dask worker on {name} does not see {self.seen}; hosts of jobs must share the file system, with "
                "the same paths"
            )
        if (threads := _threads()) != 1:
            raise InputError(f"the Dask worker on {name} has {threads} threads; start it with --nthreads 1")
        os.chdir(self.folder)
        sys.path += [path for path in self.paths if path not in sys.path]
        mute()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        clear_caches()


def _threads() -> int:
    from distributed import get_worker

    return int(get_worker().state.nthreads)


def clear_caches() -> None:
    """Forgets what our functions have read: files may be others by now."""
    for cached in gc.get_objects():
        if type(cached) is CACHE and str(cached.__module__).partition(".")[0] in ("asr_am", "local"):
            cached.cache_clear()


_map = ""  # the map that this worker works for, and its function
_function: Callable[[Any], Any]


def run_items(items: bytes, *, map_name: str, function: bytes, stage: StageProcess) -> bytes:
    """Returns the pickled results of a pickled list of items. A task of Dask, whose `map_name` differs for each map."""
    global _map, _function
    if _map != map_name:
        stage.enter()
        _function = pickle.loads(function)
        _map = map_name
    return pickle.dumps([_function(item) for item in pickle.loads(items)], pickle.HIGHEST_PROTOCOL)
