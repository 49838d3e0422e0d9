"""Writes small training examples that a model can learn: features are one-hot vectors of the pdf, with noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asr_am.egs.store import EgsInfo, Index, crc32_of

CHUNK = 7


def write_examples(directory: Path, *, frames_U: tuple[int, ...] = (30, 7, 12, 3, 41, 20, 25, 9), dim: int = 6) -> Path:
    """Writes sets `train` (two shards) and `dev` (one) with as many pdfs as features and chunks of 7 frames."""
    rng = np.random.default_rng(5)
    sizes = {}
    for subset, shards in (("train", 2), ("dev", 1)):
        folder = directory / subset
        folder.mkdir(parents=True)
        parts = np.array_split(np.array(frames_U), shards)
        begins, owners, crc32s = [], [], []
        for shard, part in enumerate(parts):
            rows = int(part.sum())
            targets = np.zeros(rows + CHUNK, dtype=np.int16)
            targets[:rows] = np.repeat(rng.integers(0, dim, rows), 3)[:rows]
            features = np.zeros((rows + CHUNK, dim), dtype=np.float16)
            features[:rows] = 2 * np.eye(dim)[targets[:rows]] + rng.standard_normal((rows, dim))
            np.save(folder / f"features.{shard}.npy", features)
            np.save(folder / f"targets.{shard}.npy", targets)
            begins.append(np.cumsum(part) - part)
            spans = [slice(begin, begin + frames) for begin, frames in zip(begins[-1], part, strict=True)]
            crc32s += [crc32_of(targets[span], features[span]) for span in spans]
            owners.append(np.full(len(part), shard))
            if subset == "train" and shard == 0:
                np.save(directory / "pdf_counts.npy", np.full(dim, 10, dtype=np.int64))
        names = [f"{subset}-{i:02d}" for i in range(len(frames_U))]
        columns = np.concatenate(owners), np.concatenate(begins), np.array(frames_U), np.array(crc32s, dtype=np.uint32)
        Index(names, *columns).save(folder)
        sizes[subset] = {"utterances": len(frames_U), "frames": sum(frames_U)}
    EgsInfo(kind="logmel", dim=dim, num_pdfs=dim, chunk=CHUNK, sets=sizes).save(directory)
    (directory.parent / ".key").touch()  # so that exp/<corpus> is taken for a folder of this program
    return directory
