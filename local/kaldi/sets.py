"""Reads a Kaldi data directory as one set of the recipe: usable utterances, and counts of all others."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
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

MIN_SHARE = 0.5  # smallest usable share of the listed utterances
LEFT_OUT = ": left out"  # suffix of the reasons to leave out an utterance
HEAD = 1 << 18  # bytes of two files of one size that are compared
FRAME_SHIFT, STATES = 0.01, 3  # seconds, states per phone: a word of n phones lasts at least 3 n frames


@dataclass
class CorpusSet:
    """One set of the corpus.

    Attributes:
        folder: the user's directory.
        recordings: by id, may include unused ones.
        utterances: with their words.
    """

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
    issues: IssueCounter,
    *,
    max_bad_audio: float,
    jobs: int,
) -> CorpusSet:
    """Reads the audio and transcripts of `source`.

    Args:
        source: the user's Kaldi data directory.
        subset: name of the set.
        normalise: spells words as in the lexicon.
        audio: how to read audio.
        issues: counts issues.
        max_bad_audio: largest share of utterances without usable audio.
        jobs: worker processes.

    Raises:
        InputError: too many utterances have no usable audio, or too few are usable.
    """
    check_pipes(source.audio, audio)
    words = _transcribed(source, normalise, issues)
    sides = _sides(source, words, issues)
    results = parallel_map(partial(check_recording, options=audio), sides, jobs, f"reading audio of {subset}", chunk=8)
    _check_losses(source, words, results, issues, max_bad_audio)
    recordings = {found.recording.id: found.recording for found in results if found.recording and found.utterances}
    utterances = [
        _supervision(source, found.recording.id, utterance, place, words[utterance])
        for found in results
        if found.recording
        for utterance, place in found.utterances.items()
    ]
    return CorpusSet(source.folder, recordings, sorted(utterances, key=lambda utterance: utterance.id))


def _transcribed(source: KaldiDir, normalise: Normaliser, issues: IssueCounter) -> dict[str, str]:
    """Returns the words of the utterances that have audio, words and a speaker."""
    words = {}
    for utterance, record in source.text.items():
        if utterance not in source.spans:
            issues.add("transcript without audio in wav.scp or segments: left out", record.where)
        elif utterance not in source.speaker:
            issues.add("utterance without a speaker in utt2spk: left out", record.where)
        elif spelt := normalise(record.value, record.where, issues):
            words[utterance] = " ".join(spelt)
        else:
            issues.add("transcript without words: left out", record.where)
    for utterance in sorted(source.spans.keys() - source.text.keys()):
        issues.add("utterance without a transcript: left out", utterance)
    for utterance in sorted(source.speaker.keys() - source.spans.keys() - source.text.keys()):
        issues.add("speaker of an utterance without audio and transcript: not used", utterance)
    for recording in sorted(source.audio.keys() - {span.recording for span in source.spans.values()}):
        issues.add("recording without a line in segments: not used", source.audio[recording].where)
    return words


def _sides(source: KaldiDir, words: dict[str, str], issues: IssueCounter) -> list[ScpRecording]:
    """Returns the recordings that contain transcribed utterances."""
    spans: dict[str, list[tuple[str, UtteranceSpan]]] = defaultdict(list)
    for utterance in words:
        span = source.spans[utterance]
        if span.recording in source.audio:
            spans[span.recording].append((utterance, span))
        else:
            issues.add("recording that wav.scp lacks: left out", f"{source.folder / 'segments'}: {utterance}")
    return [
        ScpRecording(name, source.audio[name], source.sides.get(name, (name, None))[1], tuple(sorted(members)))
        for name, members in sorted(spans.items())
    ]


def _check_losses(
    source: KaldiDir, words: dict[str, str], results: list[CheckedRecording], issues: IssueCounter, max_bad_audio: float
) -> None:
    """Counts the issues of audio. Raises InputError if too few utterances remain."""
    problems = [problem for found in results for problem in found.problems]
    for what, where in [*problems, *(note for found in results for note in found.notes)]:
        issues.add(what, where)
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
            f"with words and audio; check that the files belong together.{_reasons(issues)}"
        )


def _reasons(issues: IssueCounter) -> str:
    return "".join(
        f" {count} x {what} ({issues.first[what]})." for what, count in issues.counts.items() if "left out" in what
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
    """Raises InputError if two sets have utterances of the same name."""
    for (_, first), (subset, second) in combinations(sources.items(), 2):
        shared = sorted(first.text.keys() & first.spans.keys() & second.text.keys() & second.spans.keys())
        if shared:
            raise InputError(
                f"{second.text[shared[0]].where}: utterance {shared[0]} is in {first.folder} too ({len(shared)} are); "
                f"take them out of one, or rename: utils/copy_data_dir.sh --utt-prefix {subset}- {second.folder} NEW"
            )


def count_shared_audio(sets: Mapping[str, CorpusSet], issues_by_set: Mapping[str, IssueCounter]) -> None:
    """Counts the utterances whose audio is in an earlier set, too, as the same part of a file or of its copy."""
    recordings = [recording for corpus in sets.values() for recording in corpus.used_recordings]
    files = {source.source for recording in recordings for source in recording.sources if source.type == "file"}
    contents = _contents(files)
    earlier: dict[tuple[object, object], list[tuple[float, float]]] = defaultdict(list)
    for subset, corpus in sets.items():
        own = defaultdict(list)
        for utterance in corpus.utterances:
            sources = corpus.recordings[utterance.recording_id].sources
            place = tuple(contents.get(source.source, source.source) for source in sources), utterance.channel
            own[place].append((utterance.start, utterance.end))
            if any(begin < utterance.end and utterance.start < end for begin, end in earlier[place]):
                issues_by_set[subset].add("audio of an earlier set, too: error rates come out too low", utterance.id)
        for place, spans in own.items():
            earlier[place] += spans


def _contents(files: Iterable[str]) -> dict[str, object]:
    """Returns for each file what it shares with its copies: its size and a digest of its beginning."""
    by_size = defaultdict(list)
    for name in files:
        by_size[Path(name).stat().st_size].append(name)
    found: dict[str, object] = {}
    for size, names in by_size.items():
        for name in names:  # another size is enough to tell a file apart
            found[name] = size if len(names) == 1 else (size, _digest(Path(name)))
    return found


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(HEAD)).digest()


def left_out(issues: IssueCounter) -> dict[str, int]:
    """Returns the number of utterances left out for each reason, from the issues counted before references are read."""
    return {what.removesuffix(LEFT_OUT): count for what, count in issues.counts.items() if what.endswith(LEFT_OUT)}


def drop_too_short(corpus: CorpusSet, shortest: dict[str, int], issues: IssueCounter) -> None:
    """Leaves out training utterances that are shorter than the HMM states of their words.

    Args:
        corpus: set to shorten.
        shortest: number of phones of each word's shortest pronunciation. Unknown words count as one phone.
        issues: counts issues.
    """
    kept = []
    for utterance in corpus.utterances:
        phones = sum(shortest.get(word, 1) for word in (utterance.text or "").split())
        if utterance.duration < FRAME_SHIFT * STATES * phones:
            where = f"{utterance.id} ({utterance.duration:.2f} s, at least {phones} phones)"
            issues.add("shorter than its phones need: left out", where)
        else:
            kept.append(utterance)
    corpus.utterances = kept
