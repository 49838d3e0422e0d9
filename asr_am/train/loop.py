"""The training loop: epochs of steps that a strategy takes, held-out loss after each, and nothing lost when killed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import Leases
from asr_am.distributed.local import Local
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Alone, Team
from asr_am.egs.loader import Loader, feature_moments
from asr_am.egs.store import EgsSet, load_pdf_counts
from asr_am.errors import InputError
from asr_am.model.blstm import Blstm
from asr_am.model.checkpoint import save_model
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.display import Display
from asr_am.train.gradient import EpochGradients, HeldOut, Learner
from asr_am.train.metrics import MetricsLog, Sums, write_summary
from asr_am.train.options import TrainOptions, cores
from asr_am.train.tracking import NoTracker, Tracker

log = logging.getLogger(__name__)

StrategyFactory = Callable[[FlatParams, Optimizer, Team], Strategy]


def train(
    egs_dir: Path,
    out: Path,
    options: TrainOptions,
    *,
    strategy: StrategyFactory = Local,
    tracker: Tracker | None = None,
    commit: str = "unknown",
    config_hash: str = "",
) -> None:
    """Train on the sets `train` and `dev` of `egs_dir`; go on from `out`/checkpoints if there are any.

    Writes into `out`: best.pt (`load_acoustic_model` reads it), metrics.jsonl, summary.json, checkpoints/.
    InputError for damaged examples or checkpoints, and where the loss stops being a number.
    """
    device = _device(options)
    torch.set_num_threads(options.threads or cores())
    out.mkdir(parents=True, exist_ok=True)
    run = Run(egs_dir, out, options, device, strategy, {"commit": commit, "config_hash": config_hash})
    run.resume()
    tracker = tracker or NoTracker()
    tracker.start(out, asdict(options))
    with Display(options.epochs) as display:
        while run.cursor.epoch < options.epochs:
            run.do_epoch(display, tracker)
    tracker.finish()
    run.close()


def _device(options: TrainOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device=cuda: this machine has no GPU that torch can use; use train.device=cpu")
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


@dataclass
class Cursor:
    """Where a run stands. batches: of the whole run, done. reported: the epoch's sums at the last report. history: one
    record per finished epoch.
    """

    epoch: int = 0
    batches: int = 0
    frames: float = 0.0
    seconds: float = 0.0
    metrics_bytes: int = 0
    best_loss: float = math.inf
    reported: list[float] = field(default_factory=lambda: Sums().state())
    history: list[dict[str, float]] = field(default_factory=list)
    batches_per_learner: dict[int, int] = field(default_factory=dict)


class Run:
    """One training run: the learner, its strategy, and its files."""

    def __init__(
        self, egs_dir: Path, out: Path, options: TrainOptions, device: torch.device, factory: StrategyFactory,
        provenance: dict[str, str],
    ) -> None:  # fmt: skip
        self.out, self.options, self.device, self.provenance = out, options, device, provenance
        egs, dev = EgsSet(egs_dir, "train"), EgsSet(egs_dir, "dev")
        self.egs, self.pdf_counts_P = egs, torch.from_numpy(load_pdf_counts(egs_dir))
        mean_F, deviation_F = feature_moments(egs)
        torch.manual_seed(options.seed)
        model = Blstm(options.model, egs.info.dim, egs.info.num_pdfs)
        model.set_normalisation(torch.from_numpy(mean_F), torch.from_numpy(deviation_F))
        model.to(device)
        params = FlatParams(model)
        loader = Loader(
            egs, options.batch_size, seed=options.seed, random_offset=options.random_offset, masking=options.masking,
            mean_F=mean_F, workers=options.workers,
        )  # fmt: skip
        self.held_out = HeldOut(model, Loader(dev, options.batch_size, shuffle=False), options, device)
        self.team = Alone()
        self.strategy = factory(params, Optimizer(params, options.optimizer), self.team)
        self.learner = Learner(model, params, self.strategy.optimizer, loader, options, device)
        examples = f"{egs.info.num_pdfs}-{egs.info.dim}-{egs.info.chunk}-{egs.frames}"
        self.checkpoints = Checkpoints(out / "checkpoints", f"{options.fingerprint()}-{self.strategy.name}-{examples}")
        self.cursor, self.sums = Cursor(), Sums()
        self._leases_state: dict[str, Any] | None = None
        log.info("%d parameters, %d training frames, %s, %d threads", len(params), egs.frames, device,
                 torch.get_num_threads())  # fmt: skip

    def resume(self) -> None:
        """Take up the newest checkpoint, and cut off what metrics.jsonl says about later batches."""
        state = self.checkpoints.load()
        if state is not None:
            try:
                self.strategy.load_state_dict(state["strategy"])
                self.cursor, self.sums = Cursor(**state["cursor"]), Sums(*state["sums"])
                self._leases_state = state["leases"]
                torch.set_rng_state(state["rng"])
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                newest = self.checkpoints.newest()
                raise InputError(
                    f"{newest}: is not complete ({error}); remove it to go on from the one before"
                ) from error
        self.metrics = MetricsLog(self.out / "metrics.jsonl", self.cursor.metrics_bytes)
        self._started = self.team.now() - self.cursor.seconds

    def do_epoch(self, display: Display, tracker: Tracker) -> None:
        """The rest of the current epoch, validation, summary, checkpoint."""
        cursor, plan = self.cursor, self.learner.loader.plan(self.cursor.epoch)
        leases = self.team.leases(len(plan))
        if self._leases_state is not None:
            leases.load_state_dict(self._leases_state)
            self._leases_state = None
        gradient = EpochGradients(self.learner, cursor.epoch, plan, leases, cursor.batches - leases.leased)
        display.epoch(cursor.epoch, len(plan), done=leases.leased)
        self._reported_at = self.team.now(), cursor.frames
        while (stats := self.strategy.step(gradient)) is not None:
            leases.complete(stats.batch, self.team.rank, applied=stats.applied)
            self.sums.add(stats)
            cursor.batches += 1
            cursor.frames += stats.weight
            if cursor.batches % self.options.report_every == 0:
                self._report(stats.lr, display, tracker)
            if cursor.batches % self.options.checkpoint_every == 0 and not leases.finished:
                self._checkpoint(leases)
            display.advance()
        self.strategy.end_epoch()
        self._finish_epoch(leases, len(plan.utterance_N), display, tracker)

    def _report(self, lr: float, display: Display, tracker: Tracker) -> None:
        """Write the means since the last report."""
        cursor, now = self.cursor, self.team.now()
        new = self.sums.since(Sums(*cursor.reported))
        self._require_finite(new.mean_loss)
        then, frames_then = self._reported_at
        speed = (cursor.frames - frames_then) / max(now - then, 1e-9)
        record = {
            "epoch": cursor.epoch + 1,
            "batch": cursor.batches,
            "loss": round(new.mean_loss, 6),
            "frame_accuracy": round(new.accuracy, 6),
            "lr": lr,
            "frames_per_second": round(speed),
        }
        self.metrics.write(record)
        tracker.log(record, cursor.batches)
        display.status(f"loss {new.mean_loss:.3f}  {speed:,.0f} frames/s")
        self._reported_at, cursor.reported = (now, cursor.frames), self.sums.state()

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"{self.out}: the loss is {loss} by batch {self.cursor.batches} (epoch {self.cursor.epoch + 1}); "
                f"last good checkpoint: {self.checkpoints.newest()}; try a smaller schedule.base or "
                "train.optimizer.clip_norm"
            )

    def _finish_epoch(self, leases: Leases, chunks: int, display: Display, tracker: Tracker) -> None:
        """Audit, validate, keep the best model, write summary and checkpoint."""
        cursor = self.cursor
        self._require_finite(self.sums.state()[0])
        self.learner.params.check()
        leases.audit()
        if self.team.size == 1 and self.sums.examples != chunks:
            raise RuntimeError(f"epoch {cursor.epoch + 1}: {self.sums.examples} chunks trained on, of {chunks}")
        loss, error = self.held_out(self.strategy.consensus())
        self._require_finite(loss)
        record = {
            "epoch": cursor.epoch + 1,
            "heldout_loss": round(loss, 6),
            "heldout_frame_error": round(error, 6),
            "train_loss": round(self.sums.mean_loss, 6),
            "train_frame_accuracy": round(self.sums.accuracy, 6),
        }
        cursor.history.append(record)
        for rank, count in leases.done_by().items():
            cursor.batches_per_learner[rank] = cursor.batches_per_learner.get(rank, 0) + count
        if loss < cursor.best_loss:
            cursor.best_loss = loss
            self._save_best(record)
        self.metrics.write({**record, "batch": cursor.batches})
        tracker.log(record, cursor.batches)
        message = f"epoch {record['epoch']}: held-out loss {loss:.4f}, frame error {error:.2%}"
        log.info("%s, training loss %.4f", message, self.sums.mean_loss)
        display.status(message)
        cursor.epoch += 1
        self.sums, cursor.reported = Sums(), Sums().state()
        # The checkpoint comes last: whoever is killed before it does the end of this epoch again, summary included.
        write_summary(self.out / "summary.json", self._summary())
        self._checkpoint(None)

    def _save_best(self, record: dict[str, float]) -> None:
        info = {
            "kind": self.egs.info.kind, "chunk": self.egs.info.chunk, "pdf_counts": self.pdf_counts_P,
            "epoch": record["epoch"], "heldout_loss": record["heldout_loss"], **self.provenance,
        }  # fmt: skip
        save_model(self.out / "best.pt", self.held_out.model, info)

    def _checkpoint(self, leases: Leases | None) -> None:
        """Save everything; `leases` is None between two epochs."""
        self._require_finite(self.sums.state()[0])
        self.cursor.seconds = self.team.now() - self._started
        self.cursor.metrics_bytes = self.metrics.size()
        state = {
            "strategy": self.strategy.state_dict(),
            "cursor": asdict(self.cursor),
            "sums": self.sums.state(),
            "leases": None if leases is None else leases.state_dict(),
            "rng": torch.get_rng_state(),
        }
        self.checkpoints.save(self.cursor.batches, state)

    def _summary(self) -> dict[str, Any]:
        cursor, traffic = self.cursor, self.strategy.traffic
        seconds = self.team.now() - self._started
        best = min(cursor.history, key=lambda record: record["heldout_loss"])
        return {
            "strategy": self.strategy.name,
            "learners": self.team.size,
            "batch": self.options.batch_size,
            "epochs": self.options.epochs,
            "epochs_done": cursor.epoch,
            "best_epoch": best["epoch"],
            "heldout_loss": [record["heldout_loss"] for record in cursor.history],
            "heldout_frame_error": [record["heldout_frame_error"] for record in cursor.history],
            "train_loss": [record["train_loss"] for record in cursor.history],
            "seconds": round(seconds, 2),
            "clock": self.team.clock,
            "frames_per_second": round(cursor.frames / max(seconds, 1e-9)),
            "batches_per_learner": cursor.batches_per_learner,
            "staleness": dict(traffic.staleness),
            "bytes_sent": traffic.bytes_sent,
            "waiting_seconds": traffic.waiting_seconds,
            "consensus_distance": traffic.consensus_distance,
            "parameters": len(self.learner.params),
            "seed": self.options.seed,
            **self.provenance,
        }

    def close(self) -> None:
        self.metrics.close()
        self.strategy.close()
