"""Writes the corpus to disk: lhotse manifests, references, scoring rules, dictionary, LM text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from lhotse import Recording, SupervisionSegment

from asr_am.data.manifests import SETS, write_set
from asr_am.data.stm import CHANNELS, stm_line, write_reco2file_and_channel
from asr_am.data.textfile import write_lines
from local.minicts.conditions import SAMPLING_RATE, VERSION
from local.minicts.conversation import Conversation, Utterance
from local.minicts.glm import glm
from local.minicts.lexicon import pronunciations
from local.minicts.text import VOCAL_NOISES, grammar, reference, transcript

_STM_HEADER = """\
;; CATEGORY "0" "" ""
;; LABEL "O" "Overall" "All conversations"
;; CATEGORY "1" "Condition" "How the conversations were made"
;; LABEL "sw" "swb" "As the training data"
;; LABEL "en" "ch" "Unseen accents and voices, noisier, faster"
;; CATEGORY "2" "Sex" ""
;; LABEL "F" "Female" ""
;; LABEL "M" "Male" ""
;; CATEGORY "3" "Condition and sex" ""
;; LABEL "sw-F" "swb-F" ""
;; LABEL "sw-M" "swb-M" ""
;; LABEL "en-F" "ch-F" ""
;; LABEL "en-M" "ch-M" ""
"""


def write_corpus(out: Path, conversations: list[Conversation], settings: dict[str, float]) -> None:
    """Writes everything except the wav files."""
    by_set = {subset: [talk for talk in conversations if talk.call.subset == subset] for subset in SETS}
    for subset, talks in by_set.items():
        segments = [_segment(talk, utterance) for talk in talks for utterance in talk.utterances]
        recordings = [Recording.from_file(talk.wav, recording_id=talk.call.recording) for talk in talks]
        write_set(out, subset, recordings, segments)
        if subset != "train":
            _write_stm(out / subset / "ref.stm", talks)
            write_reco2file_and_channel(out / subset / "reco2file_and_channel", segments)
    said = [utterance.tokens for talk in by_set["train"] for utterance in talk.utterances]
    words = pronunciations(grammar().vocabulary(), said, int(settings["seed"]))
    write_lines(out / "lexicon.txt", [f"{word} {phones}" for word, variants in words.items() for phones in variants])
    write_lines(out / "nonspeech.txt", [f"{noise} NSN" for noise in VOCAL_NOISES])
    write_lines(out / "en.glm", glm().splitlines())
    (out / "lm").mkdir(exist_ok=True)
    write_lines(out / "lm" / "train.txt", [transcript(tokens) for tokens in said])
    description = {"name": "minicts", "version": VERSION, "sampling_rate": SAMPLING_RATE, **settings}
    write_lines(out / "corpus.json", [json.dumps(description, indent=2)])


def _segment(talk: Conversation, utterance: Utterance) -> SupervisionSegment:
    speaker, recording = talk.call.speakers[utterance.channel], talk.call.recording
    first, last = round(100 * utterance.start), round(100 * (utterance.start + utterance.duration))
    return SupervisionSegment(
        id=f"{speaker.id}-{recording}-{CHANNELS[utterance.channel]}-{first:06d}-{last:06d}",
        recording_id=recording,
        start=utterance.start,
        duration=utterance.duration,
        channel=utterance.channel,
        text=transcript(utterance.tokens),
        language="English",
        speaker=speaker.id,
        gender=speaker.gender,
    )


def _write_stm(path: Path, talks: list[Conversation]) -> None:
    """Writes the reference in the form of Hub5'00: category header, speaker = conversation side, verbatim text."""
    lines = []
    for talk in sorted(talks, key=lambda talk: talk.call.recording):
        for utterance in sorted(talk.utterances, key=lambda utterance: (utterance.channel, utterance.start)):
            condition, gender = talk.call.condition.name, talk.call.speakers[utterance.channel].gender
            segment = replace(_segment(talk, utterance), text=reference(utterance.tokens))
            lines.append(stm_line(segment, f"O,{condition},{gender},{condition}-{gender}"))
    write_lines(path, [*_STM_HEADER.splitlines(), *lines])
