"""i-vectors of speakers: one from all of a speaker's speech, or *online*, from the speech so far.

Test speakers may have said little; a network that has only seen i-vectors from minutes of speech would be at a loss. So
it is trained, as in Kaldi, on i-vectors from a few utterances: `parts` makes several speakers of one, and in each the
i-vector of a segment (of a few seconds) is estimated from all speech up to the end of that segment.

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
    """scale: of posteriors. max_count: see `Extractor.ivectors`. period: frames of a segment."""

    ubm: DiagUbm
    extractor: Extractor
    scale: float = 1.0
    max_count: float = 0.0
    period: int = 300

    def offline(self, speakers: Iterable[Iterable[Tensor]]) -> Tensor:
        """[B, S], a row for each of B speakers: from the frames, float32 [T, D], of all utterances of each."""
        rows = []
        for block in blocks(map(self._total, speakers), []):
            projected_BS = self.extractor.project(block.first_KGD)
            rows.append(self.extractor.ivectors(block.counts_KG, projected_BS, self.max_count))
        return torch.cat(rows)

    def online(self, utterances: Iterable[Tensor]) -> list[Tensor]:
        """[K, S] of each utterance, in the order of speaking: for every segment from the speech so far."""
        rows, lengths = [], list[int]()
        counts_G, projected_S = self.ubm.weights_G.new_zeros(1), self.ubm.weights_G.new_zeros(1)  # of what came before
        for block in blocks(self._statistics(utterances), lengths):
            counts_BG = block.counts_KG.double().cumsum(dim=0) + counts_G
            projected_BS = self.extractor.project(block.first_KGD).cumsum(dim=0) + projected_S
            rows.append(self.extractor.ivectors(counts_BG, projected_BS, self.max_count))
            counts_G, projected_S = counts_BG[-1], projected_BS[-1]
        return list(torch.cat(rows).split(lengths))

    def _total(self, utterances: Iterable[Tensor]) -> Statistics:
        """Of a speaker, as one row."""
        count_1G, first_1GD = self.ubm.weights_G.new_zeros(1, 1), self.ubm.weights_G.new_zeros(1, 1, 1)
        for statistics in self._statistics(utterances):
            count_1G = count_1G + statistics.counts_KG.sum(dim=0, dtype=torch.float64)
            first_1GD = first_1GD + statistics.first_KGD.sum(dim=0, dtype=torch.float64)
        return Statistics(count_1G, first_1GD)

    def _statistics(self, utterances: Iterable[Tensor]) -> Iterator[Statistics]:
        return (segment_statistics(self.ubm, x_TD, self.period, self.scale) for x_TD in utterances)


def blocks(statistics: Iterable[Statistics], lengths: list[int]) -> Iterator[Statistics]:
    """The rows of several utterances (or speakers) together, `BATCH` or a few more: large products are faster.

    The number of rows of each utterance is appended to `lengths`.
    """
    waiting: list[Statistics] = []
    for found in statistics:
        waiting.append(found)
        lengths.append(len(found.counts_KG))
        if sum(len(s.counts_KG) for s in waiting) >= BATCH:
            yield stack(waiting)
            waiting = []
    if waiting:
        yield stack(waiting)


def split_speaker(utterances: Sequence[str], size: int) -> list[Sequence[str]]:
    """A speaker's utterances as those of several speakers with `size` utterances each; 0: as they are."""
    step = size or len(utterances)
    return [utterances[begin : begin + step] for begin in range(0, len(utterances), step)]
