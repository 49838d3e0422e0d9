"""UTF-8 text files with one record per line. Anything wrong with a file becomes an InputError."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from asr_am.data.checksums import intact
from asr_am.data.temporary import replacing
from asr_am.errors import InputError

# Only these separate words: str.split() would also split at a no-break space, which a word may contain.
BLANKS = " \t\r\n\f\v"
MAX_NAME = 180  # bytes of a file's name, to which suffixes are added. File systems take 255
SIDECAR = "._"  # begins the names of files that macOS writes beside others on foreign disks
GZIP = b"\x1f\x8b"  # magic number, as names are unreliable


def file_name(name: str) -> str:
    """Returns an id as the name of a file: itself, or if it cannot be one a similar name with a digest of it."""
    plain = re.sub(r"[/\0]", "_", name)
    if plain == name and name not in ("", ".", "..") and len(os.fsencode(name)) <= MAX_NAME:
        return name
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
    return os.fsencode(plain)[: MAX_NAME - 13].decode(errors="ignore").lstrip(".") + f"-{digest}"


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes `lines`, each ended by a newline, under a temporary name that is then renamed."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def numbered_lines(path: Path, remedy: str = "check that the file is complete") -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its end) of a plain or gzipped file.

    Raises:
        InputError: with `remedy`, if the file is missing, unreadable, damaged or not UTF-8.
    """
    number = 0
    try:
        with open(intact(path), "rb") as file:
            gzipped = path.suffix == ".gz" or file.peek(len(GZIP)).startswith(GZIP)
            for number, raw in enumerate(gzip.GzipFile(fileobj=file) if gzipped else file, start=1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; {remedy}") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"{path}:{number}: not UTF-8 text (byte 0x{byte:02x}); convert it with iconv") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: cannot be read ({error}); {remedy}") from error


def read_lines(path: Path, remedy: str) -> list[str]:
    """Returns the lines of `path` without their ends. Raises what `numbered_lines` raises."""
    return [line for _, line in numbered_lines(path, remedy)]


def load_json(path: Path) -> Any:
    """Parses a JSON file.

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: it is not JSON in UTF-8.
        InputError: it is not what its stage wrote.
    """
    try:
        return json.loads(intact(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def split_words(line: str) -> list[str]:
    """Returns the words of a line, separated by ASCII whitespace."""
    if line.isascii():
        return line.split()
    for blank in BLANKS[1:]:
        line = line.replace(blank, " ")
    return [word for word in line.split(" ") if word]
