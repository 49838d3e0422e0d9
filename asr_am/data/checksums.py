"""Checksums of what stages have written, verified where it is read.

`asr_am.stages.target` writes the CRC-32 of every file of an output into its `.done`. Readers call `intact(path)` before
they read a file. A file without a record, such as a user's own, is not verified.

Archives of features and shards of training examples are larger than what one process reads of them. Each utterance in
them has a checksum of its own, which is verified when that utterance is read (`features/feature_archive.py`,
`egs/store.py`).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from asr_am.data.ownership import DONE
from asr_am.errors import InputError

FIELD = "crc32"  # of DONE: file name relative to its folder -> checksum
BLOCK = 1 << 20


def file_crc32(path: Path) -> int:
    """Returns the CRC-32 of a file's content."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def file_crc32s(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Returns the CRC-32 of each of several files in `folder`. Reads four at a time."""
    with ThreadPoolExecutor(4) as pool:  # zlib releases the GIL
        return dict(zip(names, pool.map(file_crc32, [folder / name for name in names]), strict=True))


def digest(value: object) -> str:
    """Returns 16 hexadecimal digits for what an output is made from."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def intact(path: Path) -> Path:
    """Returns `path` after comparing the file with the checksum that its stage recorded, once per process.

    Raises:
        InputError: the file has changed since its stage wrote it.
    """
    for folder in path.absolute().parents:
        recorded = _recorded(folder / DONE)
        if recorded is None:
            continue
        expected = recorded.get(str(path.absolute().relative_to(folder)))
        if expected is not None and path.is_file():
            status = path.stat()
            if _crc32_once(path, status.st_size, status.st_mtime_ns) != expected:
                raise InputError(
                    f"{path}: damaged: its checksum is not the one in {folder / DONE}; remove it and run the stage "
                    "that makes it again"
                )
        break
    return path


def _recorded(done: Path) -> Mapping[str, int] | None:
    """Returns the checksums in a `.done`, {} if it has none. None if there is no such file."""
    try:
        return _read_checksums(done, done.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=32)
def _read_checksums(done: Path, _mtime_ns: int) -> Mapping[str, int]:
    try:
        recorded = json.loads(done.read_bytes())[FIELD]
    except (ValueError, TypeError, KeyError):
        return {}  # of another program
    return recorded if isinstance(recorded, dict) else {}


@lru_cache(maxsize=4096)
def _crc32_once(path: Path, _size: int, _mtime_ns: int) -> int:
    return file_crc32(path)
