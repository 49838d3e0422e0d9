"""Compares fMLLR of all speakers of a corpus with plain vectorised NumPy, one speaker at a time, on one core.

    python scripts/bench/fmllr.py [--speakers 16] [--frames 3400] [--repeat 3]

Synthetic speakers have as many frames as AN4's, 40 features and 280 pdfs of 14 Gaussians. Both sides start from frames
and pdfs, end with the same transforms, and take turns. The fastest of each counts. The NumPy side follows the equations
directly: float64, a matrix product for each row of the transform, loops over rows and sweeps. Kaldi's gmm-est-fmllr was
measured at 203,000 frames/s. Memory is the growth of the process with more streamed speakers. The last line is the
ratio. Exits with 1 if it is below 3.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # must be set before NumPy is loaded

import argparse
import ctypes
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from asr_am.hmm.adaptation import Block, FmllrOptions, accumulate_blocks, adapt_speakers, batches, in_groups
from asr_am.hmm.expectations import Expectation, Occupation
from asr_am.hmm.fmllr import FmllrStats, estimate, identity
from asr_am.hmm.gmm import DiagGmms

DIM, PDFS, COMPONENTS, SWEEPS = 40, 280, 14, 10
STREAMED = (32, 128)  # numbers of speakers, to measure memory
Speaker = tuple[np.ndarray, np.ndarray]  # frames [N, D] and their pdfs [N]


def mixtures() -> DiagGmms:
    rng = np.random.default_rng(0)
    size = PDFS * COMPONENTS
    means, variances = rng.normal(0, 2, (size, DIM)), rng.uniform(0.5, 2, (size, DIM))
    offsets = np.arange(0, size + 1, COMPONENTS)
    weights = np.full(size, 1 / COMPONENTS, dtype=np.float32)
    return DiagGmms(weights, means.astype(np.float32), variances.astype(np.float32), offsets)


def speaker(gmms: DiagGmms, seed: int, frames: int) -> Speaker:
    """Returns a speaker whose frames a transform has moved away from the mixtures."""
    rng = np.random.default_rng([1, seed])
    gaussian_N = rng.integers(0, PDFS * COMPONENTS, frames)
    y_ND = gmms.means_GD[gaussian_N] + np.sqrt(gmms.vars_GD[gaussian_N]) * rng.normal(size=(frames, DIM))
    away = np.eye(DIM) + 0.05 * rng.normal(size=(DIM, DIM))
    return (y_ND @ away + rng.normal(size=DIM)).astype(np.float32), gaussian_N // COMPONENTS


@dataclass(frozen=True)
class Streamed:
    """Speakers that are generated on demand."""

    gmms: DiagGmms
    speakers: Sequence[str]
    frames: int

    def blocks(self) -> Iterator[Block]:
        for index, name in enumerate(self.speakers):
            x_ND, pdf_N = speaker(self.gmms, int(name), self.frames)
            yield Block(index, x_ND, x_ND, Occupation.of_alignment(pdf_N))


def growth(gmms: DiagGmms, frames: int) -> float:
    """Returns the growth of resident memory in MiB with the larger number of streamed speakers."""
    held = []
    for count in STREAMED:
        groups = [Streamed(gmms, names, frames) for names in in_groups([str(number) for number in range(count)])]
        adapt_speakers(groups, gmms, FmllrOptions(sweeps=SWEEPS), 1, "memory")
        ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system, otherwise noise of tens of MiB
        held.append(
            int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize() / 2**20
        )
    return held[1] - held[0]


def ours(gmms: DiagGmms, speakers: list[Speaker]) -> np.ndarray:
    """Returns transforms [S, D, D + 1] of all speakers together."""
    expectation = Expectation(gmms)
    step_result = FmllrStats.zeros(len(speakers), DIM, expectation.device)
    for blocks in batches(Block(s, x, x, Occupation.of_alignment(pdf)) for s, (x, pdf) in enumerate(speakers)):
        accumulate_blocks(step_result, expectation, blocks)
    return estimate(step_result, SWEEPS, identity(step_result))[0].numpy()


def plain(gmms: DiagGmms, speakers: list[Speaker]) -> np.ndarray:
    """Returns the same with NumPy, speaker by speaker."""
    return np.stack([plain_update(*plain_sums(gmms, x_ND.astype(np.float64), pdf_N)) for x_ND, pdf_N in speakers])


def plain_sums(gmms: DiagGmms, x_ND: np.ndarray, pdf_N: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns count, k [D, E] and G [D, E, E]."""
    means, variances = gmms.means_GD.astype(np.float64), gmms.vars_GD.astype(np.float64)
    precision_ND, linear_ND = np.empty_like(x_ND), np.empty_like(x_ND)
    for pdf in np.unique(pdf_N):
        rows, own = slice(*gmms.offsets_P1[pdf : pdf + 2]), pdf_N == pdf
        x, inverse = x_ND[own], 1 / variances[rows]
        score = np.log(gmms.weights_G[rows]) - 0.5 * (np.log(variances[rows]) + means[rows] ** 2 * inverse).sum(axis=1)
        score = score + x @ (means[rows] * inverse).T - 0.5 * (x * x) @ inverse.T
        posterior = np.exp(score - score.max(axis=1, keepdims=True))
        posterior /= posterior.sum(axis=1, keepdims=True)
        precision_ND[own], linear_ND[own] = posterior @ inverse, posterior @ (means[rows] * inverse)
    x_NE = np.column_stack([x_ND, np.ones(len(x_ND))])
    quadratic = np.stack([(x_NE * precision_ND[:, d : d + 1]).T @ x_NE for d in range(DIM)])
    return len(x_ND), linear_ND.T @ x_NE, quadratic


def plain_update(count: int, linear_DE: np.ndarray, quadratic_DEE: np.ndarray) -> np.ndarray:
    """Applies Gales' update row by row."""
    transform = np.eye(DIM, DIM + 1)
    inverse = np.linalg.inv(quadratic_DEE)
    for _ in range(SWEEPS):
        for d in range(DIM):
            cofactors = np.append(np.linalg.inv(transform[:, :-1])[:, d], 0.0)
            e1, e2 = cofactors @ inverse[d] @ cofactors, cofactors @ inverse[d] @ linear_DE[d]
            roots = (-e2 + np.array([1, -1]) * np.sqrt(e2**2 + 4 * e1 * count)) / (2 * e1)
            value = count * np.log(np.abs(roots * e1 + e2)) - roots**2 * e1 / 2
            transform[d] = (roots[np.argmax(value)] * cofactors + linear_DE[d]) @ inverse[d]
    return transform


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speakers", type=int, default=16)
    parser.add_argument("--frames", type=int, default=3400, help="of each speaker")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gmms = mixtures()
    speakers = [speaker(gmms, seed, options.frames) for seed in range(options.speakers)]
    seconds: dict[str, list[float]] = {"ours": [], "plain NumPy": []}
    found = {}
    for _ in range(options.repeat):
        for name, side in (("ours", ours), ("plain NumPy", plain)):
            began = time.process_time()
            found[name] = side(gmms, speakers)
            seconds[name].append(time.process_time() - began)
    best = {name: min(values) for name, values in seconds.items()}
    for name, value in best.items():
        print(f"{name}: {options.speakers * options.frames / value:,.0f} frames/s of CPU time")
    difference = float(np.abs(found["ours"] - found["plain NumPy"]).max())
    print(f"largest difference of a transform's element: {difference:.1e}")
    grown = growth(gmms, options.frames)
    print(f"memory: {grown:+.1f} MiB after {STREAMED[1]} speakers instead of {STREAMED[0]}")
    ratio = best["plain NumPy"] / best["ours"]
    print(f"ours is {ratio:.1f} times as fast")
    sys.exit(0 if ratio >= 3 and difference < 1e-3 else 1)


if __name__ == "__main__":
    main()
