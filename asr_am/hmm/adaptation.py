"""fMLLR transforms for the speakers of a set: a full transform, an offset only, or the average speaker's transform.

Speaker-adaptive training moves features and mixtures together away from unadapted features. The identity is then a poor
transform for a speaker with too little speech, and the mean of the training speakers' transforms is a good one.

Speakers are processed in groups of `GROUP_SIZE`, one worker process per group. All transforms of a group are updated
together, and memory does not grow with the corpus.

Shapes: N frames of a block, D feature dimension, E = D + 1, S speakers of a group.
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
from asr_am.hmm.alignments import FramePdfs
from asr_am.hmm.expectations import Expectation, Occupation
from asr_am.hmm.fmllr import FmllrStats, estimate, estimate_offsets, identity, objective
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.parallel import parallel_map

logger = logging.getLogger(__name__)

GROUP_SIZE = 16  # speakers
BLOCK = 16_384  # frames per accumulation


@dataclass(frozen=True, kw_only=True)
class FmllrOptions:
    """Options of fMLLR estimation.

    Attributes:
        min_frames: speech frames (silence excluded) that a full transform needs.
        min_shift_frames: speech frames that a transform with only an offset needs.
        sweeps: maximum number of sweeps over the rows of a transform.
        device: torch device of accumulation and estimation.
    """

    min_frames: float = 500.0
    min_shift_frames: float = 100.0
    sweeps: int = 20
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 < self.min_shift_frames <= self.min_frames or self.sweeps < 1:
            raise InputError(
                f"fmllr: min_shift_frames={self.min_shift_frames} and min_frames={self.min_frames} must be above 0 and "
                f"in ascending order, sweeps={self.sweeps} must be at least 1"
            )


class Block(NamedTuple):
    """Frames of one speaker of a group.

    Attributes:
        speaker: index of the speaker in its group.
        x_ND: frames without a transform.
        current_ND: the same frames with the current transform, for computing posteriors.
        occupation: pdfs of the frames.
    """

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
    """A speaker's transform.

    Attributes:
        transform: float32 [D, E].
        kind: "full", "shift" (offset only) or "none" (the start transform).
        frames: speech frames it was estimated from.
        gain: improvement in log-likelihood per frame.
    """

    speaker: str
    transform: np.ndarray
    kind: str
    frames: float
    gain: float


@dataclass(frozen=True)
class AlignedGroup:
    """Speakers of an aligned set.

    Attributes:
        base: frames without transforms.
        current: frames with the current transforms.
        utterances_S: each speaker's utterances, by index in the stores.
        pdf_N: pdf of each frame, negative for frames to ignore.
    """

    speakers: Sequence[str]
    base: FrameStore
    current: FrameStore
    utterances_S: Sequence[Sequence[int]]
    pdf_N: FramePdfs | np.ndarray

    def blocks(self) -> Iterator[Block]:
        """Yields one block per utterance."""
        for speaker, utterances in enumerate(self.utterances_S):
            for utterance in utterances:
                rows = self.base.span(utterance)
                x_TD = self.base.read(rows)
                current_TD = x_TD if self.current is self.base else self.current.read(rows)
                yield Block(speaker, x_TD, current_TD, Occupation.of_alignment(self.pdf_N[rows]))


def aligned_groups(
    base: FrameStore, current: FrameStore, speakers_U: Sequence[str], pdf_N: FramePdfs | np.ndarray
) -> Iterator[AlignedGroup]:
    """Yields the speakers of a set in groups, sorted by name.

    Args:
        base: frames without transforms.
        current: the same frames with the current transforms.
        pdf_N: pdf of each frame, negative for frames to ignore.
    """
    utterances: dict[str, list[int]] = {}
    for utterance, speaker in enumerate(speakers_U):
        utterances.setdefault(speaker, []).append(utterance)
    for speakers in in_groups(sorted(utterances)):
        yield AlignedGroup(speakers, base, current, [utterances[speaker] for speaker in speakers], pdf_N)


def in_groups(speakers: Sequence[str]) -> list[Sequence[str]]:
    """Splits speakers into groups that do not depend on the number of workers."""
    return [speakers[begin : begin + GROUP_SIZE] for begin in range(0, len(speakers), GROUP_SIZE)]


def adapt_speakers(
    groups: Sequence[SpeakerGroup], gmms: DiagGmms, options: FmllrOptions, jobs: int, title: str,
    target: DiagGmms | None = None, start: np.ndarray | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Estimates the transform [D, E] of every speaker, and logs the gain and which speakers have too little speech.

    Args:
        gmms: mixtures that give the Gaussian posteriors, from the frames with their current transforms.
        jobs: worker processes. One is used where the device is a GPU.
        target: mixtures to adapt to, with the same Gaussians as `gmms`. Default: `gmms`.
        start: transform [D, E] that estimation starts from, and that speakers with too little speech keep. Default:
            identity.

    Returns:
        Transforms by speaker id.
    """
    work = functools.partial(adapt_group, gmms, target, start, options)
    jobs = jobs if torch.device(options.device).type == "cpu" else 1  # CUDA cannot be used after a fork
    found = parallel_map(work, groups, jobs, f"{title}: fMLLR", here=True)  # each group has the alignment of all
    results = [result for group in found for result in group]
    frames = sum(result.frames for result in results)
    gain = sum(result.gain * result.frames for result in results) / max(frames, 1.0)
    logger.debug("%s: fMLLR of %d speakers, log-likelihood per frame %+.3f", title, len(results), gain)
    for kind, meaning in (("shift", "get only an offset"), ("none", "keep the initial transform")):
        few = [f"{result.speaker} ({result.frames:.0f})" for result in results if result.kind == kind]
        if few:
            logger.warning("%s: %d speakers have too few frames of speech and %s: %s", title, len(few), meaning,
                           " ".join(few[:10]))  # fmt: skip
    return {result.speaker: result.transform for result in results}


def adapt_group(
    gmms: DiagGmms, target: DiagGmms | None, start: np.ndarray | None, options: FmllrOptions, group: SpeakerGroup
) -> list[SpeakerTransform]:
    """Estimates the transforms of one group of speakers."""
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
    """Collects blocks into lists of at least BLOCK frames, to amortise the overhead per list."""
    batch: list[Block] = []
    for block in blocks:
        batch.append(block)
        if sum(len(b.x_ND) for b in batch) >= BLOCK:
            yield batch
            batch = []
    if batch:
        yield batch


def accumulate_blocks(stats: FmllrStats, expectation: Expectation, blocks: Sequence[Block]) -> None:
    """Accumulates fMLLR statistics of some blocks. Blocks of one speaker must be adjacent."""
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
    """Estimates the transforms of a group of speakers.

    A transform is discarded if it is not finite or lowers the objective, as happens when a speaker's frames are all
    alike.

    Returns:
        Transforms [S, D, E], and for each speaker "full", "shift" or "none" (the transform in `start_SDE`).
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
