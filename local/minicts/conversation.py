"""Generates one telephone conversation: its script, its timing, and the two-channel wav file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from asr_am.data.temporary import replacing
from local.minicts.conditions import SAMPLING_RATE, Condition
from local.minicts.espeak import Espeak
from local.minicts.telephone import babble_from, draw_line, mix, transmit
from local.minicts.text import Token, grammar, spontaneous
from local.minicts.voices import Speaker, say

MAX_SECONDS, MIN_SECONDS = 15.0, 0.3  # of an utterance
_MAX_WORDS = 28
_PADDING = (0.08, 0.25)  # seconds of silence kept before and after an utterance
_MAX_SAMPLES = int((MAX_SECONDS - 2 * _PADDING[1]) * SAMPLING_RATE)  # longer utterances are dropped
_STRAY = 0.3  # probability of a sentence on another topic
_BACKCHANNEL = 0.35  # probability per utterance of a turn


@dataclass(frozen=True)
class Call:
    """Everything that determines a conversation. All randomness is drawn from `seed`."""

    recording: str
    subset: str
    condition: Condition
    speakers: tuple[Speaker, Speaker]
    words: int
    seed: tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """A planned utterance. A back-channel is spoken during the utterance before it."""

    channel: int
    tokens: list[Token]
    turn: int
    backchannel: bool = False


@dataclass(frozen=True)
class Utterance:
    """A spoken utterance. Times are in seconds and include silence at both ends. Speech itself begins at `speech`."""

    channel: int
    start: float
    duration: float
    speech: float
    tokens: list[Token]


@dataclass(frozen=True)
class Conversation:
    call: Call
    wav: Path
    utterances: list[Utterance]


def hold(call: Call, folder: Path) -> Conversation:
    """Speaks `call` and writes `folder/<recording>.wav` (mu-law, channel 0 is the first speaker)."""
    rng = np.random.default_rng(call.seed)
    script = write_script(call, rng)
    with Espeak(int(rng.integers(1 << 31))) as espeak:
        spoken = [say(line.tokens, call.speakers[line.channel], espeak, rng) for line in script]
    pieces = [(line, samples) for line, samples in zip(script, spoken, strict=True) if len(samples) <= _MAX_SAMPLES]
    utterances = place(pieces, rng)
    wav = folder / f"{call.recording}.wav"
    _write_wav(wav, _render(call, [samples for _, samples in pieces], utterances, rng))
    return Conversation(call, wav, utterances)


def write_script(call: Call, rng: np.random.Generator) -> list[Planned]:
    """Returns greetings, turns on one topic with back-channels of the listener, and farewells, about `call.words`
    words.
    """
    topics = grammar().topics
    theme = topics[rng.integers(len(topics))]
    script: list[Planned] = []

    def add(channel: int, rules: list[str], turn: int, backchannel: bool = False) -> None:
        words: list[str] = []
        for rule in rules:
            topic = topics[rng.integers(len(topics))] if rng.random() < _STRAY else theme
            more = grammar().expand(rule, topic, rng)
            words += more if len(words) + len(more) <= _MAX_WORDS else []
        tokens = spontaneous(words, call.speakers[channel].style, rng)
        if tokens:  # the grammar may give nothing short enough
            script.append(Planned(channel, tokens, turn, backchannel))

    add(0, ["hello"], 0)
    add(1, ["fine"], 1)
    turn = 2
    while sum(len(line.tokens) for line in script) < call.words - 25:  # the last turn overshoots
        channel = turn % 2
        for position in range(rng.integers(1, 5)):
            opening = ["reply"] if position == 0 and rng.random() < 0.5 else []
            add(channel, opening + ["sentence"] * int(rng.choice([1, 2, 3], p=[0.6, 0.28, 0.12])), turn)
            if rng.random() < _BACKCHANNEL:
                add(1 - channel, ["backchannel"], turn, backchannel=True)
        turn += 1
    add(turn % 2, ["goodbye"], turn)
    add(1 - turn % 2, ["bye"], turn + 1)
    return script


def place(pieces: list[tuple[Planned, np.ndarray]], rng: np.random.Generator) -> list[Utterance]:
    """Lays spoken utterances out in time.

    Turns follow one another with a gap or an overlap. Utterances of one channel never overlap, including their silence.
    """
    free = [0.3, 0.3]  # end of speech in each channel
    now, turn = float(rng.uniform(0.5, 2.0)), 0
    before = (0.0, 0.0)  # start and end of the utterance of a back-channel
    utterances = []
    for line, samples in pieces:
        head, tail = rng.uniform(*_PADDING), rng.uniform(*_PADDING)
        if line.backchannel:
            speech = before[0] + rng.uniform(0.4, 1.05) * (before[1] - before[0])
        else:
            speech = now + (rng.normal(0.3, 0.35) if line.turn != turn else rng.uniform(0.3, 0.9))
        speech = max(speech, free[line.channel] + head)
        end = speech + len(samples) / SAMPLING_RATE
        start = round(speech - head, 3)
        duration = round(max(end + tail - start, MIN_SECONDS), 3)
        free[line.channel] = start + duration + 0.002  # margin for rounding
        if not line.backchannel:
            now, turn, before = end, line.turn, (speech, end)
        utterances.append(Utterance(line.channel, start, duration, speech, line.tokens))
    return utterances


def _render(call: Call, spoken: list[np.ndarray], utterances: list[Utterance], rng: np.random.Generator) -> np.ndarray:
    """Returns both channels [T, 2] after the telephone."""
    seconds = max(utterance.start + utterance.duration for utterance in utterances) + rng.uniform(0.5, 1.5)
    sides_2T = np.zeros((2, int(seconds * SAMPLING_RATE)))
    for utterance, samples in zip(utterances, spoken, strict=True):
        first = round(utterance.speech * SAMPLING_RATE)
        sides_2T[utterance.channel, first : first + len(samples)] = samples
    lines = draw_line(call.condition, rng), draw_line(call.condition, rng)
    babble = babble_from(spoken, 10.0, rng)
    received_2T = np.stack([transmit(side_T, line, babble, rng) for side_T, line in zip(sides_2T, lines, strict=True)])
    return mix(received_2T, lines).T


def _write_wav(path: Path, samples_T2: np.ndarray) -> None:
    with replacing(path) as temporary:
        soundfile.write(temporary, samples_T2, SAMPLING_RATE, subtype="ULAW", format="WAV")
