"""Measures how fast batches are read from disk, by number of loader threads.

    python scripts/bench/loader.py [EGS_DIR]

Without a directory, writes random examples (1 M frames, 260 features, float16) to a temporary one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from asr_am.egs.augment import Masking
from asr_am.egs.loader import Loader
from asr_am.egs.store import EgsInfo, EgsSet, Index


def write_random(directory: Path, frames: int = 1_000_000, dim: int = 260, shards: int = 4) -> None:
    rng = np.random.default_rng(0)
    (directory / "train").mkdir()
    each, utterances = frames // shards, frames // shards // 500
    for shard in range(shards):
        x_TF = rng.standard_normal((each + 21, dim), dtype=np.float32).astype(np.float16)
        np.save(directory / "train" / f"features.{shard}.npy", x_TF)
        np.save(directory / "train" / f"targets.{shard}.npy", rng.integers(0, 32000, each + 21).astype(np.int16))
    Index(
        [f"u{i:06d}" for i in range(shards * utterances)],
        np.repeat(np.arange(shards), utterances),
        np.tile(np.arange(utterances) * 500, shards),
        np.full(shards * utterances, 500),
    ).save(directory / "train")
    sizes = {"train": {"utterances": shards * utterances, "frames": shards * utterances * 500}}
    EgsInfo(kind="logmel", dim=dim, num_pdfs=32000, chunk=21, sets=sizes).save(directory)


def measure(egs: EgsSet, workers: int, masking: Masking | None) -> float:
    loader = Loader(egs, 256, random_offset=True, masking=masking, workers=workers)
    plan = loader.plan(0)
    frames, start = 0, time.perf_counter()
    for batch in loader.batches(plan, range(len(plan))):
        frames += batch.frames
    return frames / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("egs", nargs="?", type=Path, help="exp/<corpus>/egs/<name>")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.egs or Path(temporary)
        if options.egs is None:
            write_random(directory)
        egs = EgsSet(directory, "train")
        masks = Masking(1, 8, 1, 5, streams=1 if egs.info.dim % 3 else 3)
        measure(egs, 1, None)  # warm the page cache
        for workers in (1, 2, 4):
            plain, masked = measure(egs, workers, None), measure(egs, workers, masks)
            print(f"{workers} threads: {plain / 1e6:.2f} M frames/s, with masking {masked / 1e6:.2f} M frames/s")


if __name__ == "__main__":
    main()
