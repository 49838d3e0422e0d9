"""The words of a recording: `python -m asr_am.transcribe --model exp/<corpus>/decode/<run> FILE.wav ...`

Any format, sampling rate and number of channels that soundfile reads. The channels are mixed, or with --channels each
is transcribed on its own (a telephone call recorded side by side). A long recording is cut where it is quietest. What
models need to know of a speaker (CMVN statistics, fMLLR, i-vector) is estimated from the whole of it.

Shapes: N samples, C channels, T frames, D static features.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asr_am.errors import InputError

if TYPE_CHECKING:
    import kaldifst

    from asr_am.decode.ctm import CtmWord
    from asr_am.decode.system import System
    from asr_am.features.spectral import SpectralExtractor
    from asr_am.hmm.states import StateTable
    from asr_am.lang.lang_dir import Lang

INT16_SCALE = np.float32(32768.0)
CANCELLED = 1e-3  # a mix of channels with a lower share of their peak holds only rounding errors
MIN_FRAMES = 9  # as in stage features: three phones of three states
LOUDEST = 1e10  # where 1 is full scale; features of more would not be numbers
LONGEST, SHORTEST = 2000, 500  # frames of a piece; a cut falls at the quietest point between them
SMOOTHING = 31  # frames of the level that decides where it is quiet


@dataclass(frozen=True)
class Transcriber:
    """A system in memory. kind: of the features that its model takes. extractors: by the kinds that are computed."""

    system: System
    kind: str
    extractors: dict[str, SpectralExtractor]
    graph: kaldifst.StdVectorFst
    lang: Lang
    states: StateTable

    @property
    def sampling_rate(self) -> int:
        return next(iter(self.extractors.values())).options.sampling_rate

    def words(self, samples_N: np.ndarray) -> list[CtmWord]:
        """The words in a recording of the model's rate, on the 16-bit scale; times in frames of the recording."""
        from asr_am.decode.adhoc_features import SET, write_recording
        from asr_am.decode.shards import DecodeOptions, Decoder

        static = {kind: extractor(samples_N) for kind, extractor in self.extractors.items()}
        static_TD = next(iter(static.values()))
        if len(static_TD) < MIN_FRAMES:
            return []
        cuts = list(pieces(static_TD))
        words: list[CtmWord] = []
        with tempfile.TemporaryDirectory() as folder:
            names = write_recording(self.kind, static, cuts, self.system.features_dir, Path(folder))
            scorer = replace(self.system, features_dir=Path(folder)).source(SET).load()
            options = DecodeOptions(self.system.search, (self.system.weights,), nbest=0)
            decoder = Decoder(scorer, self.graph, self.lang, self.states, options)
            for name, (begin, _) in zip(names, cuts, strict=True):
                decoded, _ = decoder.decode(name)
                words += [word._replace(start=word.start + begin) for word in decoded.words[0]]
        return words


def load(folder: Path) -> Transcriber:
    """The system of a decoding run; InputError where one of its files is missing or damaged."""
    from asr_am.decode.adhoc_features import computed_kinds
    from asr_am.decode.graph import read_hclg
    from asr_am.decode.system import System
    from asr_am.features.reader import read_options
    from asr_am.features.spectral import SpectralExtractor
    from asr_am.hmm.states import StateTable
    from asr_am.lang.lang_dir import Lang

    system = System.load(folder)
    kind = system.kind()
    extractors = {base: SpectralExtractor(read_options(system.features_dir / base)) for base in computed_kinds(kind)}
    return Transcriber(
        system, kind, extractors, read_hclg(system.graph), Lang.load(system.lang_dir), StateTable.load(system.states)
    )


def pieces(static_TD: np.ndarray) -> Iterator[tuple[int, int]]:
    """First frame and frame after the last of pieces of SHORTEST to LONGEST frames, cut where the level is lowest.

    Works on log-mel energies and on cepstra alike: the sum of the former and C0 of the latter follow the level.
    """
    num_frames = len(static_TD)
    level_T = static_TD[:, 0] if static_TD.shape[1] < 20 else static_TD.mean(axis=1)
    padded = np.pad(level_T, SMOOTHING // 2, mode="edge")
    level_T = np.convolve(padded, np.full(SMOOTHING, 1.0 / SMOOTHING), mode="valid")
    begin = 0
    while num_frames - begin > LONGEST:
        latest = min(begin + LONGEST, num_frames - SHORTEST)
        end = begin + SHORTEST + int(np.argmin(level_T[begin + SHORTEST : latest]))
        yield begin, end
        begin = end
    yield begin, num_frames


def read_audio(path: Path, sampling_rate: int, *, separate: bool) -> list[np.ndarray]:
    """The channels of a file, or their mean, at the model's rate on the 16-bit scale; InputError if unusable."""
    import soundfile

    from asr_am.data.length import decoded

    if not path.is_file():
        raise InputError(f"{path}: no such file; give a recording that exists")
    blocks, lowest, highest = [], np.inf, -np.inf
    try:
        rate = soundfile.info(path).samplerate
        for block_NC in decoded(path):
            lowest, highest = np.minimum(lowest, block_NC.min()), np.maximum(highest, block_NC.max())  # keep NaN
            blocks.append(block_NC if separate else block_NC.mean(axis=1, keepdims=True))
    except (soundfile.SoundFileError, OSError, TypeError, UnicodeError) as error:  # the last: of a name in Latin-1
        raise InputError(f"{path}: cannot be read as audio ({error}); convert it to WAV or FLAC") from error
    if not blocks:
        raise InputError(f"{path}: holds no samples; record it again")
    if not -LOUDEST < lowest <= highest < LOUDEST:
        raise InputError(
            f"{path}: holds samples that are not numbers, or far from any sound ({lowest:g} to {highest:g}, where 1 is "
            "full scale); convert it again"
        )
    if lowest == highest:
        raise InputError(f"{path}: every sample is {lowest:g}; record it again")
    samples_NC = np.concatenate(blocks)
    del blocks  # hours of speech are gigabytes
    if max(samples_NC.max(), -samples_NC.min()) < CANCELLED * max(highest, -lowest):
        raise InputError(f"{path}: its channels cancel each other; transcribe them on their own with --channels")
    return [resample(channel_N, rate, sampling_rate) * INT16_SCALE for channel_N in samples_NC.T]


def resample(samples_N: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples at another rate (windowed sinc, torchaudio's)."""
    if rate == wanted:
        return np.ascontiguousarray(samples_N)
    import torch
    from torchaudio.functional import resample as sinc

    return sinc(torch.from_numpy(np.ascontiguousarray(samples_N)), rate, wanted).numpy()


def transcripts(transcriber: Transcriber, path: Path, *, separate: bool, times: bool) -> Iterator[str]:
    """The lines to print for a file: one a channel, or with `times` one a word, as in a CTM file."""
    from asr_am.decode.ctm import FRAME_SHIFT

    channels = read_audio(path, transcriber.sampling_rate, separate=separate)
    for number, samples_N in enumerate(channels, start=1):
        words = transcriber.words(samples_N)
        if times:
            name = "_".join(path.stem.split())
            yield from (
                f"{name} {number} {w.start * FRAME_SHIFT:.2f} {w.frames * FRAME_SHIFT:.2f} {w.word} {w.confidence:.2f}"
                for w in words
            )
        else:
            name = f"{path}:{number}" if separate else str(path)
            yield f"{name}: {' '.join(word.word for word in words)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a file could not be transcribed, after doing the others."""
    parser = argparse.ArgumentParser(prog="python -m asr_am.transcribe", description="Print the words of recordings.")
    parser.add_argument("--model", type=Path, required=True, help="a decoding run, exp/<corpus>/decode/<run>")
    parser.add_argument("--channels", action="store_true", help="transcribe every channel on its own")
    parser.add_argument("--times", action="store_true", help="print a CTM line for each word")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        transcriber = load(options.model)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    status = 0
    for path in options.files:
        try:
            for line in transcripts(transcriber, path, separate=options.channels, times=options.times):
                print(line, flush=True)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader has seen enough: nobody is told when stdout is flushed at exit, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
