"""A transform for each speaker of a set: fMLLR where there is enough speech, else a shift, else that of the average.

Speaker-adaptive training moves features and mixtures together away from unadapted features, so that for a speaker of
whom nothing is known the identity would be a bad transform; the mean of the training speakers' is a good one.

Shapes: N frames of a block, D feature dimension, E = D + 1, S speakers of a group.

Speakers are dealt with in groups of `GROUP_SIZE`, each by one worker: all transforms of a group are updated together, and
memory does not grow with the corpus.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from asr_am.errors import InputError
from asr_am.hmm.expectations import Expectation, Occupation
from asr_am.hmm.fmllr import FmllrStats, estimate, estimate_offsets, identity, objective
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.parallel import parallel_map

logger = logging.getLogger(__name__)

GROUP_SIZE = 16  # speakers
BLOCK = 16_384  # frames whose statistics are taken together


@dataclass(frozen=True, kw_only=True)
class FmllrOptions:
    """min_frames: of speech (silence does not count) for a full transform; min_shift_frames: for one that only shifts.

    sweeps: over the rows of a transform, at most. device: torch's name of where the sums and updates are done.
    """

    min_frames: float = 500.0
    min_shift_frames: float = 100.0
    sweeps: int = 20
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 < self.min_shift_frames <= self.min_frames or self.sweeps < 1:
            raise InputError(
                f"fmllr: min_shift_frames={self.min_shift_frames} and min_frames={self.min_frames} must be above 0 and "
                f"in this order, sweeps={self.sweeps} at least 1"
            )


class Block(NamedTuple):
    """Frames of one speaker of a group: as they are without a transform, as the Gaussians see them, and their pdfs."""

    speaker: int
    x_ND: np.ndarray
    current_ND: np.ndarray
    occupation: Occupation


class SpeakerGroup(Protocol):
    """Up to GROUP_SIZE speakers and their frames."""

    @property
    def speakers(self) -> Sequence[str]: ...

    def blocks(self) -> Iterator[Block]: ...


class SpeakerTransform(NamedTuple):
    """transform: float32 [D, E]. kind: full, shift or none. frames: of speech. gain: in log-likelihood per frame."""

    speaker: str
    transform: np.ndarray
    kind: str
    frames: float
    gain: float


@dataclass(frozen=True)
class AlignedGroup:
    """Speakers of a set that is aligned. base: frames without transforms; seen: those that the alignment is of.

    pieces_S: of each speaker the rows of every utterance in the stores, with their pdfs, negative where frames do not
    count.
    """

    speakers: Sequence[str]
    base: FrameStore
    current: FrameStore
    pieces_S: Sequence[Sequence[tuple[slice, np.ndarray]]]

    def blocks(self) -> Iterator[Block]:
        """See `SpeakerGroup`."""
        for speaker, pieces in enumerate(self.pieces_S):
            for span, pdf_T in pieces:
                yield Block(speaker, self.base.x_ND[span], self.current.x_ND[span], Occupation.of_alignment(pdf_T))


def aligned_groups(
    base: FrameStore, current: FrameStore, speakers_U: Sequence[str], pdf_N: np.ndarray
) -> Iterator[AlignedGroup]:
    """The speakers of a set in groups, in the order of their names."""
    utterances: dict[str, list[int]] = {}
    for utterance, speaker in enumerate(speakers_U):
        utterances.setdefault(speaker, []).append(utterance)
    for speakers in in_groups(sorted(utterances)):
        spans_S = [[base.span(utterance) for utterance in utterances[speaker]] for speaker in speakers]
        yield AlignedGroup(speakers, base, current, [[(span, pdf_N[span]) for span in spans] for spans in spans_S])


def in_groups(speakers: Sequence[str]) -> list[Sequence[str]]:
    """The same whatever the number of workers."""
    return [speakers[begin : begin + GROUP_SIZE] for begin in range(0, len(speakers), GROUP_SIZE)]


def adapt_speakers(
    groups: Sequence[SpeakerGroup], gmms: DiagGmms, options: FmllrOptions, jobs: int, title: str,
    target: DiagGmms | None = None, start: np.ndarray | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The transform [D, E] of every speaker, with a line of what was gained and how many got none.

    gmms: gives the posteriors of Gaussians, from the frames as it sees them. target: the mixtures to adapt to, of the
    same Gaussians (default: `gmms`). start: the transform [D, E] of a speaker of whom nothing is known (default:
    identity); what others get is estimated from there.
    """
    work = functools.partial(adapt_group, gmms, target, start, options)
    on_cpu = torch.device(options.device).type == "cpu"  # CUDA does not outlive a fork
    results = [r for group in parallel_map(work, groups, jobs if on_cpu else 1, f"{title}: fMLLR") for r in group]
    frames = sum(result.frames for result in results)
    gain = sum(result.gain * result.frames for result in results) / max(frames, 1.0)
    logger.info("%s: fMLLR of %d speakers, log-likelihood per frame %+.3f", title, len(results), gain)
    for kind, meaning in (("shift", "got only a shift"), ("none", "are taken for average ones")):
        few = [f"{result.speaker} ({result.frames:.0f})" for result in results if result.kind == kind]
        if few:
            logger.warning("%s: %d speakers have too few frames of speech and %s: %s", title, len(few), meaning,
                           " ".join(few[:10]))  # fmt: skip
    return {result.speaker: result.transform for result in results}


def adapt_group(
    gmms: DiagGmms, target: DiagGmms | None, start: np.ndarray | None, options: FmllrOptions, group: SpeakerGroup
) -> list[SpeakerTransform]:
    """The transforms of one group of speakers."""
    expectation = Expectation(gmms, target, options.device)
    stats = FmllrStats.zeros(len(group.speakers), gmms.dim, expectation.device)
    for blocks in batches(group.blocks()):
        accumulate_blocks(stats, expectation, blocks)
    start_SDE = identity(stats)
    if start is not None:
        start_SDE[:] = torch.from_numpy(start.astype(np.float64)).to(expectation.device)
    transform_SDE, kinds = estimate_transforms(stats, options, start_SDE)
    before_S, after_S = objective(stats, start_SDE), objective(stats, transform_SDE)
    gain_S = torch.where(stats.count_S > 0, after_S - before_S, 0.0)
    columns = (transform_SDE.float().cpu().numpy(), kinds, stats.count_S.tolist(), gain_S.tolist())
    return [SpeakerTransform(*row) for row in zip(group.speakers, *columns, strict=True)]


def batches(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Lists of blocks with BLOCK frames or little more: many small ones would cost more than their arithmetic."""
    batch: list[Block] = []
    for block in blocks:
        batch.append(block)
        if sum(len(b.x_ND) for b in batch) >= BLOCK:
            yield batch
            batch = []
    if batch:
        yield batch


def accumulate_blocks(stats: FmllrStats, expectation: Expectation, blocks: Sequence[Block]) -> None:
    """Add the statistics of some frames, those of one speaker next to one another."""
    edges = np.cumsum([0, *(len(block.x_ND) for block in blocks)]).tolist()
    occupation = Occupation.joined([block.occupation for block in blocks], edges)
    current_ND = expectation.tensor(np.concatenate([block.current_ND for block in blocks]))
    x_ND = expectation.tensor(np.concatenate([block.x_ND for block in blocks]))
    precision_ND, linear_ND = expectation(current_ND, occupation)
    for speaker, group in itertools.groupby(range(len(blocks)), key=lambda index: blocks[index].speaker):
        indices = list(group)
        rows = slice(edges[indices[0]], edges[indices[-1] + 1])
        frames = sum(blocks[index].occupation.frames for index in indices)
        stats.add(speaker, frames, x_ND[rows], precision_ND[rows], linear_ND[rows])


def estimate_transforms(
    stats: FmllrStats, options: FmllrOptions, start_SDE: torch.Tensor
) -> tuple[torch.Tensor, list[str]]:
    """Transforms [S, D, E] and for each whether it is full, a shift, or none (the one in `start_SDE`).

    A transform that is not finite, or worse than none, is not used: a speaker's frames may all be alike.
    """
    transform_SDE, kinds = start_SDE.clone(), ["none"] * len(stats.count_S)
    plain_S = objective(stats, start_SDE)
    for kind, minimum in (("shift", options.min_shift_frames), ("full", options.min_frames)):
        chosen = torch.nonzero(stats.count_S >= minimum)[:, 0]
        if len(chosen) == 0:
            continue
        part = stats.of(chosen)
        first_SDE = start_SDE[chosen]
        new_SDE = estimate_offsets(part, first_SDE) if kind == "shift" else estimate(part, options.sweeps, first_SDE)[0]
        good = torch.isfinite(new_SDE).all(dim=(1, 2)) & (objective(part, new_SDE) >= plain_S[chosen])
        transform_SDE[chosen[good]] = new_SDE[good]
        for speaker in chosen[good].tolist():
            kinds[speaker] = kind
    return transform_SDE, kinds
