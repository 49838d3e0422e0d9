"""Section `loading`: the loader alone, and training from files against computing alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.egs.loader import Batch, Loader
from asr_am.egs.store import EgsSet
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.train.gradient import ModelState
from asr_am.train.train_options import TrainOptions
from scripts.gpu_check.check import Check
from scripts.gpu_check.examples import write_examples

LEAST = 0.95  # end-to-end / computing alone


def section(check: Check) -> None:
    utterances, dim, pdfs, batch = (2, 12, 20, 8) if check.small else (2000, 260, 32_000, 2560)
    egs = EgsSet(write_examples(check.folder / "egs", utterances=utterances, dim=dim, pdfs=pdfs), "train")
    workers = 1 if check.small else 8
    loader = Loader(egs, batch, random_offset=True, workers=workers)
    plan = loader.plan(0)
    numbers = range(len(plan) - 1)  # without the last one, which is smaller
    frames = sum(1 for _ in loader.batches(plan, numbers))  # into the page cache
    begin = time.perf_counter()
    batches = list(loader.batches(plan, numbers))
    rate = sum(b.frames for b in batches) / (time.perf_counter() - begin)
    check.row(f"loader alone, {workers} threads", None, f"{rate:,.0f} frames/s", rate=rate, batches=frames)
    options = TrainOptions(
        batch_size=batch, precision="bfloat16", device=check.device,
        model=BlstmOptions(1, 8, 8) if check.small else BlstmOptions(6, 512, 256),
    )  # fmt: skip
    model = Blstm(options.model, dim, pdfs).to(check.device)  # type: ignore[arg-type]
    params = FlatParams(model)
    optimizer = Optimizer(params, options.optimizer)
    optimizer.lr = 0.01
    learner = ModelState(model, params, optimizer, loader, options, torch.device(check.device))

    def speed(source: Iterator[Batch]) -> float:
        """Returns frames/s after the first batch, before which the loader has nothing ready."""
        first = next(source)
        learner.backward(first, first.frames, None)
        check.synchronize()
        begin, frames = time.perf_counter(), 0
        for b in source:
            learner.backward(b, b.frames, None)
            optimizer.step()
            frames += b.frames
        check.synchronize()
        return frames / (time.perf_counter() - begin)

    repeats = len(numbers)
    resident = to_device(check, batches[0])
    speed(itertools.repeat(resident, 3))
    alone = speed(itertools.repeat(resident, repeats))
    both = speed(loader.batches(plan, numbers))
    limits = check.device == "cuda" and not check.small
    check.row("computing alone", None, f"{alone:,.0f} frames/s", rate=alone)
    share = both / alone
    check.row(
        "end-to-end",
        share >= LEAST if limits else None,
        f"{both:,.0f} frames/s, {share:.1%}, needs {LEAST:.0%}",
        rate=both,
    )


def to_device(check: Check, batch: Batch) -> Batch:
    """Returns a batch whose features and targets are on the device already."""
    x_BTF, targets_BT = batch.x_BTF.to(check.device), batch.targets_BT.to(check.device)
    return Batch(batch.id, x_BTF, targets_BT, batch.lengths_B, batch.utterances, batch.digest)
