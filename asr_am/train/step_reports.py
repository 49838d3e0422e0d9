"""What a learner shows of its steps on the terminal, and what the leader writes of all learners' steps."""

from __future__ import annotations

import math
from typing import NamedTuple

from asr_am.distributed.leases import Leases, LossSums, StepResult
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from asr_am.train.checkpoint import Checkpoints, TrainProgress
from asr_am.train.leadership import Leadership
from asr_am.train.learner_view import LearnerReport
from asr_am.train.trainable import Trainable


class Report(NamedTuple):
    """State at the last report.

    Attributes:
        time: time of the team's clock.
        totals: sums of the segment so far.
        number: updates of the team / `report_every`.
    """

    time: float
    totals: LossSums
    number: int


class StepReports:
    """The reports of one learner.

    Args:
        run: the run.
        team: this learner's end of the team.
        strategy: the learner's.
        leadership: says whether this learner leads.
        checkpoints: the run's.
    """

    def __init__(
        self, run: Trainable, team: Team, strategy: Strategy, leadership: Leadership, checkpoints: Checkpoints
    ) -> None:
        self._run, self._team, self._strategy = run, team, strategy
        self._leadership, self._checkpoints = leadership, checkpoints
        self._view = run.run_log.learner_view(run.learners, one_process=team.clock == "virtual" or team.size == 1)
        self._progress = TrainProgress()
        self._last, self._begin = Report(0.0, LossSums(), 0), 0.0

    def begin(self, progress: TrainProgress) -> None:
        """Begins a segment."""
        self._progress, self._begin = progress, self._team.now()
        self._last = Report(self._begin, LossSums(), progress.updates // self._run.options.report_every)

    def show(self, batches: int) -> None:
        """Shows this learner on the terminal, after so many batches of its own."""
        team = self._team
        if self._view.due(team.rank):
            idle, staleness = team.comm_stats.waiting_seconds, self._mean_staleness()
            report = LearnerReport(team.launch, batches, staleness, idle, team.restarts)
            self._view.report(team.rank, report, team.live_ranks())

    def write(self, step_result: StepResult, leases: Leases) -> None:
        """Every `report_every` updates, writes the means over all learners since the last report.

        Under a synchronous strategy all learners take part, because the totals are gathered.

        Raises:
            InputError: the loss is NaN or Inf.
        """
        run, last, update = self._run, self._last, int(step_result.lease.updates) + 1
        number = update // run.options.report_every
        if number <= last.number or not (self._strategy.synchronous or self._leadership.leads):
            return
        totals, now = leases.totals(), self._team.now()
        self._last = Report(now, totals, number)
        new = totals - last.totals
        require_finite(new.mean_loss, run, self._progress, self._checkpoints)
        if not self._leadership.leads:
            return
        self._checkpoints.terms.check()
        speed = new.frames / max(now - last.time, 1e-9)
        record = {
            "epoch": self._progress.epoch + 1,
            "batch": update,
            "loss": round(new.mean_loss, 6),
            **({"frame_accuracy": round(new.accuracy, 6)} if run.validation == "frame error" else {}),
            "lr": step_result.lr,
            "frames_per_second": round(speed),
        }
        seconds = self._progress.seconds + now - self._begin
        run.run_log.metrics(record, update, {"virtual_seconds": seconds} if self._team.clock == "virtual" else {})
        run.run_log.progress_bar.done(self._progress.done + totals.batches)
        run.run_log.progress_bar.status(f"loss {new.mean_loss:.3f}  {self._describe_speed(speed)}")

    def _mean_staleness(self) -> float:
        staleness = self._strategy.staleness
        return sum(k * n for k, n in staleness.items()) / max(sum(staleness.values()), 1)

    def _describe_speed(self, speed: float) -> str:
        unit, learners = self._run.unit, self._run.learners
        if self._team.size == 1:
            return f"{speed:,.0f} {unit}/s"
        distances = [record["consensus_distance"] for record in self._progress.history[-1:]]
        distance = f"  consensus distance {distances[0]:.3g}" if distances else ""
        return f"{speed / learners:,.0f} {unit}/s per learner  staleness {self._mean_staleness():.1f}{distance}"


def require_finite(loss: float, run: Trainable, progress: TrainProgress, checkpoints: Checkpoints) -> None:
    """Raises InputError if a mean loss is NaN or Inf."""
    if not math.isfinite(loss):
        raise InputError(
            f"{run.out}: the loss is {loss} in epoch {progress.epoch + 1}; {run.remedy}; last good checkpoint: "
            f"{checkpoints.newest()}"
        )
