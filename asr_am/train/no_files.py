"""Checkpoints and log of a training run that writes no files: what the training loop asks of both, and nothing done."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asr_am.distributed.launch_spec import EXIT_FAILURE
from asr_am.distributed.leases import SegmentRecord
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.leadership import Terms
from asr_am.train.learner_view import LearnerView
from asr_am.train.run_log import RunLog, TrainingBar
from asr_am.train.tracking import NoTracker

log = logging.getLogger(__name__)


class NoTerms(Terms):
    """The terms of leaders that write nothing."""

    def __init__(self) -> None:
        super().__init__(Path())

    def open(self, launch: str, rejoins: bool = False) -> None:
        if rejoins:
            log.error("a learner that died can rejoin only a run with checkpoints: give train_model `out`")
            sys.exit(EXIT_FAILURE)  # the others go on

    def claim(self, leader: str, confirm: Callable[[], None]) -> None:
        pass

    def check(self) -> None:
        pass


class NoCheckpoints(Checkpoints):
    """What the training loop asks of checkpoints, for a run without files."""

    on_disk = False

    def __init__(self) -> None:
        self.fingerprint, self.terms = "", NoTerms()

    def save_learner(self, updates: int, rank: int, state: dict[str, Any]) -> None:
        pass

    def save_survivor(self, updates: int, rank: int, saved: dict[str, Any]) -> None:
        pass

    def load_survivors(self) -> dict[int, dict[str, Any]]:
        return {}

    def remove_survivors(self) -> None:
        pass

    def best_model(self, updates: int) -> Path:
        return Path()

    def completed(self, updates: int) -> bool:
        return False

    def commit(self, updates: int, state: dict[str, Any]) -> None:
        pass

    def publish(self, out: Path) -> None:
        pass

    def set_damaged_aside(self) -> None:
        pass

    def load(self) -> dict[str, Any] | None:
        return None

    def newest(self) -> str:
        return "none"


class NoRunLog(RunLog):
    """What the training loop asks of its log, for a run without files."""

    def __init__(self, epochs: int) -> None:
        super().__init__(Path(), NoTracker(), TrainingBar(epochs), {})

    def open(self, keep: tuple[int | None, int], writer: str = "", check: Callable[[], None] = lambda: None) -> None:
        pass

    def learner_view(self, learners: int, one_process: bool) -> LearnerView:
        return super().learner_view(learners, one_process=True)

    def sync(self) -> tuple[int, int]:
        return 0, 0

    def metrics(self, record: Mapping[str, Any], step: int, curves: Mapping[str, float]) -> None:
        pass

    def epoch(self, record: Mapping[str, Any], updates: int, curves: Mapping[str, float]) -> None:
        pass

    def leases(self, record: SegmentRecord, launch: str) -> None:
        pass

    def summary(self, summary: Mapping[str, Any]) -> None:
        pass
