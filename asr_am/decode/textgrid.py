"""Alignments as Praat TextGrid files: a file for each recording and channel, with a tier of words and one of phones.

Utterances that overlap others of their side are in further tiers, "words 2" and "phones 2".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from lhotse import SupervisionSegment

from asr_am.data.stm import channel_letter
from asr_am.data.textfile import file_name, write_lines
from asr_am.decode.ctm import FRAME_SHIFT, CtmWord

EPSILON = 1e-6  # seconds, shorter times are none
ROUNDED = FRAME_SHIFT / 2  # seconds by which utterances may overlap in a tier, where the later one begins later
Interval = tuple[float, float, str]  # begin and end in seconds, name
Tiers = dict[str, list[Interval]]


def write_textgrids(
    folder: Path, segments: Mapping[str, SupervisionSegment], tiers: Mapping[str, Mapping[str, Sequence[CtmWord]]]
) -> list[Path]:
    """Writes <recording>-<A|B>.TextGrid for every side with alignments. `/` in names is `_`, with a digest of the name.

    Args:
        tiers: by name of the tier, the words or phones of each utterance, timed in frames of the utterance.

    Returns:
        The files.
    """
    sides: dict[str, dict[str, Tiers]] = defaultdict(lambda: defaultdict(lambda: {name: [] for name in tiers}))
    for tier, utterances in tiers.items():
        for utterance, words in utterances.items():
            segment = segments[utterance]
            side = sides[f"{segment.recording_id}-{channel_letter(segment)}"][utterance]
            for word in words:
                begin = segment.start + word.start * FRAME_SHIFT
                end = min(begin + word.frames * FRAME_SHIFT, segment.end)
                side[tier].append((begin, end, word.word))
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, spoken in sorted(sides.items()):
        files.append(folder / f"{file_name(name)}.TextGrid")
        write_lines(files[-1], _lines(_side_by_side(spoken.values())))
    return files


def _side_by_side(utterances: Collection[Tiers]) -> Tiers:
    """Returns the tiers of a side. Each utterance is in the first of them in which it overlaps no other."""
    made: Tiers = {name: [] for utterance in utterances for name in utterance}
    ends: list[float] = []  # of the last word, in the first tiers, in the second ones and so on
    spoken = [utterance for utterance in utterances if any(utterance.values())]
    for utterance in sorted(spoken, key=_begin):
        free = (number for number, end in enumerate(ends) if end <= _begin(utterance) + ROUNDED)
        number = next(free, len(ends))
        ends[number : number + 1] = [max(end for intervals in utterance.values() for _, end, _ in intervals)]
        for name, intervals in utterance.items():
            made.setdefault(name if number == 0 else f"{name} {number + 1}", []).extend(intervals)
    return made


def _begin(utterance: Tiers) -> float:
    return min(begin for intervals in utterance.values() for begin, _, _ in intervals)


def _lines(tiers: Tiers) -> Iterable[str]:
    """Yields the lines of a file in the long format, whose intervals have no gaps."""
    last = max((end for intervals in tiers.values() for _, end, _ in intervals), default=0.0)
    yield from ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", f"xmax = {last:.6f}"]
    yield from ["tiers? <exists>", f"size = {len(tiers)}", "item []:"]
    for number, (name, intervals) in enumerate(tiers.items(), start=1):
        filled = _without_gaps(sorted(intervals), last)
        yield from [f"    item [{number}]:", '        class = "IntervalTier"', f"        name = {_quoted(name)}"]
        yield from ["        xmin = 0", f"        xmax = {last:.6f}", f"        intervals: size = {len(filled)}"]
        for index, (begin, end, label) in enumerate(filled, start=1):
            yield f"        intervals [{index}]:"
            yield from [f"            xmin = {begin:.6f}", f"            xmax = {end:.6f}"]
            yield f"            text = {_quoted(label)}"


def _without_gaps(intervals: Sequence[Interval], last: float) -> list[Interval]:
    """Returns the intervals with empty ones between them."""
    filled: list[Interval] = []
    now = 0.0
    for begin, end, label in intervals:
        begin = max(begin, now)
        if begin > now + EPSILON:
            filled.append((now, begin, ""))
        if end > begin + EPSILON:
            filled.append((begin, end, label))
            now = end
    if last > now + EPSILON:
        filled.append((now, last, ""))
    return filled


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'
