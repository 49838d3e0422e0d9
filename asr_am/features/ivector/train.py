"""Training of the extractor on files of statistics, one for each block of utterances, read one at a time.

A killed run goes on: blocks that are there are not made again, and EM starts from the last iteration that was finished.

Shapes: G Gaussians, D features.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path

import numpy as np

from asr_am.data.textfile import write_lines
from asr_am.features.ivector.em import Sums, accumulate, apply_floor, covariance_floor, log_likelihood, maximise
from asr_am.features.ivector.extractor import Extractor, initial_extractor
from asr_am.features.ivector.files import (
    load_extractor,
    load_statistics,
    load_totals,
    load_ubm,
    save_extractor,
    save_statistics,
)
from asr_am.features.ivector.options import IvectorOptions
from asr_am.features.ivector.speech import Speech
from asr_am.features.ivector.statistics import second_order, segment_statistics, stack
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)

BLOCK = 200  # utterances
SHARES = 8  # in which the E-step is done, whatever the number of jobs, so that sums are the same to the last bit
LIKELIHOODS = "extractor.json"


def write_statistics(speech: Speech, ubm: Path, work: Path, scale: float, jobs: int) -> list[Path]:
    """The statistics of every utterance of a set under the UBM in the file `ubm`, as files in `work`."""
    utterances = speech.reader.utterances
    begins = range(0, len(utterances), BLOCK)
    blocks = [(work / f"statistics.{b // BLOCK}.npz", utterances[b : b + BLOCK]) for b in begins]
    missing = [block for block in blocks if not block[0].exists()]
    parallel_map(partial(write_block, speech, ubm, scale), missing, jobs, "statistics for i-vectors")
    return [path for path, _ in blocks]


def write_block(speech: Speech, ubm_path: Path, scale: float, block: tuple[Path, Sequence[str]]) -> None:
    """The statistics of one block of utterances."""
    ubm = load_ubm(ubm_path).to(speech.device)
    frames = [speech.frames(utterance) for utterance in block[1]]
    statistics = stack([segment_statistics(ubm, x_TD, len(x_TD), scale) for x_TD in frames])
    save_statistics(block[0], statistics, second_order(ubm, frames, scale))


def train_extractor(blocks: Sequence[Path], work: Path, options: IvectorOptions, jobs: int, device: str) -> Extractor:
    """EM, from the full covariances of the UBM's Gaussians on."""
    totals = reduce(add, map(load_totals, blocks)).to(device)
    means_GD, covariances_GDD = totals.moments()
    floor_DD = covariance_floor(totals.count_G, covariances_GDD)
    path = max(work.glob("extractor.*.npz"), key=_iteration, default=work / "extractor.0.npz")
    if not path.exists():
        covariances_GDD = apply_floor(covariances_GDD, floor_DD)
        save_extractor(path, initial_extractor(means_GD, covariances_GDD, options.dim, options.seed))
    shares = [[blocks[k] for k in part] for part in np.array_split(np.arange(len(blocks)), SHARES) if len(part)]
    for iteration in range(_iteration(path), options.iterations):
        e_step = partial(accumulate_share, path, device)
        sums = reduce(add, parallel_map(e_step, shares, jobs, f"i-vector EM {iteration + 1}"))
        extractor = load_extractor(path).to(device)
        _report(work / LIKELIHOODS, iteration, log_likelihood(extractor, sums, totals.second_GDD))
        done, path = path, work / f"extractor.{iteration + 1}.npz"
        save_extractor(path, maximise(extractor, sums, totals.second_GDD, floor_DD))
        done.unlink()
    return load_extractor(path)


def _iteration(path: Path) -> int:
    return int(path.name.split(".")[1])


def _report(path: Path, iteration: int, likelihood: float) -> None:
    """Log the likelihood before an update and append it to those of the earlier iterations."""
    log.info("i-vector extractor, iteration %d: log-likelihood per frame %.4f", iteration + 1, likelihood)
    earlier = json.loads(path.read_text())[:iteration] if iteration else []
    write_lines(path, [json.dumps([*earlier, likelihood])])


def accumulate_share(extractor: Path, device: str, blocks: Sequence[Path]) -> Sums:
    """The E-step over some blocks."""
    material = (load_statistics(path).to(device) for path in blocks)
    return accumulate(load_extractor(extractor).to(device), material)
