"""One learner's training: segments of steps that its strategy takes, held-out loss after each epoch, nothing lost when
killed.

All learners of a team run this same loop. Where it says *coordinator*, one of them acts for all: the living learner
with the lowest rank, as all agreed when they last were at rest.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import LearnerLost, Leases, LossSums, Segment, SegmentRecord, StaleSegment, StepResult
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.team import SingleProcess, Team
from asr_am.egs.loader import Plan
from asr_am.errors import InputError
from asr_am.model.model_file import save_model
from asr_am.train.comm_metrics import Measures, load_usage, measure, usage_state
from asr_am.train.gradient import GradientComputer
from asr_am.train.run_log import Tracker
from asr_am.train.run_setup import RunSetup, StrategyFactory
from asr_am.train.schedule import Schedule
from asr_am.train.train_options import TrainOptions, cores

log = logging.getLogger(__name__)
REL_TOL = 1e-6  # relative difference of sums that are only added in another order, or by another kind of CPU


def train(
    egs_dir: Path, out: Path, options: TrainOptions, *, strategy: StrategyFactory = Local,
    tracker: Tracker | None = None, provenance: Mapping[str, object] | None = None, team: Team | None = None,
    servers: int = 0, faults: Faults | None = None,
) -> None:  # fmt: skip
    """Train on the sets `train` and `dev` of `egs_dir` as one learner of `team`; go on from `out`/checkpoints if any.

    servers: the last ranks of the team, which only serve the others' parameters, on the CPU. faults: that the team has.

    Writes into `out`: best.pt (`load_acoustic_model` reads it), metrics.jsonl, leases.jsonl, summary.json, checkpoints.
    InputError for damaged examples or checkpoints, where the loss stops being a number, and where the strategy cannot
    do with the faults.
    """
    team = team or SingleProcess()
    torch.set_num_threads(options.threads or (cores() if team.size == 1 else 1))
    learners = team.size - servers
    setup = RunSetup(
        egs_dir, out, options if team.rank < learners else replace(options, device="cpu"), strategy, learners=learners,
        tracker=tracker, provenance=provenance,
    )  # fmt: skip
    try:
        run = Trainer(setup, team)
        run.strategy.check(faults or Faults())
        run.train()
    finally:
        setup.run_log.close()
        team.close()


@dataclass
class TrainProgress:
    """Where a run stands. done: batches of the current epoch. updates: of the whole team. totals: of the finished
    segments of the epoch. seconds: of training, without validation. kept: bytes of metrics.jsonl and leases.jsonl.
    history: one record per finished epoch.
    """

    epoch: int = 0
    done: int = 0
    updates: int = 0
    updates_before: int = 0
    frames: float = 0.0
    seconds: float = 0.0
    best_loss: float = math.inf
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0])
    kept: list[int] = field(default_factory=lambda: [0, 0])
    history: list[dict[str, float]] = field(default_factory=list)
    seconds_per_epoch: list[float] = field(default_factory=list)
    batches_per_learner: dict[int, int] = field(default_factory=dict)


def after_epoch(progress: TrainProgress, loss: float, error: float, measures: Measures) -> TrainProgress:
    """Where a run stands after an epoch, of held-out loss and frame error, whose last segment is done."""
    totals = LossSums(*progress.totals)  # type: ignore[arg-type]
    record = {
        "epoch": progress.epoch + 1,
        "heldout_loss": round(loss, 6),
        "heldout_frame_error": round(error, 6),
        "train_loss": round(totals.mean_loss, 6),
        "train_frame_accuracy": round(totals.accuracy, 6),
        "consensus_distance": measures.consensus_distance,
    }
    seconds = round(progress.seconds - sum(progress.seconds_per_epoch), 3)
    return replace(
        progress, epoch=progress.epoch + 1, done=0, updates_before=progress.updates, frames=progress.frames + totals.frames,
        best_loss=min(loss, progress.best_loss), totals=list(astuple(LossSums())), history=[*progress.history, record],
        seconds_per_epoch=[*progress.seconds_per_epoch, seconds],
    )  # fmt: skip


class Trainer:
    """One learner's part in a training run, or that of a rank which only serves parameters."""

    def __init__(self, setup: RunSetup, team: Team) -> None:
        self.setup, self.options, self.team = setup, setup.options, team
        self.run_log, self.learners = setup.run_log, setup.learners
        self.learner, self.strategy = setup.learner(team)
        self.checkpoints = setup.checkpoints(self.strategy.name)
        self.progress = TrainProgress()
        self._leader: int | None = None
        self._rejoined = team.incarnation == 0

    @property
    def _is_leader(self) -> bool:
        return self._leader == self.team.rank

    def train(self) -> None:
        """From the newest checkpoint to the last epoch, or to where the schedule ends."""
        self._begin()
        while self.progress.epoch < self.options.epochs and (schedule := self._schedule()):
            try:
                self._do_segment(schedule)
            except StaleSegment:
                self.team.sleep(0.5)  # the others are about to finish a newer checkpoint
                self._resume()

    def _schedule(self) -> Schedule | None:
        """Of the current epoch; None where the schedule ended the training."""
        return self.options.schedule.after([record["heldout_loss"] for record in self.progress.history])

    # where a run begins

    def _begin(self) -> None:
        if self.team.incarnation > 0:
            self._resume()
            return
        w = self.learner.params.w.cpu().double()
        on_gpu = float(self.learner.device.type == "cuda")
        own = [float(w.abs().sum()), float(w.square().sum()), on_gpu]
        rows = self.team.gather(torch.tensor(own, dtype=torch.float64))
        if not all(torch.allclose(row[:2], rows[self.team.rank][:2], rtol=REL_TOL) for row in rows.values()):
            raise InputError("the learners begin with different weights; have they the same software and examples?")
        if len({bool(row[2]) for rank, row in rows.items() if rank < self.learners}) > 1:
            raise InputError("some learners have a GPU and some have none; mend these, or set train.device=cpu")
        self._leader = min(rows)  # who opens the journal once it is known where the run goes on
        self._resume()
        places = self.team.gather(torch.tensor([self.progress.epoch, self.progress.done], dtype=torch.float64))
        if not all(torch.equal(place, places[self.team.rank]) for place in places.values()):
            raise InputError("the learners see different checkpoints; start again once all hosts see the same files")
        if self._is_leader:
            if self.team.size == 1:
                where = f"{self.learner.device}, {torch.get_num_threads()} threads"
            else:
                where = f"{self.strategy.name} on {self.learners} learners, {self.learner.device.type}"
                where += f" and {servers} servers" if (servers := self.team.size - self.learners) else ""
            frames = int(self.setup.plan(self.progress.epoch).frames_N.sum())
            log.info("%d parameters, %d training frames, %s", len(w), frames, where)
            self.run_log.open((self.progress.kept[0], self.progress.kept[1]))

    def _elect_leader(self, rows: Mapping[int, object]) -> None:
        """The coordinator, until the team is at rest again, is the first of those that took part in a gather."""
        self._leader = min(rows)
        if self._is_leader:
            self.run_log.open(None)

    def _resume(self) -> None:
        """Take up the newest checkpoint, if there is one. Who was dead when it was made takes another's part of it."""
        state = self.checkpoints.load()
        if state is None:
            return
        try:
            self.progress = TrainProgress(**state["cursor"])
            own = self.checkpoints.load_learner(self.team.rank) if self.team.rank in state["members"] else None
            part = own or self.checkpoints.load_learner(state["members"][0])
            self.strategy.load_state_dict(part["strategy"])
            if own is None:  # what another has counted is the other's
                self.strategy.staleness.clear()
                self.strategy.metrics.clear()
            elif self.team.incarnation == 0:
                load_usage(self.team.comm_stats, own["usage"])
                torch.set_rng_state(own["rng"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
            raise InputError(
                f"{self.checkpoints.newest()}: is not complete ({error}); remove it to go on from the one before"
            ) from error
        if self._is_leader:
            log.info("goes on from %s", self.checkpoints.newest())

    # segments

    def _do_segment(self, schedule: Schedule) -> None:
        """Steps up to the next checkpoint, or to the end of the epoch."""
        progress, team, plan = self.progress, self.team, self.setup.plan(self.progress.epoch)
        leases = team.leases(self._segment(plan), self.strategy.synchronous)
        if not self._rejoined:
            self.strategy.rejoin()
            self._rejoined = True
        gradients = GradientComputer(self.learner, plan, leases, schedule, read_ahead=team.clock == "wall")
        gradient = team.timed(gradients) if team.rank < self.learners else no_gradient
        if self._is_leader:
            self.run_log.progress_bar.epoch(progress.epoch, len(plan), progress.done)
        begin = team.now()
        self._reported = begin, LossSums(), progress.updates // self.options.report_every
        while (step_result := self.strategy.step(gradient)) is not None:
            leases.complete(step_result)
            self._report(step_result, leases)
        self.strategy.drain()
        self._finish_segment(plan, leases.record(), leases.totals(), team.now() - begin)
        if progress.done == len(plan):
            self._finish_epoch()
        self._checkpoint()

    def _segment(self, plan: Plan) -> Segment:
        """The next batches of the epoch; a checkpoint follows after `checkpoint_every` updates of the team."""
        progress = self.progress
        end = min(progress.done + self.options.checkpoint_every * self.learners, len(plan))
        first, last = progress.done * plan.batch_size, end * plan.batch_size
        frames_N = plan.frames_N[first:last]
        frames = np.add.reduceat(frames_N, np.arange(0, len(frames_N), plan.batch_size))
        return Segment(
            progress.epoch, progress.done, end, len(plan), tuple(frames.tolist()), progress.updates_before, self.learners
        )  # fmt: skip

    def _report(self, step_result: StepResult, leases: Leases) -> None:
        """Now and then, the means over all learners since the last report. In step, all must take part."""
        then, before, reports = self._reported
        update = int(step_result.lease.updates) + 1
        due = update // self.options.report_every
        if due <= reports or not (self.strategy.synchronous or self._is_leader):
            return
        totals, now = leases.totals(), self.team.now()
        self._reported = now, totals, due
        new = totals - before
        self._require_finite(new.mean_loss)
        if not self._is_leader:
            return
        speed = new.frames / max(now - then, 1e-9)
        record = {
            "epoch": self.progress.epoch + 1,
            "batch": update,
            "loss": round(new.mean_loss, 6),
            "frame_accuracy": round(new.accuracy, 6),
            "lr": step_result.lr,
            "frames_per_second": round(speed),
        }
        self.run_log.metrics(record, update)
        self.run_log.progress_bar.done(self.progress.done + totals.batches)
        self.run_log.progress_bar.status(f"loss {new.mean_loss:.3f}  {self._progress(speed)}")

    def _progress(self, speed: float) -> str:
        if self.team.size == 1:
            return f"{speed:,.0f} frames/s"
        staleness = self.strategy.staleness
        mean = sum(k * n for k, n in staleness.items()) / max(sum(staleness.values()), 1)
        distances = [record["consensus_distance"] for record in self.progress.history[-1:]]
        apart = f"  consensus distance {distances[0]:.3g}" if distances else ""
        return f"{speed / self.learners:,.0f} frames/s a learner  staleness {mean:.1f}{apart}"

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"{self.setup.out}: the loss is {loss} in epoch {self.progress.epoch + 1}; last good checkpoint: "
                f"{self.checkpoints.newest()}; try a smaller schedule.base or train.optimizer.clip_norm"
            )

    def _finish_segment(self, plan: Plan, record: SegmentRecord, totals: LossSums, seconds: float) -> None:
        """Audit the leases, and move the cursor."""
        progress, segment = self.progress, record.segment
        totals += LossSums(*progress.totals)  # type: ignore[arg-type]
        self._require_finite(totals.mean_loss)
        self.learner.params.check()
        chunks = [min(plan.batch_size, len(plan.utterance_N) - n * plan.batch_size) for n in range(len(plan))]
        record.audit(chunks[segment.begin : segment.end])
        for completion in record.completions:
            progress.batches_per_learner[completion.owner] = progress.batches_per_learner.get(completion.owner, 0) + 1
        progress.done = segment.end
        progress.updates = progress.updates_before + -(-segment.end // self.learners)
        progress.totals = list(astuple(totals))
        rows = self.team.gather(torch.tensor([seconds], dtype=torch.float64))
        progress.seconds += max(float(row) for row in rows.values())  # who was restarted has not seen all of it
        self._elect_leader(rows)
        if self._is_leader:
            self.run_log.leases(record)

    def _finish_epoch(self) -> None:
        """The coordinator validates and writes the epoch's files, then tells all; if it dies over it, another does."""
        consensus = self.strategy.consensus()
        measures = measure(self.team, self.strategy, consensus)
        while True:
            scores = self._validate(consensus, measures) if self._is_leader else (0.0, 0.0)
            rows = self.team.gather(torch.tensor(scores, dtype=torch.float64))
            if self._leader in rows:
                break
            self._elect_leader(rows)
        loss, error = rows[self._leader].tolist()
        self._require_finite(loss)
        self.progress = after_epoch(self.progress, loss, error, measures)

    def _validate(self, consensus: Tensor, measures: Measures) -> tuple[float, float]:
        """Held-out loss and frame error, and the files that tell of them."""
        loss, error = self.setup.validator(consensus)
        if math.isfinite(loss):
            self._write_epoch(after_epoch(self.progress, loss, error, measures), measures)
        return loss, error

    def _write_epoch(self, progress: TrainProgress, measures: Measures) -> None:
        """Best model, metrics and summary as of `cursor`, after the epoch; who coordinated before may have begun it."""
        record = progress.history[-1]
        if progress.best_loss < self.progress.best_loss:
            self._save_best(record)
        line = {**record, "batch": progress.updates}
        if json.dumps(line) not in (self.setup.out / "metrics.jsonl").read_text().splitlines():
            self.run_log.metrics(line, progress.updates)
        loss, error = record["heldout_loss"], record["heldout_frame_error"]
        message = f"epoch {progress.epoch}: held-out loss {loss:.4f}, frame error {error:.2%}"
        log.info("%s, training loss %.4f", message, record["train_loss"])
        self.run_log.progress_bar.status(message)
        self.run_log.summary(self._summary(progress, measures))

    def _save_best(self, record: dict[str, float]) -> None:
        setup = self.setup
        info = {
            "kind": setup.egs.info.kind, "chunk": setup.egs.info.chunk, "pdf_counts": setup.pdf_counts_P,
            "senones": setup.egs.info.senones, "epoch": record["epoch"], "heldout_loss": record["heldout_loss"],
            **setup.provenance,
        }  # fmt: skip
        save_model(setup.out / "best.pt", setup.validator.model, info)

    def _checkpoint(self) -> None:
        """Save everything; the team is at rest. It comes last: whoever is killed before it does the segment again."""
        state = {
            "strategy": self.strategy.state_dict(),
            "usage": usage_state(self.team.comm_stats),
            "rng": torch.get_rng_state(),
        }
        self.checkpoints.save_learner(self.progress.updates, self.team.rank, state)
        members = self.team.gather(torch.zeros(0, dtype=torch.float64))
        lost = set(range(self.team.size)) - members.keys()
        if not self.strategy.fault_tolerant and lost:
            raise LearnerLost(min(lost), "died before its part of a checkpoint was saved")
        self._elect_leader(members)
        if self._is_leader:
            self.progress.kept = list(self.run_log.sizes())
            self.checkpoints.commit(
                self.progress.updates, {"cursor": asdict(self.progress), "members": sorted(members)}
            )

    def _summary(self, progress: TrainProgress, measures: Measures) -> dict[str, Any]:
        options = self.options
        best = min(progress.history, key=lambda record: record["heldout_loss"])
        return {
            "strategy": self.strategy.name,
            "learners": self.learners,
            "batch": options.batch_size,
            "epochs": options.epochs,
            "epochs_done": progress.epoch,
            "best_epoch": best["epoch"],
            "heldout_loss": [record["heldout_loss"] for record in progress.history],
            "heldout_frame_error": [record["heldout_frame_error"] for record in progress.history],
            "train_loss": [record["train_loss"] for record in progress.history],
            "seconds": round(progress.seconds, 3),
            "seconds_per_epoch": progress.seconds_per_epoch,
            "clock": self.team.clock,
            "frames_per_second": round(progress.frames / max(progress.seconds, 1e-9)),
            "batches_per_learner": progress.batches_per_learner,
            **asdict(measures),
            "consensus_distance": [record["consensus_distance"] for record in progress.history],
            "parameters": len(self.learner.params),
            "optimizer": options.optimizer.kind,
            "momentum": options.optimizer.momentum,
            "schedule": asdict(options.schedule),
            "seed": options.seed,
            **self.setup.provenance,
        }


def no_gradient(on_bucket: BucketHook | None) -> StepResult | None:
    """Of who computes none."""
    return None
