"""The training loop of one learner. All learners of a team run it.

A run consists of epochs, an epoch of segments, and a segment ends with a checkpoint:

    Trainer.train             segments until the last epoch, or until the schedule ends the training
      _begin                  compares the learners' weights, resumes from the newest checkpoint, or from what the
                              survivors of a lost learner have saved since (`survivors`)
      _do_segment             repeats: lease a batch -> GradientComputer -> Strategy.step -> complete the lease
        _finish_segment       audits the leases, advances `TrainProgress`
        _finish_epoch         validates the consensus, writes best.pt, metrics.jsonl and summary.json
        _checkpoint           saves every learner's state, then `TrainProgress`

One learner, the leader, writes the files of the run (`leadership`).
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import (
    LearnerLost,
    Leases,
    LossSums,
    Segment,
    SegmentRecord,
    ServerRecord,
    StaleSegment,
    StepResult,
)
from asr_am.distributed.runtime.preemption import preempted
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategy import REPLICA
from asr_am.distributed.team import SingleProcess, Team
from asr_am.errors import InputError, Preempted
from asr_am.train.checkpoint import TrainProgress
from asr_am.train.comm_metrics import (
    CommMetrics,
    comm_stats_to_dict,
    gather_comm_metrics,
    load_comm_stats,
    metrics_of_parts,
)
from asr_am.train.gradient import GradientComputer
from asr_am.train.leadership import Leadership
from asr_am.train.resume import learner_part, merged_part
from asr_am.train.run_log import epoch_curves, make_summary
from asr_am.train.run_setup import RunSetup, StrategyFactory
from asr_am.train.schedule import Schedule
from asr_am.train.step_reports import StepReports, require_finite
from asr_am.train.survivors import Survivor, Survivors
from asr_am.train.tracking import Tracker
from asr_am.train.train_options import TrainOptions, cores
from asr_am.train.trainable import (
    Plan,
    Trainable,
    as_numbers,
    load_statistics,
    running_statistics,
    set_numbers,
)

log = logging.getLogger(__name__)
CHECK_SECONDS = 1.0  # between two times that a synchronous team asks whether one of it is to end
FIRST_STEPS = 5  # between them in the first segment
REL_TOL = 1e-6  # relative difference of sums that are only added in another order, or by another kind of CPU


def train(
    egs_dir: Path, out: Path, options: TrainOptions, *, strategy: StrategyFactory = Local,
    tracker: Tracker | None = None, provenance: Mapping[str, object] | None = None, team: Team | None = None,
    servers: int = 0, share_gpus: bool = False,
) -> None:  # fmt: skip
    """Trains as one learner of a team, from the newest checkpoint in `out` if there is one.

    Writes best.pt (`load_acoustic_model` reads it), metrics.jsonl, leases.jsonl, summary.json and checkpoints.

    Args:
        egs_dir: examples with the sets `train` and `dev`.
        out: directory of the run.
        options: options of the run.
        strategy: makes the strategy of this learner.
        tracker: experiment tracking.
        provenance: origin of the run, for summary.json and the model file.
        team: this learner's end of the team. None: a single learner.
        servers: number of ranks, the team's last, that only serve parameters. They compute on the CPU.
        share_gpus: several learners of a host may compute on one GPU.

    Raises:
        InputError: examples or a checkpoint are damaged, the loss is NaN or Inf, or the strategy does not tolerate the
            team's faults.
    """
    team = team or SingleProcess()
    learners = team.size - servers
    setup = RunSetup(
        egs_dir, out, options if team.rank < learners else replace(options, device="cpu"), strategy, learners=learners,
        tracker=tracker, provenance=provenance, share_gpus=share_gpus,
    )  # fmt: skip
    train_run(setup, team)


def train_run(run: Trainable, team: Team) -> None:
    """Trains any model as one learner of a team, and closes the run and the team.

    Args:
        run: the run.
        team: this learner's end of the team.

    Raises:
        InputError: as of `train`.
    """
    torch.set_num_threads(run.options.threads or (cores() if team.size == 1 else 1))
    try:
        Trainer(run, team).train()
    finally:
        run.run_log.close()
        team.close()


class Trainer:
    """The training loop of one learner, or of a rank that only serves parameters.

    Args:
        setup: the run of an acoustic model or a language model.
        team: this learner's end of the team.
    """

    def __init__(self, setup: Trainable, team: Team) -> None:
        self.setup, self.options, self.team = setup, setup.options, team
        self.model_state, self.strategy = setup.learner(team)
        self.run_log, self.learners = setup.run_log, setup.learners
        self._shared = tuple(running_statistics(self.model_state.model))  # names of what learners average
        self.checkpoints = setup.checkpoints(self.strategy.name)
        self.progress = TrainProgress().with_learners(self.learners)
        self.leadership = Leadership(team, self.checkpoints.terms, self._take_over)
        self._reports = StepReports(setup, team, self.strategy, self.leadership, self.checkpoints)
        self._survivor = Survivor(self.strategy, team, self.checkpoints, self._part)
        self._rejoined = not team.rejoins
        self._steps_between_checks, self._steps_unchecked = 1 if team.size == 1 else FIRST_STEPS, 0

    def train(self) -> None:
        """Trains from the newest checkpoint to the last epoch, or until the schedule ends the training."""
        self.strategy.check(self.team.faults)
        try:
            self._begin()
            while self.progress.epoch < self.options.epochs and (schedule := self._schedule()):
                try:
                    self._do_segment(schedule)
                except StaleSegment:
                    self.team.sleep(0.5)  # the others are about to complete a newer checkpoint
                    self._resume()
        except LearnerLost as error:
            with suppress(LearnerLost):  # this team cannot be started again
                self.team.restart_team(error.reason, None if self.strategy.fault_tolerant else error.rank)
            raise

    def _schedule(self) -> Schedule | None:
        """Returns the schedule of the current epoch, or None if the training has ended."""
        judged = "train_loss" if self.setup.validation is None else "heldout_loss"
        return self.options.schedule.after([record[judged] for record in self.progress.history])

    # start of a run

    def _begin(self) -> None:
        """Compares the learners and resumes. A restarted learner only resumes."""
        if self.team.rejoins:
            self.checkpoints.terms.open(self.team.launch, rejoins=True)
            self._resume()
            return
        parts = (part.double() for part in self.model_state.params.w.cpu().split(1 << 16))  # small ones stay in cache
        sums = torch.stack([torch.stack((part.abs().sum(), part.square().sum())) for part in parts]).sum(0)
        fingerprint = [*sums.tolist(), float(self.model_state.device.type == "cuda")]
        rows = self.team.gather(torch.tensor(fingerprint, dtype=torch.float64))
        if not rows[self.team.rank].isfinite().all():
            raise InputError("the model has weights that are not finite numbers before the first step; make it again")
        if not all(torch.allclose(row[:2], rows[self.team.rank][:2], rtol=REL_TOL) for row in rows.values()):
            raise InputError(
                "the learners start with different weights; check that all hosts have the same software and examples"
            )
        if len({bool(row[2]) for rank, row in rows.items() if rank < self.learners}) > 1:
            raise InputError("some learners have a GPU and some have none; repair these, or set train.device=cpu")
        self.leadership.leader = min(rows)
        while True:
            self.checkpoints.terms.open(self.team.launch)
            if self.leadership.leads:
                self.leadership.claim()
                self.checkpoints.set_damaged_aside()
                self._adopt_survivors()
            rows = self.team.gather(torch.zeros(0, dtype=torch.float64))  # no earlier launch writes any more
            if self.leadership.leader in rows:
                self._resume()
                resumed = self.team.gather(torch.tensor([self.progress.epoch, self.progress.done], dtype=torch.float64))
                if not all(torch.equal(position, resumed[self.team.rank]) for position in resumed.values()):
                    self.checkpoints.terms.check()  # another start of the run may have written one of them
                    raise InputError(
                        "the learners see different checkpoints; start again when all hosts see the same files"
                    )
                if self.leadership.leads:
                    self._log_start()
                    self.checkpoints.publish(self.setup.out)  # not done if the last leader died in a commit
                    self._open_log(self.progress.kept[0])
                rows = self.team.gather(torch.zeros(0, dtype=torch.float64))  # the files are as the checkpoint says
                if self.leadership.leader in rows:
                    break
            self.leadership.leader = min(rows)

    def _adopt_survivors(self) -> None:
        """Makes a checkpoint of what survivors of the team before have saved since the newest one, if they have."""
        self.checkpoints.load()  # raises InputError if it is of another run, whose survivors these are
        found = self.checkpoints.load_survivors()
        try:
            if survivors := Survivors.of(found, self.strategy.residuals):
                self._commit_survivors(survivors)
            elif found:
                log.warning("too few learners have saved their state: the steps since the checkpoint are done again")
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            log.warning("what survivors have saved is not complete (%s): their steps are done again", error)
        self.progress = TrainProgress().with_learners(self.learners)  # until the checkpoint is loaded
        self.checkpoints.remove_survivors()

    def _commit_survivors(self, survivors: Survivors) -> None:
        """Makes that checkpoint. At the end of an epoch it validates first, as `_finish_epoch` does."""
        learners, state = survivors.learners, self.checkpoints.load()
        before = TrainProgress(**state["cursor"]) if state else TrainProgress()
        lost = [rank for rank in (state["members"] if state else ()) if rank % learners in survivors.lost]
        former = {rank: self.checkpoints.load_learner(rank) for rank in lost}
        progress = self.progress = before.with_learners(learners)
        plan = self.setup.plan(progress.epoch)
        if learners != self.learners:
            plan = plan.in_batches_of(plan.batch_size * self.learners // learners)
        end = min(progress.done + survivors.steps * learners, len(plan))
        kept, segment = progress.kept[0], self._segment(plan, end)
        record = survivors.record(segment, examples_of(plan, segment.begin, end))
        self._advance(record, plan, survivors.totals(len(segment)))
        progress.seconds += survivors.seconds
        parts = dict(survivors.parts(self.strategy, former))
        for rank, part in parts.items():
            self.checkpoints.save_learner(progress.updates, rank, part)
        self._open_log(self.run_log.metrics_bytes(kept, progress.updates))
        if end == len(plan):
            load_statistics(self.model_state.model, survivors.statistics())
            model = self.strategy.model_of([part["strategy"] for _, part in sorted(parts.items())])
            metrics = metrics_of_parts(parts, self.team.restarts)
            loss, error = self._validate(model, metrics)
            require_finite(loss, self.setup, progress, self.checkpoints)
            self.progress = self._after_epoch(loss, error, metrics)
        self._commit(record, sorted(parts))
        log.info(
            "%d of %d learners have saved their state after the %d steps since the last checkpoint",
            len(survivors.saved), learners, survivors.steps,
        )  # fmt: skip

    def _open_log(self, keep_metrics: int | None) -> None:
        keep, terms = (keep_metrics, self.progress.kept[1]), self.checkpoints.terms
        self.run_log.open(keep, terms.writer, terms.check)

    def _take_over(self) -> None:
        """Continues the files of a leader that has died."""
        if self.checkpoints.completed(self.progress.updates):  # by that leader
            state = self.checkpoints.load()
            assert state is not None
            self.progress.kept = state["cursor"]["kept"]  # of the logs, whose lines it counts
        self._open_log(None)

    def _log_start(self) -> None:
        if self.team.size == 1:
            where = f"{self.model_state.device}, {torch.get_num_threads()} threads"
        else:
            where = f"{self.strategy.name} on {self.learners} learners, {self.model_state.device.type}"
            where += f" and {servers} servers" if (servers := self.team.size - self.learners) else ""
        frames = self.setup.plan(self.progress.epoch).num_frames
        steps = math.ceil(len(self.setup.plan(self.progress.epoch)) / self.learners)
        for owner in (self.strategy, self.options.schedule):
            for warning in owner.idle_options(steps, self.options.epochs):
                log.warning("%s", warning)
        log.info("%d parameters, %d training %s, %s", self.strategy.num_weights, frames, self.setup.unit, where)

    def _resume(self) -> None:
        """Loads the newest checkpoint, if any. A learner missing from it loads another learner's part."""
        while True:
            newest = self.checkpoints.newest()
            try:
                self._load_checkpoint()
                break
            except InputError:
                if newest == self.checkpoints.newest():
                    raise  # else the others have replaced it meanwhile

    def _load_checkpoint(self) -> None:
        state = self.checkpoints.load()
        if state is None:
            return
        try:
            before = TrainProgress(**state["cursor"])
            if before.learners == self.learners:
                part = learner_part(self.checkpoints, state, self.team)
            else:
                part = merged_part(self.checkpoints, state, self.team, self.strategy)
            self.strategy.load_state_dict(part.strategy)
            load = self.checkpoints.load_learner
            self.strategy.load_moved(lambda: (load(rank)["strategy"] for rank in state["members"]))
            self.strategy.load_counts([counted["strategy"] for counted in part.counted])
            load_statistics(self.model_state.model, dict(part.statistics))
            if part.counted and not self.team.rejoins:
                load_comm_stats(self.team.comm_stats, [counted["usage"] for counted in part.counted])
            if part.rng is not None and not self.team.rejoins:
                torch.set_rng_state(part.rng)
            self.progress = before.with_learners(self.learners)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
            raise InputError(
                f"{self.checkpoints.newest()}: is not complete ({error}); remove it to continue from the checkpoint "
                "before"
            ) from error
        if self.leadership.leads:
            log.info("resuming from %s", self.checkpoints.newest())
            if before.learners != self.learners:
                log.info("%d learners continue the run of %d", self.learners, before.learners)
            if part.threads not in (None, threads := torch.get_num_threads()):
                log.warning(
                    "resuming with %d threads per learner after %d: the last bits of the results may differ from those "
                    "of a run with one number; train.threads sets it", threads, part.threads,
                )  # fmt: skip

    # segments

    def _do_segment(self, schedule: Schedule) -> None:
        """Trains up to the next checkpoint, or to the end of the epoch."""
        progress, team, plan = self.progress, self.team, self.setup.plan(self.progress.epoch)
        segment = self._segment(plan, self._next_end(plan))
        leases = team.leases(segment, self.strategy.synchronous)
        if not self._rejoined:
            self.strategy.rejoin()
            self._rejoined = True
        self.run_log.progress_bar.epoch(progress.epoch, len(plan), progress.done)
        begin = team.now()
        self._reports.begin(progress)
        gradients = GradientComputer(self.model_state, plan, leases, schedule, read_ahead=team.clock == "wall")
        self._survivor.begin(leases, progress.updates)
        with team.sigterm_as_loss() if self._survivor.saves else nullcontext():
            try:
                stops = self._do_steps(gradients, leases, begin)
                record = self._finish_segment(plan, leases, team.now() - begin)
                if progress.done == len(plan):
                    self._finish_epoch()
                self._checkpoint(record)
            except Exception as error:
                if team.is_loss(error):
                    self._survivor.save()
                raise
        if stops or len(record.segment) < len(segment):
            if not self.checkpoints.on_disk:
                raise Preempted("the run was asked to end, and keeps no checkpoints: the same command starts it anew")
            raise Preempted(f"{self.setup.out}: a checkpoint was written, and the same command continues from there")

    def _do_steps(self, gradients: GradientComputer, leases: Leases, begin: float) -> bool:
        """Does the steps of a segment, begun at the time `begin`.

        Returns:
            True if it was cut short, as the run is to end.
        """
        gradient = self.team.timed(gradients) if self.team.rank < self.learners else no_gradient
        batches = self.progress.batches_per_learner.get(self.team.rank, 0)
        steps, stops = 0, False
        while (step_result := self.strategy.step(gradient)) is not None:
            leases.complete(step_result)
            batches += step_result.lease.batch is not None
            self._reports.show(batches)
            self._reports.write(step_result, leases)
            steps += 1
            if not stops and (stops := self._is_preempted()):
                leases.stop(steps)
                gradients.stop()
        self.strategy.drain()
        return stops

    def _is_preempted(self) -> bool:
        """Returns True if this learner has been asked to end, or any of a synchronous team, which agrees on it."""
        if self.team.clock == "virtual":
            return False
        if not self.strategy.synchronous:
            return preempted()
        self._steps_unchecked += 1
        if self._steps_unchecked < self._steps_between_checks:
            return False
        self._steps_unchecked = 0
        rows = self.team.gather(torch.tensor([float(preempted())], dtype=torch.float64))
        return any(bool(row[0]) for row in rows.values())

    def _next_end(self, plan: Plan) -> int:
        """Returns one past the last batch before the next checkpoint."""
        by_time = self.progress.pace if self.options.checkpoint_minutes else 0
        return min(self.progress.done + (by_time or self.options.checkpoint_every) * self.learners, len(plan))

    def _segment(self, plan: Plan, end: int) -> Segment:
        """Returns the next batches of the epoch, up to batch `end`."""
        progress = self.progress
        first, last = progress.done * plan.batch_size, end * plan.batch_size
        frames_N = plan.frames(slice(first, last))
        frames = np.add.reduceat(frames_N, np.arange(0, len(frames_N), plan.batch_size))
        return Segment(
            progress.epoch, progress.done, end, len(plan), tuple(frames.tolist()), progress.updates_before,
            progress.learners, self.setup.loader.digests(plan, progress.done, end),
        )  # fmt: skip

    def _finish_segment(self, plan: Plan, leases: Leases, seconds: float) -> SegmentRecord:
        """Audits the leases and advances the progress.

        Args:
            plan: the batches of the epoch.
            leases: the leases of the segment, all completed.
            seconds: duration of the segment at this learner.

        Returns:
            The record, with what the parameter servers applied.
        """
        record, totals = leases.record(), leases.totals()
        progress, segment = self.progress, record.segment
        self.model_state.params.check()
        self._average_statistics()
        self._advance(record, plan, totals)
        unapplied = self.strategy.unapplied(record)
        applied = [] if unapplied is None else [unapplied[0], self.team.incarnation, *unapplied[1]]
        rows = self.team.gather(torch.tensor([seconds, *applied], dtype=torch.float64))
        longest = max(float(row[0]) for row in rows.values())  # a restarted learner has missed a part of it
        progress.seconds += longest
        if self.team.size > 1:
            steps = (segment.end - segment.begin) / self.learners
            self._steps_between_checks = max(1, round(CHECK_SECONDS * steps / max(longest, 1e-3)))
        if self.options.checkpoint_minutes:
            updates = -(-(segment.end - segment.begin) // self.learners)
            progress.pace = max(1, round(60 * self.options.checkpoint_minutes * updates / max(longest, 1e-3)))
        self.leadership.elect(rows)
        servers = []
        for rank, row in rows.items():
            if len(row) > 1:
                shard, incarnation, *missing = (int(x) for x in row[1:])
                servers.append(ServerRecord(shard, rank, incarnation, tuple(missing)))
        if servers and self.leadership.leads:  # a server that died since does not know what its predecessor has applied
            record = replace(record, lost=leases.record().lost)
        return replace(record, servers=tuple(sorted(servers, key=lambda server: server.shard)))

    def _advance(self, record: SegmentRecord, plan: Plan, totals: LossSums) -> None:
        """Audits the leases of a segment, and adds it to the progress. `totals` are its sums."""
        progress, segment = self.progress, record.segment
        totals += LossSums(*progress.totals)  # type: ignore[arg-type]
        require_finite(totals.mean_loss, self.setup, progress, self.checkpoints)
        record.audit(examples_of(plan, segment.begin, segment.end))
        for completion in record.completions:
            progress.batches_per_learner[completion.owner] = progress.batches_per_learner.get(completion.owner, 0) + 1
        progress.done = segment.end
        progress.updates = progress.updates_before + -(-segment.end // progress.learners)
        progress.totals = list(astuple(totals))

    def _average_statistics(self) -> None:
        """Gives all learners the mean of their running statistics, or the first one's if they are no real numbers.

        Only those that differ travel: tables and masks may be large.
        """
        if self.team.size == 1 or not self._shared:
            return
        own = self._statistics
        numbers = [as_numbers(own.get(name, torch.zeros(0))) for name in self._shared]
        marks_K2 = torch.tensor([[len(x), zlib.crc32(x.numpy().tobytes())] for x in numbers], dtype=torch.float64)
        marks_LK2 = torch.stack([row.view(-1, 2) for row in self._gather_learners(marks_K2.flatten())])
        fits, equal = (marks_LK2 == marks_LK2[0]).all(0).unbind(1)  # caches may have another shape at each learner
        if not (differ := (fits & ~equal).nonzero().flatten().tolist()):
            return
        rows = self._gather_learners(torch.cat([numbers[k] for k in differ]))
        parts = zip(*(row.split(marks_LK2[0, differ, 0].long().tolist()) for row in rows), strict=True)
        for k, alike in zip(differ, parts, strict=True):
            statistic = own.get(self._shared[k])
            if statistic is not None and len(numbers[k]) == len(alike[0]):  # else this rank only serves parameters
                real = statistic.is_floating_point() or statistic.is_complex()
                set_numbers(statistic, torch.stack(alike).mean(0) if real else alike[0])

    def _gather_learners(self, values: Tensor) -> list[Tensor]:
        """Returns the values of all learners. A rank that only serves parameters has none."""
        rows = self.team.gather(values if self.team.rank < self.learners else values[:0])
        return [rows[rank] for rank in sorted(rows) if rank < self.learners]

    @property
    def _statistics(self) -> dict[str, Tensor]:
        return running_statistics(self.model_state.model)  # a model may replace its buffers

    # end of an epoch

    def _finish_epoch(self) -> None:
        """Has the leader validate and write the epoch's files. If it dies meanwhile, the next leader does it."""
        consensus = self.strategy.consensus()
        metrics = gather_comm_metrics(self.team, self.strategy, consensus)
        loss, error = self.leadership.do(lambda: self._validate(consensus, metrics), otherwise=(0.0, 0.0))
        require_finite(loss, self.setup, self.progress, self.checkpoints)
        self.progress = self._after_epoch(loss, error, metrics)

    def _after_epoch(self, loss: float, error: float, metrics: CommMetrics) -> TrainProgress:
        return self.progress.after_epoch(self.setup.validation, loss, error, metrics.consensus_distance)

    def _validate(self, consensus: Tensor, metrics: CommMetrics) -> tuple[float, float]:
        """Returns held-out loss and frame error of the weights [N], and writes the files of the epoch."""
        if self.setup.validation is None:
            loss, error = LossSums(*self.progress.totals).mean_loss, 0.0  # type: ignore[arg-type]
        else:
            loss, error = self.setup.validator(consensus, self._statistics)
        self.checkpoints.terms.check()
        if math.isfinite(loss):
            progress = self._after_epoch(loss, error, metrics)
            if progress.best_loss < self.progress.best_loss:
                best = self.checkpoints.best_model(self.progress.updates)
                self.setup.save_best(best, progress.history[-1], consensus, self._statistics)
            curves = epoch_curves(progress, metrics, self.team.clock)
            self.run_log.epoch(progress.history[-1], progress.updates, curves)
            self._write_summary(progress, metrics)
        return loss, error

    def _write_summary(self, progress: TrainProgress, metrics: CommMetrics) -> None:
        summary = make_summary(
            self.options, progress, metrics, self.setup.provenance, strategy=self.strategy.name,
            learners=progress.learners, clock=self.team.clock, parameters=self.strategy.num_weights,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        self.run_log.summary(summary)

    def _checkpoint(self, record: SegmentRecord) -> None:
        """Saves the drained team, the last act of a segment. A run that is killed before repeats the segment.

        The segment counts when all live learners know that its checkpoint is complete. If the leader dies meanwhile,
        the next one completes it. best.pt and leases.jsonl change with the checkpoint only.
        """
        part = self._part()
        if self.strategy.equal_replicas and self.team.rank > 0:
            part["strategy"] = {key: value for key, value in part["strategy"].items() if key not in REPLICA}
        self.checkpoints.save_learner(self.progress.updates, self.team.rank, part)
        members = self.team.gather(torch.zeros(0, dtype=torch.float64))
        lost = set(range(self.team.size)) - members.keys()
        if not self.strategy.fault_tolerant and lost:
            raise LearnerLost(min(lost), "died before its part of a checkpoint was saved")
        self.leadership.elect(members)
        kept = self.leadership.do(lambda: self._commit(record, sorted(members)), otherwise=self.progress.kept)
        self.progress.kept = [int(size) for size in kept]

    def _part(self) -> dict[str, Any]:
        """Returns what this learner saves in a checkpoint."""
        return {
            "strategy": self.strategy.state_dict(),
            "usage": comm_stats_to_dict(self.team.comm_stats),
            "rng": torch.get_rng_state(),
            "threads": torch.get_num_threads(),
            "statistics": self._statistics,
        }

    def _commit(self, record: SegmentRecord, members: list[int]) -> list[int]:
        """Completes the checkpoint whose parts `members` have saved, and returns `TrainProgress.kept`.

        A second leader repeats what the first did.
        """
        self.checkpoints.terms.check()
        if self.checkpoints.completed(self.progress.updates):
            self.checkpoints.publish(self.setup.out)
            return self.progress.kept
        started = self.team.clock == "wall" and self.team.size > 1  # else a launch has no incarnations, or no identity
        self.run_log.leases(record, self.team.launch if started else "")
        self.progress.kept = list(self.run_log.sync())
        self.checkpoints.commit(self.progress.updates, {"cursor": asdict(self.progress), "members": members})
        self.checkpoints.publish(self.setup.out)
        return self.progress.kept


def examples_of(plan: Plan, begin: int, end: int) -> list[int]:
    """Returns the number of examples of each batch begin..end."""
    return [min(plan.batch_size, plan.num_examples - n * plan.batch_size) for n in range(begin, end)]


def no_gradient(on_bucket: BucketHook | None) -> StepResult | None:
    """The gradient closure of a rank that only serves parameters."""
    return None
