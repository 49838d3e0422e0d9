"""Measures how fast batches are read from disk, by number of loader threads, and what plans of large sets cost.

    python scripts/bench/loader.py [EGS_DIR]
    python scripts/bench/loader.py --plan 34000000
    python scripts/bench/loader.py --disk 12000000 [--buffer CHUNKS]

Without a directory, writes random examples (1 M frames, 260 inputs of which 100 are an i-vector, float16) to a
temporary one. With --plan, makes the plan of an epoch with as many chunks, and finds the chunks of all of its batches.
With --disk, writes as many frames (520 bytes each), makes the system forget them, and reads them once with one learner.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from asr_am.egs.augment import Masking
from asr_am.egs.epoch_plan import BUFFER, ChunkOrder, EpochPlan
from asr_am.egs.loader import Loader
from asr_am.egs.store import EgsInfo, EgsSet, Index, crc32_of

CHUNK = 21  # frames


def write_random(directory: Path, frames: int = 1_000_000, dim: int = 260, shards: int = 4, ivector: int = 100) -> None:
    """Writes random examples in utterances of 500 frames."""
    rng = np.random.default_rng(0)
    (directory / "train").mkdir()
    each, utterances = frames // shards, frames // shards // 500
    crc32s: list[int] = []
    for shard in range(shards):
        with (directory / "train" / f"features.{shard}.npy").open("wb") as file:
            rows = each + CHUNK
            header = {"descr": "<f2", "fortran_order": False, "shape": (rows, dim - ivector)}
            np.lib.format.write_array_header_1_0(file, header)
            for begin in range(0, rows, 100_000):
                size = min(100_000, rows - begin), dim - ivector
                file.write(rng.standard_normal(size, dtype=np.float32).astype(np.float16).tobytes())
        targets_T = rng.integers(0, 32000, each + CHUNK).astype(np.int16)
        np.save(directory / "train" / f"targets.{shard}.npy", targets_T)
        features_TF = np.load(directory / "train" / f"features.{shard}.npy", mmap_mode="r")
        spans = [slice(500 * number, 500 * (number + 1)) for number in range(utterances)]
        crc32s += [crc32_of(targets_T[span], features_TF[span]) for span in spans]
    total = shards * utterances
    Index(
        [f"u{i:06d}" for i in range(total)],
        np.repeat(np.arange(shards), utterances),
        np.tile(np.arange(utterances) * 500, shards),
        np.full(total, 500),
        np.array(crc32s, dtype=np.uint32),
    ).save(directory / "train")
    streams = {"logmel": dim - ivector}
    if ivector:
        streams["ivector"] = ivector
        vectors_RS = rng.standard_normal((2 * total, ivector), dtype=np.float32)
        vectors_RS.tofile(directory / "train" / "vectors.f32")
        np.savez(directory / "train" / "vectors.npz", first=2 * np.arange(total), count=np.full(total, 2))
    sizes = {"train": {"utterances": total, "frames": total * 500}}
    EgsInfo(kind="+".join(streams), dim=dim, num_pdfs=32000, chunk=CHUNK, sets=sizes, streams=streams, period=300).save(
        directory
    )


def measure(egs: EgsSet, workers: int, masking: Masking | None, buffer: int = BUFFER) -> str:
    """Returns the frames/s of an epoch as text, by the clock and by CPU time of all threads."""
    loader = Loader(egs, 256, random_offset=True, masking=masking, workers=workers, buffer=buffer)
    plan = loader.plan(0)
    frames, start, cpu = 0, time.perf_counter(), time.process_time()
    for batch in loader.batches(plan, range(len(plan))):
        frames += batch.frames
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return f"{frames / wall / 1e6:.2f} M frames/s ({frames / cpu / 1e6:.2f} M per CPU second)"


def measure_plan(chunks: int) -> None:
    """Prints time and memory of a plan."""
    utterances = chunks // 20
    frames_U = np.random.default_rng(0).integers(200, 620, utterances)
    key_U = np.random.default_rng(1).integers(0, 1 << 62, utterances).astype(np.uint64)
    order = ChunkOrder(frames_U, key_U, np.arange(utterances), CHUNK, 1, True, True)
    before, began = peak_memory(), time.perf_counter()
    plan = EpochPlan(order, 0, 256)
    made, found = time.perf_counter() - began, 0
    for batch in range(len(plan)):
        found += len(plan.part(plan.chunks(batch)).begin_N)
    spent, grown = time.perf_counter() - began, peak_memory() - before
    print(
        f"plan of {found:,} chunks in {len(plan.groups)} groups: {made:.2f} s, all batches {spent:.1f} s; "
        f"{grown / 1e6:.0f} MB at the most"
    )


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_disk(frames: int, buffer: int) -> None:
    """Prints the frames/s of an epoch from disk."""
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        directory = Path(temporary)
        write_random(directory, frames, ivector=0)
        for path in (directory / "train").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        egs = EgsSet(directory, "train")
        speed = measure(egs, 4, None, buffer)
        groups = Loader(egs, 256, buffer=buffer).order.num_groups
        print(f"{frames * 520 / 1e9:.1f} GB from disk in {groups} groups: {speed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("egs", nargs="?", type=Path, help="exp/<corpus>/egs/<name>")
    parser.add_argument("--plan", type=int, help="chunks of a plan to measure")
    parser.add_argument("--disk", type=int, help="frames to read from disk")
    parser.add_argument("--buffer", type=int, default=BUFFER, help="chunks that are shuffled together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plan:
        measure_plan(options.plan)
        return
    if options.disk:
        measure_disk(options.disk, options.buffer)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.egs or Path(temporary)
        if options.egs is None:
            write_random(directory)
        egs = EgsSet(directory, "train")
        bands = egs.info.band_columns.stop - egs.info.band_columns.start
        masks = Masking(1, 8, 1, 5, streams=1 if bands % 3 else 3)
        measure(egs, 1, None)  # warm the page cache
        for workers in (1, 2, 4):
            plain, masked = measure(egs, workers, None), measure(egs, workers, masks)
            print(f"{workers} threads: {plain}, with masking {masked}")


if __name__ == "__main__":
    main()
