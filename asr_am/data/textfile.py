"""Text files of a data directory: UTF-8, one record a line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from asr_am.errors import InputError


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write `lines`, each ended by a newline, under a temporary name that is then renamed."""
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
    os.replace(temporary, path)


def read_lines(path: Path, remedy: str) -> list[str]:
    """The lines of `path` without their ends. Raises InputError, with `remedy`, if it is missing or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
        return text.split("\n") if text else []
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; {remedy}") from error
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise InputError(
            f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert it"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
