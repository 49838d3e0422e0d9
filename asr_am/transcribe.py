"""Recognises recordings: `python -m asr_am.transcribe --model exp/<corpus>/decode/<run> FILE.wav ...`, or from Python

    from asr_am.api import load_system

    system = load_system("exp/minicts/decode/sat_kn3")
    for word in system.transcribe("call.wav"):             # or samples with sampling_rate=16000
        print(word.channel, word.begin, word.text, word.confidence)

Reads any format, sampling rate and number of channels that soundfile reads. The two channels of a telephone call, A and
B, are two speakers. What depends on the speaker (CMVN statistics, fMLLR, i-vector) is estimated from the whole channel.
Two channels with about the same signal, and more than two channels, are averaged, two in opposite phase subtracted.
Options say otherwise. A long recording is split where it is quietest.

Shapes: N samples, C channels, T frames, D static features.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from asr_am.data.audio import INT16_SCALE
from asr_am.data.stm import CHANNELS
from asr_am.errors import InputError
from asr_am.score.cli import exit_code

if TYPE_CHECKING:
    from asr_am.decode.ctm import CtmWord
    from asr_am.decode.scorer import Scorer
    from asr_am.decode.search_graph import SearchGraph
    from asr_am.decode.system import System
    from asr_am.features.kinds import FeatureKind
    from asr_am.hmm.states import StateTable
    from asr_am.lang.lang_dir import Lang
    from asr_am.lang.ngram_automaton import LmPair

log = logging.getLogger(__name__)

Channels = Literal["auto", "separate", "average"]
SAMPLES = [np.dtype(name) for name in ("int16", "int32", "float16", "float32", "float64")]
# Absolute correlation above which two channels are one speaker. A call with crosstalk of -12 dB has 0.47.
SAME_SIGNAL = 0.9
CANCELLATION = 1e-3  # an average of channels below this share of their peak is only rounding errors
MIN_FRAMES = 9  # as in stage features: three phones of three states
MAX_AMPLITUDE = 1e10  # full scale is 1; features of larger samples would overflow
MAX_SEGMENT, MIN_SEGMENT = 2000, 500  # frames
SMOOTHING_FRAMES = 31  # width of the moving average of the level that finds quiet points


class Word(NamedTuple):
    """A recognised word. Times are in seconds from the start of the recording, the confidence is from 0 to 1."""

    text: str
    begin: float
    end: float
    confidence: float
    channel: str


@dataclass(frozen=True)
class Transcriber:
    """A decoding system with its files in memory.

    Attributes:
        kinds: how to compute the static features, by name.
        lms: models to rescore lattices with, None if the graph has its whole LM.
        states: graph labels and their pdfs.
    """

    system: System
    kinds: dict[str, FeatureKind]
    graph: SearchGraph
    lms: LmPair | None
    lang: Lang
    states: StateTable

    @property
    def sampling_rate(self) -> int:
        return next(iter(self.kinds.values())).sampling_rate

    def transcribe(
        self, audio: str | Path | np.ndarray, sampling_rate: int | None = None, channels: Channels = "auto"
    ) -> list[Word]:
        """Recognises a recording.

        Args:
            audio: a file, or samples [N] or [N, C], with full scale at 1 if they are floats.
            sampling_rate: of samples, in Hz. A file says its own.
            channels: separate: every channel is a speaker. average: the mean of all is one. auto: the two of a call are
                separate, unless they have about the same signal, and others are averaged. Of the same signal in
                opposite phase, as in a balanced pair of wires, half the difference is taken.

        Raises:
            InputError: the recording cannot be used.
        """
        from asr_am.decode.ctm import FRAME_SHIFT

        found = self._channels(audio, sampling_rate, channels)
        return [
            Word(
                word.word, word.start * FRAME_SHIFT, (word.start + word.frames) * FRAME_SHIFT, word.confidence,
                channel_name(number, len(found)),
            )
            for number, samples_N in enumerate(found)
            for word in self.words(samples_N)
        ]  # fmt: skip

    def features(
        self, audio: str | Path | np.ndarray, sampling_rate: int | None = None, channels: Channels = "average"
    ) -> list[dict[str, np.ndarray]]:
        """Returns for each channel the static features [T, D] by kind, such as "mfcc". Arguments as of `transcribe`."""
        return [self._static(samples_N) for samples_N in self._channels(audio, sampling_rate, channels)]

    def log_likelihoods(
        self, audio: str | Path | np.ndarray, sampling_rate: int | None = None, channels: Channels = "average"
    ) -> list[np.ndarray]:
        """Returns for each channel the acoustic scores [T, P] by pdf, of a network up to a constant per frame.

        Arguments as of `transcribe`.
        """
        scores = []
        for samples_N in self._channels(audio, sampling_rate, channels):
            parts = [scorer.log_likelihoods(name) for scorer, name, _ in self._segments(samples_N)]
            scores.append(np.concatenate(parts) if parts else np.zeros((0, self.states.num_pdfs), np.float32))
        return scores

    def words(self, samples_N: np.ndarray) -> list[CtmWord]:
        """Recognises the words of one channel, given at the model's rate and on the 16-bit scale.

        Their times are frames from the start of the recording. A channel of equal samples has no words.
        """
        from asr_am.decode.shards import DecodeOptions, Decoder

        words: list[CtmWord] = []
        options = DecodeOptions(self.system.search, (self.system.lm_scale,), nbest=0)
        for scorer, name, begin in self._segments(samples_N):
            decoded, _ = Decoder(scorer, self.graph, self.lms, self.lang, self.states, options).decode(name)
            words += [word._replace(start=word.start + begin) for word in decoded.words[0]]
        return words

    def _channels(
        self, audio: str | Path | np.ndarray, sampling_rate: int | None, channels: Channels
    ) -> list[np.ndarray]:
        if channels not in get_args(Channels):
            raise InputError(f"channels={channels!r}: must be one of {', '.join(get_args(Channels))}")
        if isinstance(audio, str | Path):
            return read_audio(Path(audio), self.sampling_rate, channels)
        if not isinstance(audio, np.ndarray):
            raise InputError(f"audio of type {type(audio).__name__}: give a file, or a NumPy array of samples")
        if sampling_rate is None or sampling_rate < 1 or not float(sampling_rate).is_integer():
            raise InputError(f"sampling_rate={sampling_rate}: give the rate of the samples in Hz, a whole number")
        if audio.ndim not in (1, 2) or not audio.size:
            raise InputError(f"samples of shape {list(audio.shape)}: give [N] or [N, channels]")
        if audio.ndim == 2 and audio.shape[0] < audio.shape[1]:
            raise InputError(
                f"samples of shape {list(audio.shape)}: more channels than samples; give [N, channels], as samples.T"
            )
        if audio.dtype.newbyteorder("=") not in SAMPLES:
            raise InputError(f"samples of type {audio.dtype}: give {', '.join(map(str, SAMPLES))}")
        scale = 1.0 if np.issubdtype(audio.dtype, np.floating) else 1.0 / (np.iinfo(audio.dtype).max + 1)
        block_NC = audio.reshape(len(audio), -1).astype(np.float32) * np.float32(scale)
        return prepare_channels([block_NC], int(sampling_rate), self.sampling_rate, channels, "samples")

    def _static(self, samples_N: np.ndarray) -> dict[str, np.ndarray]:
        return {name: kind.extractor()(samples_N) for name, kind in self.kinds.items()}

    def _segments(self, samples_N: np.ndarray) -> Iterator[tuple[Scorer, str, int]]:
        """Yields what scores the segments of a channel, and the name and first frame of each."""
        from asr_am.decode.adhoc_features import SET, write_recording

        static = self._static(samples_N)
        static_TD = next(iter(static.values()))
        if len(static_TD) < MIN_FRAMES or samples_N.min() == samples_N.max():
            return
        cuts = list(split_at_pauses(static_TD))
        with tempfile.TemporaryDirectory() as folder:
            names = write_recording(self.system.feature_kind, static, cuts, self.system.features_dir, Path(folder))
            scorer = replace(self.system, features_dir=Path(folder)).source(SET).load()
            for name, (begin, _) in zip(names, cuts, strict=True):
                yield scorer, name, begin


def load_system(folder: str | Path) -> Transcriber:
    """Loads the system of exp/<corpus>/decode/<run>. Raises InputError if one of its files is missing or damaged."""
    from asr_am.decode.adhoc_features import computed_kinds
    from asr_am.decode.loading import load_graph, load_lang, load_lm_pair, load_states
    from asr_am.decode.system import System
    from asr_am.features.kinds import read_kind

    system = System.load(Path(folder))
    kinds = {name: read_kind(system.features_dir / name) for name in computed_kinds(system.feature_kind)}
    return Transcriber(
        system, kinds, load_graph(system.graph), load_lm_pair(system.graph), load_lang(system.lang_dir),
        load_states(system.states),
    )  # fmt: skip


def split_at_pauses(static_TD: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields begin and end of segments of MIN_SEGMENT to MAX_SEGMENT frames, split where the level is lowest.

    Works on log-mel energies (their mean follows the level) and on cepstra (C0 does).
    """
    num_frames = len(static_TD)
    level_T = static_TD[:, 0] if static_TD.shape[1] < 20 else static_TD.mean(axis=1)
    padded = np.pad(level_T, SMOOTHING_FRAMES // 2, mode="edge")
    level_T = np.convolve(padded, np.full(SMOOTHING_FRAMES, 1.0 / SMOOTHING_FRAMES), mode="valid")
    begin = 0
    while num_frames - begin > MAX_SEGMENT:
        latest = min(begin + MAX_SEGMENT, num_frames - MIN_SEGMENT)
        end = begin + MIN_SEGMENT + int(np.argmin(level_T[begin + MIN_SEGMENT : latest]))
        yield begin, end
        begin = end
    yield begin, num_frames


def read_audio(path: Path, sampling_rate: int, channels: Channels = "auto") -> list[np.ndarray]:
    """Reads an audio file of any format, resampled, on the 16-bit scale.

    Returns samples [N] of every channel, or of the average of all, or (auto) of the two of a call and else the average,
    or half the difference of two in opposite phase.

    Raises:
        InputError: the file cannot be used.
    """
    import soundfile

    from asr_am.data.length import decode_blocks, is_truncated

    if not path.is_file():
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; give a recording")
    blocks: list[np.ndarray] = []
    lowest, highest = np.inf, -np.inf
    try:
        rate = soundfile.info(path).samplerate
        if is_truncated(path):
            log.warning("%s: is cut short, so only its beginning is recognised; get a complete copy", path)
        for block_NC in decode_blocks(path):
            lowest, highest = np.minimum(lowest, block_NC.min()), np.maximum(highest, block_NC.max())  # keep NaN
            keep = channels == "separate" or (channels == "auto" and block_NC.shape[1] == 2)
            blocks.append(block_NC if keep else block_NC.mean(axis=1, keepdims=True))
    except (soundfile.SoundFileError, OSError, TypeError, UnicodeError) as error:  # the last: a name in Latin-1
        raise InputError(f"{path}: cannot be read as audio ({error}); convert it to WAV or FLAC") from error
    if not blocks:
        raise InputError(f"{path}: holds no samples; record it again")
    return prepare_channels(blocks, rate, sampling_rate, channels, str(path), (lowest, highest))


def prepare_channels(
    blocks: list[np.ndarray], rate: int, sampling_rate: int, channels: Channels, name: str,
    limits: tuple[float, float] | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Checks samples and returns channels as `read_audio` does.

    Args:
        blocks: consecutive samples [N, C], with full scale at 1. Emptied, as hours of speech are gigabytes.
        limits: lowest and highest sample before channels were averaged. None: those of `blocks`.

    Raises:
        InputError: the samples cannot be used.
    """
    lowest, highest = limits or (min(float(b.min()) for b in blocks), max(float(b.max()) for b in blocks))
    if not -MAX_AMPLITUDE < lowest <= highest < MAX_AMPLITUDE:
        raise InputError(
            f"{name}: has samples that are NaN, Inf or far beyond full scale ({lowest:g} to {highest:g}, where 1 is "
            "full scale); convert it again"
        )
    if lowest == highest:
        raise InputError(f"{name}: every sample is {lowest:g}; record it again")
    two = blocks[0].shape[1] == 2
    alike = correlation(blocks) if channels == "auto" and two else 0.0
    if alike < -SAME_SIGNAL:  # their mean would be the noise that is left
        blocks[:] = [(block[:, :1] - block[:, 1:]) / 2 for block in blocks]
    elif alike > SAME_SIGNAL or channels == "average" or (channels == "auto" and not two):
        blocks[:] = [block.mean(axis=1, keepdims=True) for block in blocks]
    samples_NC = np.concatenate(blocks)
    blocks.clear()
    if max(samples_NC.max(), -samples_NC.min()) < CANCELLATION * max(highest, -lowest):
        raise InputError(f"{name}: its channels cancel each other; transcribe them one by one (--separate)")
    return [resample(channel_N, rate, sampling_rate) * INT16_SCALE for channel_N in samples_NC.T]


def correlation(blocks: Sequence[np.ndarray]) -> float:
    """Returns the correlation coefficient of two channels, given in blocks [N, 2]. 0 if one is constant."""
    sums, products = np.zeros(2), np.zeros((2, 2))
    for block_N2 in blocks:
        wide_N2 = block_N2.astype(np.float64)
        sums += wide_N2.sum(axis=0)
        products += wide_N2.T @ wide_N2
    covariance = products - np.outer(sums, sums) / sum(map(len, blocks))
    scale = float(np.sqrt(np.prod(np.maximum(np.diag(covariance), 0.0))))
    return float(covariance[0, 1]) / scale if scale > 0 else 0.0


def resample(samples_N: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Resamples a signal from `rate` to `new_rate` (in Hz) with torchaudio's windowed sinc interpolation."""
    if rate == new_rate:
        return np.ascontiguousarray(samples_N)
    import torch
    from torchaudio.functional import resample as sinc

    return sinc(torch.from_numpy(np.ascontiguousarray(samples_N)), rate, new_rate).numpy()


def channel_name(number: int, count: int) -> str:
    """Returns the name of channel `number`, from 0, of `count`: A or B as in NIST's files, else from 1 on."""
    return CHANNELS[number] if count <= len(CHANNELS) else str(number + 1)


def transcripts(transcriber: Transcriber, path: Path, channels: Channels, *, times: bool) -> Iterator[str]:
    """Yields the lines to print for a file: a CTM line per word with `times`, else a line per channel."""
    from asr_am.decode.ctm import FRAME_SHIFT

    found = read_audio(path, transcriber.sampling_rate, channels)
    for number, samples_N in enumerate(found):
        channel, words = channel_name(number, len(found)), transcriber.words(samples_N)
        if times:
            name = ctm_name(path)
            yield from (
                f"{name} {channel} {w.start * FRAME_SHIFT:.2f} {w.frames * FRAME_SHIFT:.2f} {w.word} {w.confidence:.2f}"
                for w in words
            )
        else:
            name = f"{path}:{channel}" if len(found) > 1 else str(path)
            yield f"{name}: {' '.join(word.word for word in words)}"


def ctm_name(path: Path) -> str:
    """Returns the name of a recording in a CTM file."""
    return "_".join(path.stem.split())


def check_ctm_names(paths: Sequence[Path]) -> None:
    """Raises InputError if two recordings have the same name in a CTM file."""
    named: dict[str, Path] = {}
    for path in paths:
        other = named.setdefault(ctm_name(path), path)
        if other != path:
            raise InputError(
                f"{other} and {path}: are both {ctm_name(path)} in a CTM file; rename one, or transcribe them apart"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 1 if a file could not be transcribed (the others are), else 0."""
    parser = argparse.ArgumentParser(prog="python -m asr_am.transcribe", description="Print the words of recordings.")
    parser.add_argument("--model", type=Path, required=True, help="a decoding run, exp/<corpus>/decode/<run>")
    how = parser.add_mutually_exclusive_group()
    for name, text in (("separate", "every channel is a speaker"), ("average", "one speaker: average the channels")):
        how.add_argument(f"--{name}", dest="channels", action="store_const", const=name, default="auto", help=text)
    parser.add_argument("--times", action="store_true", help="print a CTM line for each word")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="audio files")
    options = parser.parse_args(arguments)

    def work() -> int:
        if options.times:
            check_ctm_names(options.files)
        transcriber, status = load_system(options.model), 0
        for path in options.files:
            try:
                for line in transcripts(transcriber, path, options.channels, times=options.times):
                    print(line, flush=True)
            except InputError as error:
                print(f"error: {error}", file=sys.stderr)
                status = 1
        return status

    return exit_code("error", work)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    sys.exit(main())
