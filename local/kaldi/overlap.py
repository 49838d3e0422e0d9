"""Separates overlapping utterances of one channel, so that each is scored against its own words.

NIST's files identify words only by recording, channel and time. Where utterances overlap, the words of one would count
in another. An utterance that overlaps an earlier one is moved to a copy of its recording: another name with the same
audio and times, so features do not change.
"""

from __future__ import annotations

from dataclasses import replace

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.stm import channel_letter
from local.kaldi.sets import FRAME_SHIFT, CorpusSet

SLACK = FRAME_SHIFT  # for rounded times. No word is shorter than this


def separate_overlaps(corpus: CorpusSet, issues: IssueCounter) -> CorpusSet:
    """Returns the set with as few copies of recordings as needed for no two utterances of a channel to overlap."""
    ends: dict[tuple[str, str], list[float]] = {}  # (recording, channel) to the end of the last utterance in each copy
    recordings = dict(corpus.recordings)
    copies: dict[tuple[str, int], str] = {}
    utterances = []
    for utterance in sorted(corpus.utterances, key=lambda utterance: (utterance.start, utterance.id)):
        original = utterance.recording_id
        last = ends.setdefault((original, channel_letter(utterance)), [])
        number = next((n for n, end in enumerate(last) if end <= utterance.start + SLACK), len(last))
        last[number : number + 1] = [utterance.end]
        if number:
            issues.add("utterances that overlap an earlier one on their channel: scored apart", utterance.id)
            if (original, number) not in copies:
                name = f"{original}-overlap{number}"
                while name in recordings:
                    name += "+"
                copies[original, number] = name
                recordings[name] = replace(corpus.recordings[original], id=name)
            utterance = replace(utterance, recording_id=copies[original, number])
        utterances.append(utterance)
    return replace(corpus, recordings=recordings, utterances=sorted(utterances, key=lambda utterance: utterance.id))
