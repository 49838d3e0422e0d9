"""Reads the files of the AN4 distribution from its archive or from the unpacked tree, without unpacking."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from asr_am.errors import InputError
from asr_am.progress import track

logger = logging.getLogger(__name__)

URL = "http://www.speech.cs.cmu.edu/databases/an4/an4_raw.bigendian.tar.gz"
ARCHIVES = ("an4_raw.bigendian.tar.gz", "an4_raw.bigendian.tar.xz", "an4_raw.bigendian.tar")
REMEDY = f"get {URL} and pass the folder that holds it with --data-dir"
NUM_FILES = 1090  # in the complete distribution, for the progress bar only
USED = (".raw", ".dic", ".lm", ".fileids", ".transcription")
MAX_BYTES = 400_000_000  # of an archive, unpacked. The complete distribution has 94 million.
DIGEST = "dd7a78404ed60e88d7933d5434693255bbdfe2809728eb7780d340a24e17c4a5"  # of the complete distribution


def find_source(data_dir: Path) -> Path:
    """Returns the archive, or the root of the unpacked tree (the folder of `etc` and `wav`), at `data_dir`.

    Raises:
        InputError: there is neither.
    """
    if data_dir.is_file():
        return data_dir
    if not data_dir.exists():
        raise InputError(f"{data_dir}: no such file or folder; {REMEDY}")
    for root in (data_dir, data_dir / "an4"):
        if (root / "etc").is_dir() and (root / "wav").is_dir():
            return root
    for name in ARCHIVES:
        if (data_dir / name).is_file():
            return data_dir / name
    raise InputError(f"{data_dir}: holds neither {ARCHIVES[0]} (or .tar.xz) nor the unpacked folder an4/; {REMEDY}")


def read_source(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (path relative to the root of the tree, contents) of every file below `etc` and `wav`, in any order.

    Archives are streamed and never unpacked.

    Raises:
        InputError: the archive is broken, or more than `MAX_BYTES` come out of it.
    """
    files = _read_tree(source) if source.is_dir() else _read_archive(source)
    return iter(track(files, f"read {source.name}", total=NUM_FILES))


def _read_tree(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.glob("etc/*")) + sorted(root.glob("wav/*/*/*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path.read_bytes()


def _read_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with _decompressed(archive) as file, tarfile.open(fileobj=Bounded(file, archive), mode="r|") as tar:
            for member in tar:
                name = _name_in_tree(member.name, archive)
                contents = tar.extractfile(member) if member.isreg() and name else None
                if contents is not None:
                    yield name, contents.read()
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise InputError(f"{archive}: damaged, truncated or not a tar archive ({error}); {REMEDY}") from error


def _decompressed(archive: Path) -> io.BufferedIOBase:
    """Opens an archive by what it begins with, as names are unreliable."""
    with archive.open("rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(archive)
    return lzma.open(archive) if magic == b"\xfd7zXZ\x00" else archive.open("rb")


class Bounded(io.BufferedIOBase):
    """A file that refuses to give more than `MAX_BYTES`: a small archive may unpack to any size."""

    def __init__(self, file: io.BufferedIOBase, archive: Path) -> None:
        self._file, self._archive, self._left = file, archive, MAX_BYTES

    def read(self, size: int | None = -1) -> bytes:
        """Reads up to `size` bytes, or all. Raises InputError past the limit."""
        most = self._left + 1
        data = self._file.read(most if size is None or size < 0 else min(size, most))
        self._left -= len(data)
        if self._left < 0:
            raise InputError(f"{self._archive}: unpacks to more than {MAX_BYTES} bytes, which AN4 does not; {REMEDY}")
        return data


def digest(contents: dict[str, str]) -> str:
    """Returns the SHA-256 of what is used of a distribution, however it is packed.

    Args:
        contents: SHA-256 of each file by its name.
    """
    lines = [f"{name} {value}\n" for name, value in sorted(contents.items()) if name.endswith(USED)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _name_in_tree(member: str, archive: Path) -> str:
    """Returns `wav/...` or `etc/...` for a member of the archive, "" for others. Raises InputError for a path that
    escapes.
    """
    parts = PurePosixPath(member).parts
    if ".." in parts or member.startswith("/"):
        raise InputError(f"{archive}: '{member}' is not a path of the corpus; {REMEDY}")
    below = [i for i, part in enumerate(parts) if part in ("etc", "wav")]
    return "/".join(parts[below[0] :]) if below else ""
