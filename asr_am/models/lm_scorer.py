"""Computes log-probabilities of the words of sentences under a recurrent language model with its full softmax.

Shapes: B sentences, T units, N units of all sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from asr_am.lang.units import BOUNDARY, Units
from asr_am.models.lstm_lm import LstmLm
from asr_am.progress import track

POSITIONS = 4096  # units of a batch with padding, unless one sentence is longer
LOGITS = 1 << 25  # computed at once, 128 MB


def word_logprobs(model: LstmLm, units: Units, sentences: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Returns natural log P(word | previous words), float64 [words + 1], for each sentence. The last is of its end.

    A word of several units gets the sum of their log-probabilities. A word without a spelling gets that of `<unk>`.
    """
    spelled = [[*(units.of(word) for word in sentence), (BOUNDARY,)] for sentence in sentences]
    lengths = [sum(map(len, words)) for words in spelled]
    result: list[np.ndarray] = [np.zeros(0)] * len(sentences)
    with torch.inference_mode():
        for batch in track(list(_batches(lengths)), "scoring sentences with the recurrent LM"):
            rows = [[unit for word in spelled[i] for unit in word] for i in batch]
            for i, unit_N in zip(batch, _unit_logprobs(model, rows), strict=True):
                starts = [0, *accumulate(len(word) for word in spelled[i])][:-1]
                result[i] = np.add.reduceat(unit_N, starts)
    return result


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields indices of sentences of about equal length."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > POSITIONS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _unit_logprobs(model: LstmLm, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns float64 log-probabilities of the units of each row. Every row ends with BOUNDARY."""
    device = model.embedding.weight.device
    longest = max(map(len, rows))
    target_BT = torch.tensor([[*row, *[BOUNDARY] * (longest - len(row))] for row in rows], device=device)
    input_BT = torch.roll(target_BT, 1, dims=1)
    input_BT[:, 0] = BOUNDARY
    h_NP, target_N = model.hidden(input_BT).flatten(0, 1), target_BT.flatten()
    step = max(1, LOGITS // model.size)
    parts: list[Tensor] = []
    for first in range(0, len(target_N), step):
        logits = model.logits(h_NP[first : first + step])
        true = logits.gather(1, target_N[first : first + step, None])[:, 0]
        parts.append(true - torch.logsumexp(logits, dim=1))
    logprob_BT = torch.cat(parts).view(target_BT.shape).double().cpu().numpy()
    return [logprob_BT[b, : len(row)] for b, row in enumerate(rows)]
