"""Where a stage's messages go: all of them to its log file, short lines to the terminal."""

from __future__ import annotations

import errno
import logging
import re
import sys
from pathlib import Path
from typing import TextIO

NO_LOG = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class LogFile(logging.FileHandler):
    """A log file in `exp/<corpus>/log`, which a full disk cuts short.

    It begins when `exp/<corpus>` exists, so that a stage that cannot start makes no folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message. Raises OSError if the file cannot be made."""
        if self.stream is None:
            if not self.path.parents[1].is_dir():
                return
            try:
                self.path.parent.mkdir(exist_ok=True)
                self.stream = self._open()
            except OSError as error:
                if error.errno in NO_LOG:  # a stage that is up to date needs none
                    return
                raise
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores a failure to write. Prints other errors, which are mistakes in the call."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes messages to a terminal or a file. Erases a progress bar on the terminal before, which redraws itself."""

    def format(self, record: logging.LogRecord) -> str:
        erase = "\r\x1b[J" if self.stream.isatty() and sys.stderr.isatty() else ""
        return erase + super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores a closed terminal or pipe, as after `| head`: the log file has everything."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class FinalPaths(logging.Formatter):
    """Names outputs by their final paths: a target is built in `<out>.partial`, which is renamed unless it fails."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return re.sub(r"\.partial(?=[/:])", "", text) if record.levelno < logging.ERROR else text


def _is_wanted(record: logging.LogRecord) -> bool:
    """Returns False for lhotse's warning of several sampling rates. It names no file, and stage 0 counts them."""
    return "different sampling rates" not in str(record.msg)


def start_logging(path: Path | None, quiet: bool = False) -> None:
    """Starts logging: everything to a file unless it is None, INFO to stdout in short lines, warnings to stderr."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    console = ConsoleHandler(sys.stdout)
    console.setFormatter(FinalPaths("  %(message)s"))
    console.addFilter(lambda record: logging.INFO <= record.levelno < logging.WARNING and not quiet)
    problems = ConsoleHandler(sys.stderr)
    problems.setFormatter(FinalPaths("%(levelname)s %(message)s"))
    problems.setLevel(logging.WARNING)
    root.addHandler(console)
    root.addHandler(problems)
    if path is not None:
        file = LogFile(path)
        file.setFormatter(FinalPaths("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(file)
    root.setLevel(logging.INFO)
    root.addFilter(_is_wanted)  # lhotse logs to the root logger itself
    for ours in ("asr_am", "local"):  # details, such as each pass of the GMM training, go to the file only
        logging.getLogger(ours).setLevel(logging.DEBUG)
    for noisy in ("hydra", "matplotlib", "wandb", "lhotse", "fontTools"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
