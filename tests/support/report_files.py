"""Writes files of exp/<corpus> as training and scoring do, with known values."""

from __future__ import annotations

import json
from pathlib import Path

SEGMENTS = 60


def subset(errors: int, words: int) -> dict:
    wer = 100 * errors / words
    return {
        "wer": wer, "interval": [wer - 1.5, wer + 1.5], "sentences": SEGMENTS, "words": words,
        "correct": words - errors, "substitutions": errors, "deletions": 0, "insertions": 0, "errors": errors,
        "sentence_errors": 1,
    }  # fmt: skip


def write_score(corpus_dir: Path, system: str, lm: str, errors: list[int], seed: int | None = None) -> Path:
    """Writes a score. `errors` are of each segment of ten words. The first half of the segments is swb, the rest ch."""
    folder = corpus_dir / "score" / f"{system}_{lm}"
    folder.mkdir(parents=True)
    half = SEGMENTS // 2
    content = {
        "system": system, "lm": lm, "seed": seed, "lm_weight": 12, "insertion_penalty": 0.5, "dev_wer": 9.87,
        "commit": "abc1234", "date": "2026-01-02",
        "all": subset(sum(errors), 10 * SEGMENTS),
        "swb": subset(sum(errors[:half]), 10 * half), "ch": subset(sum(errors[half:]), 10 * half),
    }  # fmt: skip
    (folder / "wer.json").write_text(json.dumps(content))
    segments = {f"seg{i:03d}": [count, 10] for i, count in enumerate(errors)}
    (folder / "segments.json").write_text(json.dumps(segments))
    return folder


def write_run(corpus_dir: Path, name: str, seed: int, losses: list[float], **more: object) -> Path:
    """Writes a run of one learner with the keys that every summary.json has, and `more`."""
    folder = corpus_dir / "train" / name
    folder.mkdir(parents=True)
    summary = {
        "strategy": "local", "learners": 1, "batch": 256, "epochs": 5 if seed == 3 else 3,
        "seed": seed, "commit": "abc1234", "config_hash": "f00d",
        "heldout_loss": losses, "heldout_frame_error": [0.2 * loss for loss in losses],
        "frames_per_second": 12345.6, "seconds": 61.5, "clock": "wall", **more,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_distributed(
    corpus_dir: Path, strategy: str, learners: int, seconds: float, losses: list[float], *, seed: int = 1,
    batch: int = 64, name: str | None = None, **more: object,
) -> Path:  # fmt: skip
    """Writes a run of virtual learners, `seconds` of virtual time in all, with every key of today's summary.json."""
    name = f"{name or f'{strategy}{learners}-b{batch}'}-s{seed}"
    today = {
        "strategy": strategy, "learners": learners, "batch": batch, "epochs": len(losses), "seconds": seconds,
        "clock": "virtual", "launcher": "virtual", "cluster": "ibm_a", "workload": "swb2000_lstm", "faults": {},
        "model": "blstm", "optimizer": "sgd", "bytes_sent": 0, "modelled_bytes": 0, "rejected": 0, "lost": 0,
        "overwritten": 0, "restarts": 0, "waiting_seconds": {str(rank): 0.0 for rank in range(learners)},
        "batches_per_learner": {str(rank): 10 * len(losses) for rank in range(learners)},
        "staleness": {"0": 10 * len(losses) * learners}, "consensus_distance": [0.0] * len(losses),
        "seconds_per_epoch": [seconds / len(losses)] * len(losses),
    }  # fmt: skip
    return write_run(corpus_dir, name, seed, losses, **{**today, **more})
