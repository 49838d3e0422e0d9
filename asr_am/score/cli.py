"""Shared by the commands that report bad options and bad input alike: one line on stderr, and exit code 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from asr_am.errors import InputError


class CommandLineParser(argparse.ArgumentParser):
    """Argument parser that raises InputError for bad options instead of exiting with code 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists the options")


def exit_code(program: str, work: Callable[[], object]) -> int:
    """Does the work of a command. Returns 0, or 1 after one line on stderr about bad input or a path to write."""
    try:
        work()
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"{program}: {error.filename}: {error.strerror}; give a path that can be written", file=sys.stderr)
        return 1
    return 0
