"""Argument parser shared by the commands that report bad options and bad input alike."""

from __future__ import annotations

import argparse
from typing import NoReturn

from asr_am.errors import InputError


class CommandLineParser(argparse.ArgumentParser):
    """Argument parser that raises InputError for bad options instead of exiting with code 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists the options")
