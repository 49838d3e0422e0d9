"""Extraction of i-vectors: offline, from all speech of a speaker, or online, from the speech so far.

Test speakers may have said little, and a network that has only seen i-vectors from minutes of speech generalises badly
to them. As in Kaldi, it is therefore trained on i-vectors from a few utterances: `split_speaker` divides a speaker into
several, and the i-vector of each segment (of a few seconds) is estimated from all speech up to the end of that segment.

Shapes: T frames, K segments of an utterance, B segments or speakers, G Gaussians, D features,
S dimensions of the i-vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asr_am.features.ivector.extractor import Extractor
from asr_am.features.ivector.statistics import Statistics, segment_statistics, stack
from asr_am.features.ivector.train_extractor import BATCH
from asr_am.features.ivector.ubm import DiagUbm


@dataclass(frozen=True)
class Estimator:
    """Extracts i-vectors from frames.

    Attributes:
        ubm: gives the posteriors.
        scale: scale on posteriors (Kaldi's posterior-scale).
        max_count: see `Extractor.ivectors`.
        period: frames per segment.
    """

    ubm: DiagUbm
    extractor: Extractor
    scale: float = 1.0
    max_count: float = 0.0
    period: int = 300

    def offline(self, speakers: Iterable[Iterable[Tensor]]) -> Tensor:
        """Returns one i-vector per speaker, [B, S], from the frames, float32 [T, D], of all utterances of each."""
        rows = []
        for block in blocks(map(self._total, speakers), []):
            projected_BS = self.extractor.project(block.first_KGD)
            rows.append(self.extractor.ivectors(block.counts_KG, projected_BS, self.max_count))
        return torch.cat(rows)

    def online(self, utterances: Iterable[Tensor]) -> list[Tensor]:
        """Returns i-vectors [K, S] of each utterance of a speaker, in order. Each segment uses the speech so far."""
        rows, lengths = [], list[int]()
        counts_G, projected_S = self.ubm.weights_G.new_zeros(1), self.ubm.weights_G.new_zeros(1)  # of earlier segments
        for block in blocks(self._statistics(utterances), lengths):
            counts_BG = block.counts_KG.double().cumsum(dim=0) + counts_G
            projected_BS = self.extractor.project(block.first_KGD).cumsum(dim=0) + projected_S
            rows.append(self.extractor.ivectors(counts_BG, projected_BS, self.max_count))
            counts_G, projected_S = counts_BG[-1], projected_BS[-1]
        return list(torch.cat(rows).split(lengths))

    def _total(self, utterances: Iterable[Tensor]) -> Statistics:
        """Returns the statistics of a speaker as one row."""
        count_1G, first_1GD = self.ubm.weights_G.new_zeros(1, 1), self.ubm.weights_G.new_zeros(1, 1, 1)
        for statistics in self._statistics(utterances):
            count_1G = count_1G + statistics.counts_KG.sum(dim=0, dtype=torch.float64)
            first_1GD = first_1GD + statistics.first_KGD.sum(dim=0, dtype=torch.float64)
        return Statistics(count_1G, first_1GD)

    def _statistics(self, utterances: Iterable[Tensor]) -> Iterator[Statistics]:
        return (segment_statistics(self.ubm, x_TD, self.period, self.scale) for x_TD in utterances)


def blocks(statistics: Iterable[Statistics], lengths: list[int]) -> Iterator[Statistics]:
    """Yields rows of several utterances (or speakers) in blocks of at least `BATCH`, since large products are faster.

    The number of rows of each utterance is appended to `lengths`.
    """
    pending: list[Statistics] = []
    for rows in statistics:
        pending.append(rows)
        lengths.append(len(rows.counts_KG))
        if sum(len(s.counts_KG) for s in pending) >= BATCH:
            yield stack(pending)
            pending = []
    if pending:
        yield stack(pending)


def split_speaker(utterances: Sequence[str], size: int) -> list[Sequence[str]]:
    """Divides a speaker's utterances into those of several speakers with `size` utterances each. 0: does not divide."""
    step = size or len(utterances)
    return [utterances[begin : begin + step] for begin in range(0, len(utterances), step)]
