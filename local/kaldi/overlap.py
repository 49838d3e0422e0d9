"""Overlapping utterances of one channel told apart, so that each is scored against its own words.

NIST's files know words by recording, channel and time only: where utterances overlap, the words of one would be counted
in another. Those that overlap an earlier one are said to be of a copy of their recording: another name, the same audio
and times, so that features are what they would have been.
"""

from __future__ import annotations

from dataclasses import replace

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.stm import channel_letter
from local.kaldi.sets import FRAME_SHIFT, CorpusSet

SLACK = FRAME_SHIFT  # of rounded times; no word is so short that its middle would lie there


def told_apart(corpus: CorpusSet, tally: IssueCounter) -> CorpusSet:
    """The set with as few copies of recordings as it takes for no two utterances of a channel to overlap."""
    ends: dict[tuple[str, str], list[float]] = {}  # by recording and channel: of the last utterance in each copy
    recordings = dict(corpus.recordings)
    copies: dict[tuple[str, int], str] = {}
    utterances = []
    for utterance in sorted(corpus.utterances, key=lambda utterance: (utterance.start, utterance.id)):
        original = utterance.recording_id
        last = ends.setdefault((original, channel_letter(utterance)), [])
        number = next((n for n, end in enumerate(last) if end <= utterance.start + SLACK), len(last))
        last[number : number + 1] = [utterance.end]
        if number:
            tally.add("utterances that overlap an earlier one on their channel: scored apart", utterance.id)
            if (original, number) not in copies:
                name = f"{original}-overlap{number}"
                while name in recordings:
                    name += "+"
                copies[original, number] = name
                recordings[name] = replace(corpus.recordings[original], id=name)
            utterance = replace(utterance, recording_id=copies[original, number])
        utterances.append(utterance)
    return replace(corpus, recordings=recordings, utterances=sorted(utterances, key=lambda utterance: utterance.id))
