"""The points of offline W&B runs: all that were logged, and those that W&B has written to its files.

W&B writes its files some time after a point is logged. When a run is killed, its last points are in none, and a resumed
run begins after them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

FILE_HEADER, BLOCK, HEADER = 7, 32768, 7  # bytes
WHOLE, LAST = 1, 4  # kinds of chunks that end a message


class PointJournal:
    """Every point that was logged, in a file of its own.

    Args:
        path: the file, with a line [step, record] per point.
        segments: files of W&B that earlier processes have written for the run.
    """

    def __init__(self, path: Path, segments: Iterable[Path]) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._before = [point for point in map(_point, lines) if point is not None]
        self._segments = list(segments)
        self._file = path.open("a", encoding="utf-8", buffering=1)  # a line at a time, so that a kill loses none
        if lines and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def note(self, record: Mapping[str, Any], step: int) -> None:
        """Writes a point."""
        self._file.write(json.dumps([step, record]) + "\n")

    def due(self, record: Mapping[str, Any], step: int) -> list[tuple[int, dict[str, Any]]]:
        """Returns the points that W&B must be given with this one: those that are in no file, and this one.

        A resumed run logs the points after its checkpoint again. Those in a file already are left out.
        """
        lost, self._before = [point for point in self._before if self._written < point[0] <= step], []
        return [*lost, (step, dict(record))] if step > self._written else []

    @cached_property
    def _written(self) -> int:
        """The last step in the files of W&B. To read them W&B must be imported."""
        return max((step for segment in self._segments for step in steps(segment)), default=-1)

    def close(self) -> None:
        self._file.close()


def _point(line: str) -> tuple[int, dict[str, Any]] | None:
    """Reads a line of the journal. Returns None if it was cut off."""
    try:
        step, record = json.loads(line)
    except ValueError:
        return None
    return int(step), dict(record)


def steps(segment: Path) -> Iterator[int]:
    """Yields the steps of the points in a file of W&B, as far as it was written."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for message in messages(segment.read_bytes()):
        try:
            record = Record.FromString(message)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def messages(data: bytes) -> Iterator[bytes]:
    """Splits a file of W&B into messages. It has LevelDB's log format after a header of 7 bytes."""
    position, message = FILE_HEADER, b""
    while position + HEADER <= len(data):
        left = -position % BLOCK
        if 0 < left < HEADER:
            position += left  # the rest of a block is too short for a header
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        position += HEADER + length
        if position > len(data):  # cut off
            return
        message += data[position - length : position]
        if kind in (WHOLE, LAST):
            yield message
            message = b""
