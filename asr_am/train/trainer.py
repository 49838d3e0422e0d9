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
from asr_am.distributed.flat_params import OnBucket
from asr_am.distributed.leases import LearnerLost, Leases, Outdated, Record, Segment, Stats, Totals
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.team import Alone, Team
from asr_am.egs.loader import Plan
from asr_am.errors import InputError
from asr_am.model.model_file import save_model
from asr_am.train.comm_metrics import Measures, load_usage, measure, usage_state
from asr_am.train.gradient import SegmentGradients
from asr_am.train.run_log import Tracker
from asr_am.train.run_setup import Material, StrategyFactory
from asr_am.train.schedule import Schedule
from asr_am.train.train_options import TrainOptions, cores

log = logging.getLogger(__name__)
SAME = 1e-6  # relative difference of sums that are only added in another order, or by another kind of CPU


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
    team = team or Alone()
    torch.set_num_threads(options.threads or (cores() if team.size == 1 else 1))
    learners = team.size - servers
    material = Material(
        egs_dir, out, options if team.rank < learners else replace(options, device="cpu"), strategy, learners=learners,
        tracker=tracker, provenance=provenance,
    )  # fmt: skip
    try:
        run = Run(material, team)
        run.strategy.check(faults or Faults())
        run.train()
    finally:
        material.journal.close()
        team.close()


@dataclass
class Cursor:
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


def after_epoch(cursor: Cursor, loss: float, error: float, measures: Measures) -> Cursor:
    """Where a run stands after an epoch, of held-out loss and frame error, whose last segment is done."""
    totals = Totals(*cursor.totals)  # type: ignore[arg-type]
    record = {
        "epoch": cursor.epoch + 1,
        "heldout_loss": round(loss, 6),
        "heldout_frame_error": round(error, 6),
        "train_loss": round(totals.mean_loss, 6),
        "train_frame_accuracy": round(totals.accuracy, 6),
        "consensus_distance": measures.consensus_distance,
    }
    seconds = round(cursor.seconds - sum(cursor.seconds_per_epoch), 3)
    return replace(
        cursor, epoch=cursor.epoch + 1, done=0, updates_before=cursor.updates, frames=cursor.frames + totals.frames,
        best_loss=min(loss, cursor.best_loss), totals=list(astuple(Totals())), history=[*cursor.history, record],
        seconds_per_epoch=[*cursor.seconds_per_epoch, seconds],
    )  # fmt: skip


class Run:
    """One learner's part in a training run, or that of a rank which only serves parameters."""

    def __init__(self, material: Material, team: Team) -> None:
        self.material, self.options, self.team = material, material.options, team
        self.journal, self.learners = material.journal, material.learners
        self.learner, self.strategy = material.learner(team)
        self.checkpoints = material.checkpoints(self.strategy.name)
        self.cursor = Cursor()
        self._coordinator: int | None = None
        self._joined = team.incarnation == 0

    @property
    def _coordinates(self) -> bool:
        return self._coordinator == self.team.rank

    def train(self) -> None:
        """From the newest checkpoint to the last epoch, or to where the schedule ends."""
        self._begin()
        while self.cursor.epoch < self.options.epochs and (schedule := self._schedule()):
            try:
                self._do_segment(schedule)
            except Outdated:
                self.team.sleep(0.5)  # the others are about to finish a newer checkpoint
                self._resume()

    def _schedule(self) -> Schedule | None:
        """Of the current epoch; None where the schedule ended the training."""
        return self.options.schedule.after([record["heldout_loss"] for record in self.cursor.history])

    # where a run begins

    def _begin(self) -> None:
        if self.team.incarnation > 0:
            self._resume()
            return
        w = self.learner.params.w.cpu().double()
        on_gpu = float(self.learner.device.type == "cuda")
        own = [float(w.abs().sum()), float(w.square().sum()), on_gpu]
        rows = self.team.gather(torch.tensor(own, dtype=torch.float64))
        if not all(torch.allclose(row[:2], rows[self.team.rank][:2], rtol=SAME) for row in rows.values()):
            raise InputError("the learners begin with different weights; have they the same software and examples?")
        if len({bool(row[2]) for rank, row in rows.items() if rank < self.learners}) > 1:
            raise InputError("some learners have a GPU and some have none; mend these, or set train.device=cpu")
        self._coordinator = min(rows)  # who opens the journal once it is known where the run goes on
        self._resume()
        places = self.team.gather(torch.tensor([self.cursor.epoch, self.cursor.done], dtype=torch.float64))
        if not all(torch.equal(place, places[self.team.rank]) for place in places.values()):
            raise InputError("the learners see different checkpoints; start again once all hosts see the same files")
        if self._coordinates:
            if self.team.size == 1:
                where = f"{self.learner.device}, {torch.get_num_threads()} threads"
            else:
                where = f"{self.strategy.name} on {self.learners} learners, {self.learner.device.type}"
                where += f" and {servers} servers" if (servers := self.team.size - self.learners) else ""
            frames = int(self.material.plan(self.cursor.epoch).frames_N.sum())
            log.info("%d parameters, %d training frames, %s", len(w), frames, where)
            self.journal.open((self.cursor.kept[0], self.cursor.kept[1]))

    def _agree(self, rows: Mapping[int, object]) -> None:
        """The coordinator, until the team is at rest again, is the first of those that took part in a gather."""
        self._coordinator = min(rows)
        if self._coordinates:
            self.journal.open(None)

    def _resume(self) -> None:
        """Take up the newest checkpoint, if there is one. Who was dead when it was made takes another's part of it."""
        state = self.checkpoints.load()
        if state is None:
            return
        try:
            self.cursor = Cursor(**state["cursor"])
            own = self.checkpoints.load_learner(self.team.rank) if self.team.rank in state["members"] else None
            part = own or self.checkpoints.load_learner(state["members"][0])
            self.strategy.load_state_dict(part["strategy"])
            if own is None:  # what another has counted is the other's
                self.strategy.staleness.clear()
                self.strategy.counts.clear()
            elif self.team.incarnation == 0:
                load_usage(self.team.usage, own["usage"])
                torch.set_rng_state(own["rng"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
            raise InputError(
                f"{self.checkpoints.newest()}: is not complete ({error}); remove it to go on from the one before"
            ) from error
        if self._coordinates:
            log.info("goes on from %s", self.checkpoints.newest())

    # segments

    def _do_segment(self, schedule: Schedule) -> None:
        """Steps up to the next checkpoint, or to the end of the epoch."""
        cursor, team, plan = self.cursor, self.team, self.material.plan(self.cursor.epoch)
        leases = team.leases(self._segment(plan), self.strategy.in_step)
        if not self._joined:
            self.strategy.join()
            self._joined = True
        gradients = SegmentGradients(self.learner, plan, leases, schedule, read_ahead=team.clock == "wall")
        gradient = team.computing(gradients) if team.rank < self.learners else no_gradient
        if self._coordinates:
            self.journal.display.epoch(cursor.epoch, len(plan), cursor.done)
        begin = team.now()
        self._reported = begin, Totals(), cursor.updates // self.options.report_every
        while (stats := self.strategy.step(gradient)) is not None:
            leases.complete(stats)
            self._report(stats, leases)
        self.strategy.rest()
        self._finish_segment(plan, leases.record(), leases.totals(), team.now() - begin)
        if cursor.done == len(plan):
            self._finish_epoch()
        self._checkpoint()

    def _segment(self, plan: Plan) -> Segment:
        """The next batches of the epoch; a checkpoint follows after `checkpoint_every` updates of the team."""
        cursor = self.cursor
        end = min(cursor.done + self.options.checkpoint_every * self.learners, len(plan))
        first, last = cursor.done * plan.batch_size, end * plan.batch_size
        frames_N = plan.frames_N[first:last]
        frames = np.add.reduceat(frames_N, np.arange(0, len(frames_N), plan.batch_size))
        return Segment(
            cursor.epoch, cursor.done, end, len(plan), tuple(frames.tolist()), cursor.updates_before, self.learners
        )  # fmt: skip

    def _report(self, stats: Stats, leases: Leases) -> None:
        """Now and then, the means over all learners since the last report. In step, all must take part."""
        then, before, reports = self._reported
        update = int(stats.lease.updates) + 1
        due = update // self.options.report_every
        if due <= reports or not (self.strategy.in_step or self._coordinates):
            return
        totals, now = leases.totals(), self.team.now()
        self._reported = now, totals, due
        new = totals - before
        self._require_finite(new.mean_loss)
        if not self._coordinates:
            return
        speed = new.frames / max(now - then, 1e-9)
        record = {
            "epoch": self.cursor.epoch + 1,
            "batch": update,
            "loss": round(new.mean_loss, 6),
            "frame_accuracy": round(new.accuracy, 6),
            "lr": stats.lr,
            "frames_per_second": round(speed),
        }
        self.journal.metrics(record, update)
        self.journal.display.done(self.cursor.done + totals.batches)
        self.journal.display.status(f"loss {new.mean_loss:.3f}  {self._progress(speed)}")

    def _progress(self, speed: float) -> str:
        if self.team.size == 1:
            return f"{speed:,.0f} frames/s"
        staleness = self.strategy.staleness
        mean = sum(k * n for k, n in staleness.items()) / max(sum(staleness.values()), 1)
        distances = [record["consensus_distance"] for record in self.cursor.history[-1:]]
        apart = f"  consensus distance {distances[0]:.3g}" if distances else ""
        return f"{speed / self.learners:,.0f} frames/s a learner  staleness {mean:.1f}{apart}"

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"{self.material.out}: the loss is {loss} in epoch {self.cursor.epoch + 1}; last good checkpoint: "
                f"{self.checkpoints.newest()}; try a smaller schedule.base or train.optimizer.clip_norm"
            )

    def _finish_segment(self, plan: Plan, record: Record, totals: Totals, seconds: float) -> None:
        """Audit the leases, and move the cursor."""
        cursor, segment = self.cursor, record.segment
        totals += Totals(*cursor.totals)  # type: ignore[arg-type]
        self._require_finite(totals.mean_loss)
        self.learner.params.check()
        chunks = [min(plan.batch_size, len(plan.utterance_N) - n * plan.batch_size) for n in range(len(plan))]
        record.audit(chunks[segment.begin : segment.end])
        for completion in record.completions:
            cursor.batches_per_learner[completion.owner] = cursor.batches_per_learner.get(completion.owner, 0) + 1
        cursor.done = segment.end
        cursor.updates = cursor.updates_before + -(-segment.end // self.learners)
        cursor.totals = list(astuple(totals))
        rows = self.team.gather(torch.tensor([seconds], dtype=torch.float64))
        cursor.seconds += max(float(row) for row in rows.values())  # who was restarted has not seen all of it
        self._agree(rows)
        if self._coordinates:
            self.journal.leases(record)

    def _finish_epoch(self) -> None:
        """The coordinator validates and writes the epoch's files, then tells all; if it dies over it, another does."""
        consensus = self.strategy.consensus()
        measures = measure(self.team, self.strategy, consensus)
        while True:
            scores = self._validate(consensus, measures) if self._coordinates else (0.0, 0.0)
            rows = self.team.gather(torch.tensor(scores, dtype=torch.float64))
            if self._coordinator in rows:
                break
            self._agree(rows)
        loss, error = rows[self._coordinator].tolist()
        self._require_finite(loss)
        self.cursor = after_epoch(self.cursor, loss, error, measures)

    def _validate(self, consensus: Tensor, measures: Measures) -> tuple[float, float]:
        """Held-out loss and frame error, and the files that tell of them."""
        loss, error = self.material.held_out(consensus)
        if math.isfinite(loss):
            self._write_epoch(after_epoch(self.cursor, loss, error, measures), measures)
        return loss, error

    def _write_epoch(self, cursor: Cursor, measures: Measures) -> None:
        """Best model, metrics and summary as of `cursor`, after the epoch; who coordinated before may have begun it."""
        record = cursor.history[-1]
        if cursor.best_loss < self.cursor.best_loss:
            self._save_best(record)
        line = {**record, "batch": cursor.updates}
        if json.dumps(line) not in (self.material.out / "metrics.jsonl").read_text().splitlines():
            self.journal.metrics(line, cursor.updates)
        loss, error = record["heldout_loss"], record["heldout_frame_error"]
        message = f"epoch {cursor.epoch}: held-out loss {loss:.4f}, frame error {error:.2%}"
        log.info("%s, training loss %.4f", message, record["train_loss"])
        self.journal.display.status(message)
        self.journal.summary(self._summary(cursor, measures))

    def _save_best(self, record: dict[str, float]) -> None:
        material = self.material
        info = {
            "kind": material.egs.info.kind, "chunk": material.egs.info.chunk, "pdf_counts": material.pdf_counts_P,
            "senones": material.egs.info.senones, "epoch": record["epoch"], "heldout_loss": record["heldout_loss"],
            **material.provenance,
        }  # fmt: skip
        save_model(material.out / "best.pt", material.held_out.model, info)

    def _checkpoint(self) -> None:
        """Save everything; the team is at rest. It comes last: whoever is killed before it does the segment again."""
        state = {
            "strategy": self.strategy.state_dict(),
            "usage": usage_state(self.team.usage),
            "rng": torch.get_rng_state(),
        }
        self.checkpoints.save_learner(self.cursor.updates, self.team.rank, state)
        members = self.team.gather(torch.zeros(0, dtype=torch.float64))
        lost = set(range(self.team.size)) - members.keys()
        if not self.strategy.forgiving and lost:
            raise LearnerLost(min(lost), "died before its part of a checkpoint was saved")
        self._agree(members)
        if self._coordinates:
            self.cursor.kept = list(self.journal.sizes())
            self.checkpoints.commit(self.cursor.updates, {"cursor": asdict(self.cursor), "members": sorted(members)})

    def _summary(self, cursor: Cursor, measures: Measures) -> dict[str, Any]:
        options = self.options
        best = min(cursor.history, key=lambda record: record["heldout_loss"])
        return {
            "strategy": self.strategy.name,
            "learners": self.learners,
            "batch": options.batch_size,
            "epochs": options.epochs,
            "epochs_done": cursor.epoch,
            "best_epoch": best["epoch"],
            "heldout_loss": [record["heldout_loss"] for record in cursor.history],
            "heldout_frame_error": [record["heldout_frame_error"] for record in cursor.history],
            "train_loss": [record["train_loss"] for record in cursor.history],
            "seconds": round(cursor.seconds, 3),
            "seconds_per_epoch": cursor.seconds_per_epoch,
            "clock": self.team.clock,
            "frames_per_second": round(cursor.frames / max(cursor.seconds, 1e-9)),
            "batches_per_learner": cursor.batches_per_learner,
            **asdict(measures),
            "consensus_distance": [record["consensus_distance"] for record in cursor.history],
            "parameters": len(self.learner.params),
            "optimizer": options.optimizer.kind,
            "momentum": options.optimizer.momentum,
            "schedule": asdict(options.schedule),
            "seed": options.seed,
            **self.material.provenance,
        }


def no_gradient(on_bucket: OnBucket | None) -> Stats | None:
    """Of who computes none."""
    return None
