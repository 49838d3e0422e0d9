"""Compares the speed of i-vector extraction on one core with plain vectorised NumPy per speaker.

    python scripts/bench/ivector.py [--gaussians 512] [--dim 100] [--rounds N]

Speakers have 10 utterances of 3 s. Frames of 39 features are random, because the time does not depend on them. There
are two cases: an i-vector after each 3 s of the speech so far (as for training), and one from all speech of a speaker.
Both sides compute frames in float32 and the rest in float64, take turns, and must agree. Prints CPU time, median over
the rounds. Memory is the growth of the peak with more streamed speakers. The last line is the smaller ratio.
"""

from __future__ import annotations

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}  # must be set before NumPy is loaded

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from asr_am.features.ivector.estimator import Estimator
from asr_am.features.ivector.extractor import Extractor
from asr_am.features.ivector.ubm import DiagUbm

FEATURES, UTTERANCES, FRAMES = 39, 10, 300
SCALE, MAX_COUNT = 0.1, 100.0
STREAMED = (64, 256)  # numbers of speakers, to measure memory

Speaker = list[np.ndarray]  # utterances, float32 [T, D]
Method = Callable[[Iterable[Speaker]], np.ndarray]  # i-vectors of speakers


def models(gaussians: int, dim: int) -> Estimator:
    """Returns random models of the given size."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(gaussians, FEATURES, generator=generator, dtype=torch.float64)
    ubm = DiagUbm(torch.full((gaussians,), 1 / gaussians, dtype=torch.float64), means, torch.ones_like(means))
    loadings = 0.1 * torch.randn(gaussians, FEATURES, dim, generator=generator, dtype=torch.float64)
    loadings[:, :, 0] = means / 100
    covariances = torch.eye(FEATURES, dtype=torch.float64).repeat(gaussians, 1, 1)
    return Estimator(ubm, Extractor(loadings, covariances, 100.0), SCALE, MAX_COUNT, FRAMES)


def speech(seed: int) -> Speaker:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((FRAMES, FEATURES), dtype=np.float32) for _ in range(UTTERANCES)]


class Plain:
    """The same sums for one speaker after the other, in plain NumPy."""

    def __init__(self, estimate: Estimator) -> None:
        ubm, extractor = estimate.ubm, estimate.extractor
        self.linear_2DG, self.constant_G = ubm.linear_2DG.numpy(), ubm.constant_G.numpy()
        self.weighted_GDS = extractor.weighted_XS.view_as(extractor.loadings_GDS).numpy()
        self.quadratic_GSS = np.einsum("gds,gdr->gsr", extractor.loadings_GDS.numpy(), self.weighted_GDS, optimize=True)
        self.offset = extractor.offset

    def statistics(self, x_TD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        log_TG = np.concatenate([x_TD, x_TD**2], axis=1) @ self.linear_2DG + self.constant_G
        log_TG -= log_TG.max(axis=1, keepdims=True)
        posterior_TG = np.exp(log_TG)
        posterior_TG *= SCALE / posterior_TG.sum(axis=1, keepdims=True)
        return posterior_TG.sum(axis=0).astype(np.float64), (posterior_TG.T @ x_TD).astype(np.float64)

    def ivector(self, count_G: np.ndarray, first_GD: np.ndarray) -> np.ndarray:
        scale = min(1.0, MAX_COUNT / count_G.sum())
        linear_S = scale * np.tensordot(first_GD, self.weighted_GDS, axes=2)
        linear_S[0] += self.offset
        precision_SS = np.eye(len(linear_S)) + scale * np.tensordot(count_G, self.quadratic_GSS, axes=1)
        mean_S = np.linalg.solve(precision_SS, linear_S)
        mean_S[0] -= self.offset
        return mean_S

    def offline(self, speakers: Iterable[Speaker]) -> np.ndarray:
        return np.stack([self.ivector(*self.statistics(np.concatenate(speaker))) for speaker in speakers])

    def online(self, speakers: Iterable[Speaker]) -> np.ndarray:
        rows = []
        for speaker in speakers:
            count_G, first_GD = np.zeros(len(self.constant_G)), np.zeros(self.weighted_GDS.shape[:2])
            for x_TD in speaker:
                counts, first = self.statistics(x_TD)
                count_G, first_GD = count_G + counts, first_GD + first
                rows.append(self.ivector(count_G, first_GD))
        return np.stack(rows)


def methods(estimate: Estimator) -> dict[str, dict[str, Method]]:
    """Returns the ways to get a speaker's i-vectors, by case and name."""
    plain = Plain(estimate)

    def online(speakers: Iterable[Speaker]) -> np.ndarray:
        return torch.cat([row for s in speakers for row in estimate.online(map(torch.from_numpy, s))]).numpy()

    def offline(speakers: Iterable[Speaker]) -> np.ndarray:
        return estimate.offline(map(torch.from_numpy, speaker) for speaker in speakers).numpy()

    return {
        "every 3 s": {"ours": online, "NumPy": plain.online},
        "per speaker": {"ours": offline, "NumPy": plain.offline},
    }


def measure(compared: dict[str, Method], speakers: list[Speaker], rounds: int) -> dict[str, list]:
    """Returns frames per CPU second of each method, one value per round. They must agree."""
    ours, plain = (method(speakers) for method in compared.values())
    assert np.abs(ours - plain).max() < 1e-4 * np.abs(plain).max(), "the two differ"
    rates: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, method in compared.items():
            begin = time.process_time()
            method(speakers)
            rates[name].append(len(speakers) * UTTERANCES * FRAMES / (time.process_time() - begin))
    return rates


def growth(method: Method) -> float:
    """Returns the growth of the process' peak memory in MiB with the larger number of streamed speakers."""
    peaks = []
    for count in STREAMED:
        method(speech(seed) for seed in range(count))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return peaks[1] - peaks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaussians", type=int, default=512)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--speakers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compared = methods(models(options.gaussians, options.dim))
    speakers, ratios = [speech(seed) for seed in range(options.speakers)], []
    print(f"{options.gaussians} Gaussians, {options.dim} dimensions")
    for case, both in compared.items():
        rates = measure(both, speakers, options.rounds)
        ratios.append(statistics.median(a / b for a, b in zip(rates["ours"], rates["NumPy"], strict=True)))
        for name, figures in rates.items():
            print(f"{case:11s} {name:5s} {statistics.median(figures):10,.0f} frames/s of one core")
        print(f"{case:11s} ours / NumPy = {ratios[-1]:.2f}")
    grown = max(growth(both["ours"]) for both in compared.values())
    print(f"memory: {grown:+.1f} MiB at its peak with {STREAMED[1]} speakers instead of {STREAMED[0]}")
    print(f"ours / NumPy = {min(ratios):.2f}")


if __name__ == "__main__":
    main()
