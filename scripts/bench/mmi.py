"""Measures a training step with the MMI loss beside one with cross-entropy on the same batch, on the CPU.

    python scripts/bench/mmi.py EXP [--chunks 32] [--frames 63] [--rounds 10] [--threads 2]

EXP is exp/<corpus> after a training with mmi.train=true, whose network and denominator graph it takes. The features are
random. Rounds are interleaved. The figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.acoustic import AcousticModel
from asr_am.models.model_file import load_acoustic_model
from asr_am.train.frame_loss import batch_loss
from asr_am.train.mmi_loss import MmiLoss, MmiOptions


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exp", type=Path)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--frames", type=int, default=63)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    graph = DenominatorGraph.load(next(arguments.exp.glob("egs/denominator-*/graph.npz")))
    model, _ = load_acoustic_model(next(arguments.exp.glob("train/*-mmi*/best.pt")))
    assert isinstance(model, AcousticModel)
    model.train()
    mmi = MmiLoss(graph, np.zeros(graph.num_pdfs, np.float32), MmiOptions(), torch.device("cpu"))
    x_BTF = torch.randn(arguments.chunks, arguments.frames, model.inputs)
    targets_BT = torch.randint(0, graph.num_pdfs, x_BTF.shape[:2])
    scores_BTP = torch.randn(*x_BTF.shape[:2], graph.num_pdfs)

    def step(loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        loss(model, x_BTF, None, targets_BT)[0].backward()

    parts = {
        "step, cross-entropy": partial(step, batch_loss),
        "step, MMI": partial(step, mmi),
        "sums over paths": partial(mmi.paths.sum_paths, scores_BTP),
    }
    for part in parts.values():
        part()
    times = [{name: seconds(part) for name, part in parts.items()} for _ in range(arguments.rounds)]
    frames = arguments.chunks * arguments.frames
    print(f"{len(graph.pdf_S):,} states, {graph.arcs_SS.nnz:,} arcs, {frames:,} frames a batch")
    print(f"{'':20} {'ms':>6} {'frames/s':>9} {'core ms/frame':>14}")
    for name in parts:
        median = statistics.median(each[name] for each in times)
        core = 1e3 * median * arguments.threads / frames
        print(f"{name:20} {1e3 * median:6.0f} {frames / median:9,.0f} {core:14.3f}")


if __name__ == "__main__":
    main()
