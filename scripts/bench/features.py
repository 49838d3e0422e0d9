"""Compares the speed of feature extraction on one core with torchaudio.compliance.kaldi.

    python scripts/bench/features.py [--rounds N]

Both read the same 8 kHz wav files and compute the same features in turn. Prints CPU time, median over the rounds. For
information it also prints kaldi-native-fbank and the speed of Kaldi's compute-fbank-feats, measured on another machine.
The last line is the ratio of ours to torchaudio for log-mel.
"""

from __future__ import annotations

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}  # must be set before NumPy is loaded

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import kaldi_native_fbank
import numpy as np
import soundfile
import torch
import torchaudio.compliance.kaldi as torchaudio_kaldi

from asr_am.features.spectral import SpectralExtractor, SpectralOptions

RATE = 8000
FILES, SECONDS = 60, 6.0
KALDI_FRAMES_PER_SECOND = 177_000  # compute-fbank-feats, 8 kHz wav, one core
OURS, TORCHAUDIO, NATIVE = "ours", "torchaudio", "kaldi-native-fbank"

Compute = Callable[[Path], np.ndarray]


def methods(num_bins: int, num_ceps: int | None) -> dict[str, Compute]:
    """Returns the ways to turn a wav file into features, by name."""
    extractor = SpectralExtractor(SpectralOptions(RATE, num_bins, num_ceps))
    options = {"sample_frequency": RATE, "dither": 0.0, "num_mel_bins": num_bins}

    def ours(path: Path) -> np.ndarray:
        return extractor(read(path))

    def torchaudio(path: Path) -> np.ndarray:
        waveform = torch.from_numpy(read(path))[None]
        if num_ceps is None:
            return torchaudio_kaldi.fbank(waveform, **options).numpy()
        return torchaudio_kaldi.mfcc(waveform, num_ceps=num_ceps, **options).numpy()

    def native(path: Path) -> np.ndarray:
        online = native_extractor(num_bins, num_ceps)
        online.accept_waveform(RATE, read(path))
        online.input_finished()
        return np.stack([online.get_frame(index) for index in range(online.num_frames_ready)])

    return {OURS: ours, TORCHAUDIO: torchaudio, NATIVE: native}


def native_extractor(
    num_bins: int, num_ceps: int | None
) -> kaldi_native_fbank.OnlineFbank | kaldi_native_fbank.OnlineMfcc:
    options = kaldi_native_fbank.FbankOptions() if num_ceps is None else kaldi_native_fbank.MfccOptions()
    options.frame_opts.samp_freq = RATE
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = num_bins
    if num_ceps is None:
        return kaldi_native_fbank.OnlineFbank(options)
    options.num_ceps = num_ceps
    options.use_energy = False
    return kaldi_native_fbank.OnlineMfcc(options)


def read(path: Path) -> np.ndarray:
    """Reads samples of a wav file on the 16-bit scale, as asr_am.data.audio does."""
    return soundfile.read(path, dtype="float32")[0] * np.float32(32768.0)


def write_files(folder: Path) -> list[Path]:
    """Writes files of noise with a moving level. The time does not depend on the content."""
    paths = []
    for number in range(FILES):
        noise = np.random.default_rng(number).standard_normal(int(SECONDS * RATE))
        paths.append(folder / f"{number}.wav")
        soundfile.write(paths[-1], 0.1 * noise * np.sin(np.arange(len(noise)) / 3000), RATE)
    return paths


def measure(paths: list[Path], compared: dict[str, Compute], rounds: int) -> dict[str, list[float]]:
    """Returns frames per CPU second of every method, one value per round. Raises AssertionError unless they agree to
    1e-3.
    """
    expected = compared[TORCHAUDIO](paths[0])
    for name, compute in compared.items():
        worst = np.abs(compute(paths[0]) - expected).max()
        assert worst < 1e-3, f"{name} differs from torchaudio by {worst}"
    rates: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, compute in compared.items():
            begin = time.process_time()
            frames = sum(len(compute(path)) for path in paths)
            rates[name].append(frames / (time.process_time() - begin))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder))
        for kind, num_bins, num_ceps in (("mfcc", 23, 13), ("logmel", 40, None)):
            rates = measure(paths, methods(num_bins, num_ceps), rounds)
            for name, figures in rates.items():
                print(f"{kind:7s} {name:19s} {statistics.median(figures):10,.0f} frames/s of one core")
            pairs = zip(rates[OURS], rates[TORCHAUDIO], strict=True)
            ratios[kind] = statistics.median(ours / theirs for ours, theirs in pairs)
    print(f"Kaldi's compute-fbank-feats, on another machine: {KALDI_FRAMES_PER_SECOND:,} frames/s")
    for kind, ratio in ratios.items():
        print(f"{kind}: ours / torchaudio = {ratio:.2f}")


if __name__ == "__main__":
    main()
