"""A Kaldi data directory as one set of the recipe: utterances that can be used, and a count of all that cannot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

from lhotse import Recording, SupervisionSegment

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.kaldi_audio import MISSING, AudioOptions, CheckedRecording, ScpRecording, check_pipes, check_recording
from asr_am.data.kaldi_dir import KaldiDir, UtteranceSpan
from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from local.kaldi.words import Normaliser

MIN_SHARE = 0.5  # of the listed utterances that must be left
LEFT_OUT = ": left out"  # how the reasons end for which an utterance cannot be used
FRAME_SHIFT, STATES = 0.01, 3  # seconds, states of a phone: a word of n phones lasts at least 3 n frames


@dataclass
class CorpusSet:
    """utterances: each with its words; recordings: by id, those that they are in and maybe others."""

    folder: Path
    recordings: dict[str, Recording]
    utterances: list[SupervisionSegment]

    @property
    def seconds(self) -> float:
        return sum(utterance.duration for utterance in self.utterances)

    @property
    def used_recordings(self) -> list[Recording]:
        return [self.recordings[name] for name in sorted({utterance.recording_id for utterance in self.utterances})]


def read_set(
    source: KaldiDir,
    subset: str,
    normalise: Normaliser,
    audio: AudioOptions,
    tally: IssueCounter,
    *,
    max_bad_audio: float,
    jobs: int,
) -> CorpusSet:
    """Read the audio of `source`. InputError: too many utterances without audio, or of any kind, lost."""
    check_pipes(source.audio, audio)
    words = _transcribed(source, normalise, tally)
    sides = _sides(source, words, tally)
    results = parallel_map(partial(check_recording, options=audio), sides, jobs, f"reading audio of {subset}", chunk=8)
    _check_losses(source, words, results, tally, max_bad_audio)
    recordings = {found.recording.id: found.recording for found in results if found.recording and found.utterances}
    utterances = [
        _supervision(source, found.recording.id, utterance, place, words[utterance])
        for found in results
        if found.recording
        for utterance, place in found.utterances.items()
    ]
    return CorpusSet(source.folder, recordings, sorted(utterances, key=lambda utterance: utterance.id))


def _transcribed(source: KaldiDir, normalise: Normaliser, tally: IssueCounter) -> dict[str, str]:
    """The words of the utterances that have audio, words and a speaker."""
    words = {}
    for utterance, record in source.text.items():
        if utterance not in source.spans:
            tally.add("transcript without audio in wav.scp or segments: left out", record.where)
        elif utterance not in source.speaker:
            tally.add("utterance without a speaker in utt2spk: left out", record.where)
        elif spelt := normalise(record.value, record.where, tally):
            words[utterance] = " ".join(spelt)
        else:
            tally.add("transcript without words: left out", record.where)
    for utterance in source.spans.keys() - source.text.keys():
        tally.add("utterance without a transcript: left out", utterance)
    return words


def _sides(source: KaldiDir, words: dict[str, str], tally: IssueCounter) -> list[ScpRecording]:
    """The recordings that hold transcribed utterances."""
    spans: dict[str, list[tuple[str, UtteranceSpan]]] = defaultdict(list)
    for utterance in words:
        span = source.spans[utterance]
        if span.recording in source.audio:
            spans[span.recording].append((utterance, span))
        else:
            tally.add("recording that wav.scp lacks: left out", f"{source.folder / 'segments'}: {utterance}")
    return [
        ScpRecording(name, source.audio[name], source.sides.get(name, (name, None))[1], tuple(sorted(members)))
        for name, members in sorted(spans.items())
    ]


def _check_losses(
    source: KaldiDir, words: dict[str, str], results: list[CheckedRecording], tally: IssueCounter, max_bad_audio: float
) -> None:
    """Count what the audio brought; InputError where too little is left."""
    problems = [problem for found in results for problem in found.problems]
    for what, where in [*problems, *(note for found in results for note in found.notes)]:
        tally.add(what, where)
    left = sum(len(found.utterances) for found in results)
    if len(problems) > max_bad_audio * len(words):
        (what, where) = problems[0]
        raise InputError(
            f"{source.folder}: {len(problems)} of {len(words)} utterances have no usable audio, more than "
            f"{max_bad_audio:.0%} (corpus.prepare.max_bad_audio); the first: {what.split(':')[0]}: {where}"
            + ("; if paths are relative, give --audio-root" if what.startswith((MISSING, "command")) else "")
        )
    listed = len(source.spans.keys() | source.text.keys())
    if left == 0 or left < MIN_SHARE * listed:
        raise InputError(
            f"{source.folder}: only {left} of {listed} utterances are in wav.scp (and segments), text and utt2spk, "
            f"with words and audio; do the files belong together?{_reasons(tally)}"
        )


def _reasons(tally: IssueCounter) -> str:
    return "".join(
        f" {count} x {what} ({tally.first[what]})." for what, count in tally.counts.items() if "left out" in what
    )


def _supervision(
    source: KaldiDir, recording: str, utterance: str, place: tuple[float, float, int], text: str
) -> SupervisionSegment:
    start, duration, channel = place
    speaker = source.speaker[utterance]
    return SupervisionSegment(
        id=utterance, recording_id=recording, start=start, duration=duration, channel=channel, text=text,
        speaker=speaker, gender=source.gender.get(speaker),
    )  # fmt: skip


def check_apart(sources: Mapping[str, KaldiDir]) -> None:
    """Raise InputError where two sets have utterances of the same name."""
    for (_, first), (subset, second) in combinations(sources.items(), 2):
        shared = sorted(first.text.keys() & first.spans.keys() & second.text.keys() & second.spans.keys())
        if shared:
            raise InputError(
                f"{second.text[shared[0]].where}: utterance {shared[0]} is in {first.folder} too ({len(shared)} are); "
                f"take them out of one, or rename: utils/copy_data_dir.sh --utt-prefix {subset}- {second.folder} NEW"
            )


def left_out(tally: IssueCounter) -> dict[str, int]:
    """How many utterances of a set were left out for which reason, from its tally before its references are read."""
    return {what.removesuffix(LEFT_OUT): count for what, count in tally.counts.items() if what.endswith(LEFT_OUT)}


def drop_too_short(corpus: CorpusSet, shortest: dict[str, int], tally: IssueCounter) -> None:
    """Leave out utterances of training that end before the states of their words' phones could be gone through.

    shortest: phones of each word's shortest pronunciation; a word that it lacks counts as one phone.
    """
    kept = []
    for utterance in corpus.utterances:
        phones = sum(shortest.get(word, 1) for word in (utterance.text or "").split())
        if utterance.duration < FRAME_SHIFT * STATES * phones:
            where = f"{utterance.id} ({utterance.duration:.2f} s, at least {phones} phones)"
            tally.add("shorter than its phones need: left out", where)
        else:
            kept.append(utterance)
    corpus.utterances = kept
