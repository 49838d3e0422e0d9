"""Progress of long work: a line that moves every second on a terminal, and a line of the log every half minute.

Bars nest. The outermost one is drawn, and shows the innermost one behind its own counts. Worker processes draw none.
A bar may have lines below it. The cursor rests at the bar, so that a message of any process takes the bar's place.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from rich.console import Console

Item = TypeVar("Item")
log = logging.getLogger(__name__)

REDRAW = 1.0  # seconds
LOG_EVERY = 30.0  # seconds
WIDTH = 24  # columns of the bar
ERASE = "\r\x1b[J"  # the line of the cursor, and the lines below it
PLAIN = "ASR_AM_PLAIN"  # variable that asks for lines of the log on a terminal as well

_drawing = threading.Lock()
# A worker that is forked while a bar is drawn would inherit the lock of the terminal.
os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)
_open: list[ProgressBar] = []  # from the outermost to the innermost one
_in_worker = False


class ProgressBar:
    """Counts finished items, and shows them with the time spent and the time left.

    Args:
        done: items that an earlier run has finished. They do not count for the time left.
        unit: name of the items, to show their rate. "" shows no rate.
        below: returns lines to draw below the bar.
    """

    def __init__(
        self, description: str, total: float, done: float = 0, unit: str = "",
        clock: Callable[[], float] = time.monotonic, below: Callable[[], Sequence[str]] = list,
    ) -> None:  # fmt: skip
        self.description, self.total, self.done, self.unit, self.status = description, total, done, unit, ""
        self._clock, self.below = clock, below
        self._first, self._begin = done, clock()
        self._logged = self._begin
        self._drawn, self._closed = False, threading.Event()

    def __enter__(self) -> ProgressBar:
        _open.append(self)
        self._console = Console(stderr=True)
        has_terminal = self._console.is_terminal and not self._console.is_dumb_terminal  # a dumb one cannot erase
        self._drawn = has_terminal and self._outermost() and not os.environ.get(PLAIN)
        if self._drawn:
            self._draw()
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _open.remove(self)
        self._closed.set()
        if self._drawn:
            self._ticker.join()
            self._write(ERASE)

    def advance(self, count: float = 1) -> None:
        """Counts finished items."""
        self.update(self.done + count)

    def update(self, done: float) -> None:
        """Sets the number of finished items."""
        self.done = done
        now = self._clock()
        if self._outermost() and now - self._logged >= LOG_EVERY:
            self._logged = now
            log.log(logging.DEBUG if self._drawn else logging.INFO, "%s: %s", self.description, ", ".join(self.parts()))

    def parts(self) -> list[str]:
        """Returns counts, time spent, time left, rate and status as text."""
        spent, finished = self._clock() - self._begin, self.done - self._first
        shown = [f"{self.done:,.0f}/{self.total:,.0f}", _hours(spent)]
        if finished > 0 and self.done <= self.total:
            shown.append(f"{_hours(spent / finished * (self.total - self.done))} left")
        if self.unit and finished > 0:
            shown.append(f"{finished / max(spent, 1e-9):,.3g} {self.unit}/s")
        inner = [f"{bar.description} {bar.done:,.0f}/{bar.total:,.0f}" for bar in _open[-1:] if bar is not self]
        return [text for text in (*shown, *inner, self.status) if text]

    def line(self, columns: int) -> str:
        """Returns the line that is drawn. The last parts are left out if the terminal is too narrow for them."""
        share = min(1.0, self.done / self.total) if self.total else 1.0
        filled = int(share * WIDTH)
        bar = f"  {self.description} {'━' * filled}{'·' * (WIDTH - filled)}"
        parts = "  ".join(self.parts()).split("  ")  # a status may have several
        while parts and len(f"{bar} {'  '.join(parts)}") >= columns:  # a full line would wrap
            parts.pop()
        return f"{bar} {'  '.join(parts)}"[: max(0, columns - 1)]

    def _outermost(self) -> bool:
        return _open[:1] == [self] and not _in_worker

    def _tick(self) -> None:
        while not self._closed.wait(REDRAW):
            self._draw()

    def _draw(self) -> None:
        columns, rows = self._console.size
        below = [line[: columns - 1] for line in self.below()]
        if len(below) > rows - 2:
            below[rows - 3 :] = [f"  and {len(below) - rows + 3} more"]
        up = f"\r\x1b[{len(below)}A" if below else ""
        self._write(ERASE + "\n".join([self.line(columns), *below]) + up)

    def _write(self, text: str) -> None:
        with _drawing:
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except (OSError, ValueError):  # the terminal is gone
                self._closed.set()


def track(iterable: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yields from `iterable`, and shows how many items are done, if their number is known."""
    count = total if total is not None else len(iterable) if isinstance(iterable, Sized) else 0
    if not count:
        yield from iterable
        return
    with ProgressBar(description, count) as bar:
        for item in iterable:
            yield item
            bar.advance()


def mute() -> None:
    """Shows nothing in this process, a forked worker."""
    global _in_worker
    _in_worker = True
    _open.clear()


def _hours(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
