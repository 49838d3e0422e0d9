"""Section `decoding`: scores of frames on the device against those on the CPU."""

from __future__ import annotations

import time
from copy import deepcopy

import numpy as np
import torch

from asr_am.decode.scorer import Window, log_posteriors
from asr_am.models.blstm import Blstm, BlstmOptions
from scripts.gpu_check.check import Check

LIMIT = 0.05  # nats


def section(check: Check) -> None:
    torch.manual_seed(0)
    layers, cells, inputs, outputs, frames = (1, 8, 12, 20, 50) if check.small else (6, 512, 260, 8000, 1000)
    model = Blstm(BlstmOptions(layers, cells, cells), inputs, outputs).eval()
    features_TF = np.random.default_rng(0).standard_normal((frames, inputs)).astype(np.float32)
    on_device = deepcopy(model).to(check.device)
    for text in ("21/10", "whole"):
        window, scores = Window.parse(text), []
        for name, network in ((check.device, on_device), ("CPU", model)):
            log_posteriors(network, features_TF, window)  # warms up
            begin = time.perf_counter()
            scores.append(log_posteriors(network, features_TF, window))
            rate = frames / (time.perf_counter() - begin)
            check.row(f"windows {text}, {name}", None, f"{rate:,.0f} frames/s", rate=rate)
        found = float(np.abs(scores[0] - scores[1]).max())
        check.row(f"windows {text}", found < LIMIT, f"differ by {found:.1e} nats at most", difference=found)
