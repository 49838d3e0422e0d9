"""Lines of a text file, plain or gzipped; whatever may be wrong with such a file becomes an InputError."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from asr_am.errors import InputError

# Words end at these characters only: str.split() would also split at a no-break space, which a word may contain.
BLANKS = " \t\r\n\f\v"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end). InputError: missing, unreadable, damaged gzip, not UTF-8."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: is not UTF-8 (byte {error.start}); convert it with iconv") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: cannot be read ({error}); is the file whole?") from error


def split_words(line: str) -> list[str]:
    """The words of a line, which blanks and tabs separate."""
    if line.isascii():
        return line.split()
    for blank in BLANKS[1:]:
        line = line.replace(blank, " ")
    return [word for word in line.split(" ") if word]
