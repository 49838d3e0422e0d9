"""Shared by commands that report bad options and bad input alike: one line on stderr, and exit code 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from asr_am.data.ownership import refuse_output
from asr_am.errors import InputError
from asr_am.signals import discard_output


class CommandLineParser(argparse.ArgumentParser):
    """Argument parser that raises InputError for bad options instead of exiting with code 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists the options")


def check_out(out: Path | None, inputs: Iterable[Path | None]) -> None:
    """Raises InputError if a file to write is one of those to read, a stage's, in no folder, or a link."""
    if out is None:
        return
    refuse_output(out.parent)
    if not out.parent.is_dir():
        raise InputError(f"{out}: {out.parent} is not a folder; give a file in one that exists")
    if out.is_symlink() or (out.exists() and not out.is_file() and not out.is_dir()):
        raise InputError(f"{out}: is a link, a device or a pipe, which a file would replace; give a plain file")
    for path in inputs:
        if path and out.exists() and path.exists() and out.samefile(path):
            raise InputError(f"{out}: is read, so it would be replaced by the result; give another file")


def exit_code(program: str, work: Callable[[], int | None]) -> int:
    """Does the work of a command. Returns what it returns, or 1 after one line on stderr if a user can mend it."""
    try:
        return work() or 0
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader closed the pipe
        discard_output()
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"{program}: {reason}; give a path that can be written", file=sys.stderr)
    return 1
