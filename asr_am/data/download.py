"""Download of a corpus archive over HTTP, and its unpacking."""

from __future__ import annotations

import lzma
import os
import tarfile
import urllib.request
import zlib
from functools import partial
from http.client import HTTPException
from pathlib import Path

from asr_am import disk
from asr_am.errors import InputError
from asr_am.progress import track

BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60


def download(url: str, target: Path, remedy: str, max_bytes: int) -> None:
    """Saves `url` as `target`, under a temporary name until complete. Raises InputError if it fails or is too large."""
    temporary = target.with_name(f"{target.name}.part")  # fixed, so that a retry overwrites it
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response, temporary.open("wb") as file:
            expected = int(response.headers.get("Content-Length") or 0)
            blocks = -(-expected // BLOCK_BYTES) or None
            parts = iter(partial(response.read, BLOCK_BYTES), b"")
            for block in track(parts, f"download {target.name} (MB)", total=blocks):
                file.write(block)
                if file.tell() > max_bytes:
                    raise InputError(f"{url}: sends more than {max_bytes} bytes; {remedy}")
            if expected and file.tell() != expected:
                raise InputError(f"{url}: the download ended after {file.tell()} of {expected} bytes; {remedy}")
        os.replace(temporary, target)
    except (HTTPException, OSError, ValueError) as error:  # errors of the network or of the disk
        raise InputError(f"{url}: cannot be downloaded ({error}); {remedy}") from error
    finally:
        disk.remove(temporary)


def unpack(archive: Path, folder: Path, remedy: str) -> None:
    """Unpacks a tar archive into `folder`, where all of it stays: no links out of it, no devices, no absolute paths.

    Raises:
        InputError: the archive is damaged, or has a member that would be outside the folder.
    """
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except tarfile.FilterError as error:
        raise InputError(f"{archive}: its member {error.tarinfo.name} is refused ({error}); {remedy}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"{archive}: cannot be unpacked ({error}); {remedy}") from error
