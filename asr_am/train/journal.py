"""The files that one learner, the coordinator, writes for the whole run: metrics, lease log, summary, best model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asr_am.data.textfile import write_lines
from asr_am.distributed.leases import Record, record_to_json
from asr_am.train.display import Display
from asr_am.train.tracking import Tracker


class JsonLines:
    """A file of one JSON object a line."""

    def __init__(self, path: Path, keep_bytes: int | None) -> None:
        """Keep the first `keep_bytes` of the file, or all: lines after the checkpoint a run resumes from are redone."""
        self._file = path.open("ab")
        if keep_bytes is not None:
            self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()

    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class Journal:
    """metrics.jsonl, leases.jsonl, summary.json, the tracker and the progress line of the run in `out`.

    Only the coordinator writes; another learner that takes its place opens the journal then.
    """

    def __init__(self, out: Path, tracker: Tracker, display: Display, config: Mapping[str, Any]) -> None:
        self.out, self.tracker, self.display, self._config = out, tracker, display, config
        self._is_open = False

    def open(self, keep: tuple[int, int] | None) -> None:
        """Open for writing, once. keep: bytes of metrics.jsonl and leases.jsonl to keep; None: all."""
        if self._is_open:
            return
        self._metrics = JsonLines(self.out / "metrics.jsonl", keep[0] if keep else None)
        self._leases = JsonLines(self.out / "leases.jsonl", keep[1] if keep else None)
        self.tracker.start(self.out, self._config)
        self.display.start()
        self._is_open = True

    def sizes(self) -> tuple[int, int]:
        return self._metrics.size(), self._leases.size()

    def metrics(self, record: Mapping[str, Any], step: int) -> None:
        self._metrics.write(record)
        self.tracker.log(record, step)

    def leases(self, record: Record) -> None:
        self._leases.write(record_to_json(record))

    def summary(self, summary: Mapping[str, Any]) -> None:
        write_lines(self.out / "summary.json", [json.dumps(summary, indent=1)])

    def close(self) -> None:
        if self._is_open:
            self.display.stop()
            self.tracker.finish()
            self._metrics.close()
            self._leases.close()
            self._is_open = False
