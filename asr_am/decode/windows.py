"""Posteriors of a whole utterance from a model trained on short windows.

Shapes: B windows, T frames, C frames in a window, F features, P pdfs.

A bi-LSTM trained on 21-frame chunks has never seen a longer history, so an utterance is scored in windows of that
length which overlap. A frame's log-posterior is the weighted mean over the windows that hold it; the weight falls
linearly towards a window's edges, where the model saw less of the context on one side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from asr_am.errors import InputError


@dataclass(frozen=True)
class Window:
    """`chunk` frames every `hop` frames (chunk 0: the whole utterance at once)."""

    chunk: int
    hop: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """From "21/10" or "whole"; InputError for anything else."""
        if text == "whole":
            return cls(0, 0)
        chunk, slash, hop = text.partition("/")
        if not (slash and chunk.isdecimal() and hop.isdecimal() and 1 <= int(hop) <= int(chunk)):
            raise InputError(f"decode.windows: {text!r} is not <chunk>/<hop> with 1 <= hop <= chunk, nor `whole`")
        return cls(int(chunk), int(hop))

    def __str__(self) -> str:
        return f"{self.chunk}/{self.hop}" if self.chunk else "whole"

    def starts(self, num_frames: int) -> np.ndarray:
        """First frames of the windows; the last window ends with the utterance."""
        if self.chunk == 0 or num_frames <= self.chunk:
            return np.zeros(1, dtype=np.int64)
        last = num_frames - self.chunk
        return np.append(np.arange(0, last, self.hop), last)


@torch.inference_mode()
def log_posteriors(model: nn.Module, features_TF: np.ndarray, window: Window, batch: int = 256) -> np.ndarray:
    """float32 [T, P]: mean log-posteriors; `model(x_BTF, lengths_B)` gives logits [B, T, P] and is in eval mode."""
    num_frames = len(features_TF)
    if num_frames == 0:
        raise InputError("an utterance without frames cannot be scored; remove it")
    x_TF = torch.from_numpy(np.ascontiguousarray(features_TF, dtype=np.float32))
    size = min(window.chunk or num_frames, num_frames)
    frames_BC = torch.from_numpy(window.starts(num_frames))[:, None] + torch.arange(size)
    weight_C = torch.minimum(torch.arange(size), size - 1 - torch.arange(size)) + 1.0
    total_TP, weight_T = None, torch.zeros(num_frames)
    for frames in torch.split(frames_BC, batch):
        value_BCP = _score(model, x_TF[frames], window.chunk) * weight_C[:, None]
        if total_TP is None:
            total_TP = torch.zeros(num_frames, value_BCP.shape[2])
        total_TP.index_add_(0, frames.reshape(-1), value_BCP.reshape(-1, value_BCP.shape[2]))
        weight_T.index_add_(0, frames.reshape(-1), weight_C.repeat(len(frames)))
    assert total_TP is not None
    return (total_TP / weight_T[:, None]).numpy()


def _score(model: nn.Module, x_BCF: Tensor, chunk: int) -> Tensor:
    """Log-posteriors [B, C, P]; an utterance shorter than a chunk is padded, as in training."""
    size = x_BCF.shape[1]
    if size < chunk:
        x_BCF = nn.functional.pad(x_BCF, (0, 0, 0, chunk - size))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    lengths_B = torch.full((len(x_BCF),), size, dtype=torch.int64)
    logits_BCP = model(x_BCF.to(device), lengths_B)[:, :size]
    return torch.log_softmax(logits_BCP.float(), dim=-1).cpu()
