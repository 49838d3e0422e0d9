"""Shows each learner of a run on a line of its own, below the progress bar.

Learners report about once a second. Those of a virtual cluster share the view. Real processes leave their reports in
files beside the checkpoints, since under an asynchronous strategy nobody hears of all others. The leader reads them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

EVERY = 1.0  # seconds between two reports of a learner
NAME = ".learner-{}.json"


@dataclass(frozen=True)
class LearnerReport:
    """State of one learner.

    Attributes:
        launch: identity of its launch.
        batches: batches that it has completed in the run.
        staleness: mean staleness of its updates.
        waiting_seconds: seconds that it has waited for others.
        restarts: number of its restarts.
    """

    launch: str
    batches: int
    staleness: float
    waiting_seconds: float
    restarts: int


class LearnerView:
    """The learners of a run.

    Args:
        folder: where processes leave their reports. None: all learners are in this process.
        learners: number of learners. A single one is not shown.
    """

    def __init__(self, folder: Path | None, learners: int) -> None:
        self._folder, self._learners = folder, learners
        self._due: dict[int, float] = {}
        self._reports: dict[int, LearnerReport] = {}
        self._alive: Sequence[int] = range(learners)

    def due(self, rank: int) -> bool:
        """Returns True if it is time for this learner to report."""
        now = time.monotonic()
        if self._learners == 1 or now < self._due.get(rank, 0.0):
            return False
        self._due[rank] = now + EVERY
        return True

    def report(self, rank: int, report: LearnerReport, alive: Sequence[int]) -> None:
        """Takes a learner's report.

        Args:
            rank: the learner.
            report: its state.
            alive: the learners that it knows to be alive.
        """
        self._reports[rank], self._alive = report, alive
        if self._folder is not None:
            path = self._folder / NAME.format(rank)
            new = path.with_suffix(".tmp")
            with suppress(OSError):  # a full disk ends the run elsewhere
                new.write_text(json.dumps(asdict(report)))
                new.replace(path)

    def lines(self) -> list[str]:
        """Returns a line for each learner."""
        if self._learners == 1 or not self._reports:
            return []
        launch = next(iter(self._reports.values())).launch
        return [self._line(rank, self._find(rank), launch) for rank in range(self._learners)]

    def _find(self, rank: int) -> LearnerReport | None:
        if self._folder is not None:
            with suppress(OSError, ValueError, TypeError):
                return LearnerReport(**json.loads((self._folder / NAME.format(rank)).read_text()))
        return self._reports.get(rank)

    def _line(self, rank: int, report: LearnerReport | None, launch: str) -> str:
        state = "alive" if rank in self._alive else "dead"
        if report is None or report.launch != launch:  # left by an earlier launch
            return f"  learner {rank:<3} no batch yet  {state}"
        state += f", restarted {report.restarts} x" if report.restarts else ""
        return (
            f"  learner {rank:<3} {report.batches:>7,} batches  staleness {report.staleness:.1f}  "
            f"waited {report.waiting_seconds:,.1f} s  {state}"
        )
