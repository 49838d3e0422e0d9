from __future__ import annotations

from pathlib import Path

from lhotse import AudioSource, Recording, SupervisionSegment

from asr_am.data.issue_counter import IssueCounter
from local.kaldi.overlap import separate_overlaps
from local.kaldi.sets import CorpusSet


def corpus(*places: tuple[float, float, int]) -> CorpusSet:
    """Returns utterances (start, end, channel) of one recording, u0, u1, ..."""
    source = AudioSource("command", [0, 1], "cat call.wav")
    recordings = {name: Recording(name, [source], 100, 1000, 10.0) for name in ("call", "call-overlap1")}
    utterances = [
        SupervisionSegment(f"u{n}", "call", start, end - start, channel)
        for n, (start, end, channel) in enumerate(places)
    ]
    return CorpusSet(Path("test"), recordings, utterances)


def names(*places: tuple[float, float, int]) -> list[str]:
    return [utterance.recording_id for utterance in separate_overlaps(corpus(*places), IssueCounter()).utterances]


def test_as_few_copies_as_it_takes() -> None:
    """Each copy of a command's output costs another run of it."""
    first, second = "call-overlap1+", "call-overlap2"  # call-overlap1 is the name of another recording
    assert names((0, 4, 0), (3, 7, 0), (6, 9, 0), (8, 10, 0)) == ["call", first, "call", first]
    assert names((8, 10, 0), (0, 9, 0), (1, 2, 0), (1, 3, 0)) == [first, "call", first, second]


def test_neither_other_channels_nor_rounded_times_overlap() -> None:
    assert names((0, 4, 0), (3, 7, 1), (3.995, 7, 0)) == ["call"] * 3


def test_a_copy_is_of_the_same_audio_and_times() -> None:
    before = corpus((0, 4, 0), (3, 7, 0))
    issues = IssueCounter()
    after = separate_overlaps(before, issues)
    copy, original = after.recordings["call-overlap1+"], after.recordings["call"]
    assert copy.sources == original.sources and copy.duration == original.duration
    assert (after.utterances[1].start, after.utterances[1].end) == (3, 7)
    assert list(issues.first.values()) == ["u1"] and "call-overlap1+" not in before.recordings
