"""Compares the acoustic models of conf/model for about an hour of speech: parameters, frames/s in training and scoring.

    python scripts/bench/models.py [--threads N] [--rounds N] [--inputs 160] [--pdfs 300]

A training step is forward, cross-entropy, backward and Adam on 1,344 frames: 64 chunks of 21 for the bi-LSTM, 14 of 96
for the others. Scoring is in the windows of 21 frames every 10 that bi-LSTMs are decoded in, of others in whole
utterances of 5 seconds. All models take turns. Prints medians. The last line is the constraint of TDNN-F beside that of
torch, forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn

from asr_am.decode.scorer import Window, log_posteriors
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.models.acoustic import AcousticModel, model_options
from asr_am.models.tdnnf import semi_orthogonal
from asr_am.train.frame_loss import batch_loss

CONF = Path(__file__).resolve().parents[2] / "conf/model"
MODELS = (("blstm", 1), ("tdnnf", 1), ("tdnnf", 3), ("conformer", 1), ("conformer", 3))  # file, frames per output
UTTERANCE = 500  # frames


def made(name: str, subsampling: int, inputs: int, pdfs: int) -> AcousticModel:
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))["model"]
    options = {key: value for key, value in content.items() if key != "name" and not str(value).startswith("${")}
    return model_options(**options | ({"subsampling": subsampling} if "subsampling" in options else {})).make(
        inputs, pdfs
    )


def training_step(model: AcousticModel, chunk: int) -> Callable[[], object]:
    params = FlatParams(model)
    optimizer = Optimizer(params, OptimizerOptions("adam"))
    optimizer.lr = 1e-4
    chunks = 1344 // chunk
    x_BTF, lengths_B = torch.randn(chunks, chunk, model.inputs), torch.full((chunks,), chunk)
    targets_BT = torch.randint(0, model.outputs, (chunks, chunk))

    def step() -> None:
        params.g.zero_()
        (batch_loss(model, x_BTF, lengths_B, targets_BT)[0] / 1344).backward()
        optimizer.step()

    return step


def scoring(model: AcousticModel, window: Window) -> Callable[[], object]:
    features_TF = np.random.default_rng(0).standard_normal((UTTERANCE, model.inputs)).astype(np.float32)

    def score() -> None:
        model.eval()
        log_posteriors(model, features_TF, window)
        model.train()

    return score


def constraint(rounds: int) -> str:
    """Returns milliseconds for a matrix of 64 x 768 by our constraint and by torch's."""
    weight = nn.Parameter(torch.randn(64, 768))
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(768, 64, bias=False))
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: semi_orthogonal(weight),
        "torch.nn.utils.parametrizations.orthogonal": lambda: orthogonal.weight,
    }
    found = []
    for name, way in ways.items():
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            way().square().sum().backward()
            times.append(time.perf_counter() - begin)
        found.append(f"{name} {1e3 * statistics.median(times):.1f} ms")
    return f"a semi-orthogonal matrix of 64 x 768: {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--inputs", type=int, default=160)
    parser.add_argument("--pdfs", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    models = {
        f"{name}, {n} frame{'s' * (n > 1)} per output": made(name, n, arguments.inputs, arguments.pdfs)
        for name, n in MODELS
    }
    parts: dict[tuple[str, str], Callable[[], object]] = {}
    for name, model in models.items():
        recurrent = name.startswith("blstm")
        parts[name, "training"] = training_step(model, 21 if recurrent else 96)
        parts[name, "scoring"] = scoring(model, Window(21, 10) if recurrent else Window(0, 0))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in parts}
    for trial in range(arguments.rounds + 1):
        for key, part in parts.items():
            begin = time.perf_counter()
            part()
            if trial:  # the first one warms up
                times[key].append(time.perf_counter() - begin)
    print(f"{arguments.inputs} inputs, {arguments.pdfs} pdfs, {arguments.threads} threads; frames/s")
    print(f"{'':32} {'parameters':>11} {'training':>9} {'scoring':>9}")
    for name, model in models.items():
        training, score = (statistics.median(times[name, part]) for part in ("training", "scoring"))
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:32} {size:11,} {1344 / training:9,.0f} {UTTERANCE / score:9,.0f}")
    print(constraint(arguments.rounds))


if __name__ == "__main__":
    main()
