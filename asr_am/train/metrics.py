"""What a run writes about itself: metrics.jsonl line by line, summary.json after every epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from asr_am.data.textfile import write_lines
from asr_am.distributed.strategy import Stats


class MetricsLog:
    """metrics.jsonl: one JSON object a line."""

    def __init__(self, path: Path, keep_bytes: int) -> None:
        """Keep the first `keep_bytes` of the file: lines after the checkpoint that a run resumes from are redone."""
        self._file = path.open("ab")
        self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()

    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


@dataclass
class Sums:
    """Totals over batches: cross-entropy, correct frames, frames, examples. Tensors stay on their device."""

    loss: Tensor | float = 0.0
    correct: Tensor | float = 0.0
    frames: float = 0.0
    examples: float = 0

    def add(self, stats: Stats) -> None:
        self.loss = self.loss + stats.loss_sum
        self.correct = self.correct + stats.correct
        self.frames += stats.weight
        self.examples += stats.examples

    def since(self, earlier: Sums) -> Sums:
        """What was added after `earlier`."""
        pairs = zip(self.state(), earlier.state(), strict=True)
        return Sums(*(now - then for now, then in pairs))

    def state(self) -> list[float]:
        return [float(self.loss), float(self.correct), self.frames, self.examples]

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / max(self.frames, 1)

    @property
    def accuracy(self) -> float:
        return float(self.correct) / max(self.frames, 1)


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write JSON under a temporary name, then rename."""
    write_lines(path, [json.dumps(summary, indent=1)])
