"""Counts word errors of a hypothesis (CTM) against a reference (STM) exactly as NIST's programs do.

The steps are those of hubscr.pl: sort both files, rewrite both by the GLM if there is one (csrfilt), assign words to
segments by their mid-points, align (sclite -F -D), count.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from asr_am.errors import InputError
from asr_am.score.alignment import CORRECT, DELETION, INSERTION, SUBSTITUTION, Pair, align
from asr_am.score.csrfilt import Filter
from asr_am.score.files import (
    ReferenceSegment,
    Slot,
    lower,
    parse_ctm,
    parse_stm,
    read_ctm,
    read_stm,
    show,
    unexpected_words,
)
from asr_am.score.word_network import Network, hypothesis_network, reference_network

log = logging.getLogger(__name__)

ALL = "all"
FILE_PREFIX_SUBSETS = {"swb": "sw_", "ch": "en_"}  # Switchboard and CallHome halves of Hub5'00

Branches = tuple[tuple[bytes, ...], ...]  # of a slot

_LABEL_LINE = re.compile(rb';; LABEL [^"]*"([^"]*)"[^"]*"([^"]*)"[^"]*"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals over segments. `words` counts reference words on the aligned branches, so it depends on the hypothesis."""

    sentences: int = 0
    correct: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    sentence_errors: int = 0

    @property
    def words(self) -> int:
        return self.correct + self.substitutions + self.deletions

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float | None:
        """Word error rate in percent, None if the reference has no words."""
        return 100.0 * self.errors / self.words if self.words else None

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.sentences + other.sentences,
            self.correct + other.correct,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.sentence_errors + other.sentence_errors,
        )


@dataclass(frozen=True, slots=True)
class SegmentScore:
    """Score of one segment. `pairs` is empty if NIST's programs did the counting."""

    file: str
    channel: str
    speaker: str
    label: str
    counts: Counts
    pairs: tuple[Pair, ...] = ()
    begin: float = 0.0
    end: float = 0.0


@dataclass
class Score:
    """Scored segments in file order. `subsets` maps a name to the positions of its segments."""

    segments: list[SegmentScore]
    subsets: dict[str, list[int]] = field(default_factory=dict)
    case_sensitive: bool = False

    @property
    def total(self) -> Counts:
        return self.subset(ALL)

    def subset(self, name: str) -> Counts:
        """Returns the totals of one subset, or of "all"."""
        return sum((segment.counts for segment in self._members(name)), Counts())

    def speakers(self, name: str = ALL) -> dict[str, Counts]:
        """Returns totals by speaker, in order of appearance."""
        totals: dict[str, Counts] = {}
        for segment in self._members(name):
            totals[segment.speaker] = totals.get(segment.speaker, Counts()) + segment.counts
        return totals

    def per_segment(self, name: str = ALL) -> tuple[list[int], list[int]]:
        """Returns errors and reference words of each segment, as asr_am.score.significance takes them."""
        members = self._members(name)
        return [segment.counts.errors for segment in members], [segment.counts.words for segment in members]

    def _members(self, name: str) -> list[SegmentScore]:
        return self.segments if name == ALL else [self.segments[i] for i in self.subsets[name]]


class Reference:
    """STM and GLM, read and filtered once to score many hypotheses against.

    Every label that the STM declares (`;; LABEL "id" "title" "description"`) is a subset, named by its id in lower
    case.

    Args:
        subsets: name to prefix of file names. By default `swb` and `ch` if there are such files.
        case_sensitive: words that differ only in case are different words, as with `sclite -s`.

    Raises:
        InputError: a file is malformed, or rules are given for a case-sensitive score.
    """

    def __init__(
        self, stm: Path, glm: Path | None = None, subsets: Mapping[str, str] | None = None, *,
        case_sensitive: bool = False,
    ) -> None:  # fmt: skip
        if glm and case_sensitive:
            raise InputError(f"{glm}: NIST's rules ignore case; leave them out, or score without regard to case")
        comments, lines = read_stm(stm)
        if glm:
            reference_filter = Filter.for_reference(glm)
            lines = [reference_filter.stm_line(line) for line in lines]
        self.stm, self.glm = stm, glm
        self.segments = [parse_stm(line, case_sensitive=case_sensitive) for line in lines]
        self.case_sensitive = case_sensitive
        self.subset_rules = SubsetRules.of(self.segments, comments, subsets)
        files = {show(segment.file) for segment in self.segments}
        for name, prefix in (subsets or {}).items():
            if not any(file.startswith(lower(prefix)) for file in files):
                log.warning("%s: the subset %s is empty, as no file begins with %s", stm, name, prefix)
        self._hypothesis_filter = Filter.for_hypothesis(glm) if glm else None
        self._networks = [None if segment.ignored else _network(segment) for segment in self.segments]
        self._scores: dict[tuple[int, tuple[Branches, ...]], SegmentScore] = {}

    def score(self, ctm: Path) -> Score:
        """Scores one CTM file. Raises InputError if it is malformed, or has words of a file that the STM lacks."""
        scored = []
        for number, words in self._assign(self._slots(ctm)):
            network = self._networks[number]
            if network is None:
                continue
            key = number, tuple(slot.branches for slot in words)
            if key not in self._scores:  # many LM scales have the same words
                self._scores[key] = _score_segment(self.segments[number], network, hypothesis_network(words))
            scored.append(self._scores[key])
        return Score(scored, self.subset_rules.split(scored), case_sensitive=self.case_sensitive)

    def unexpected_words(self, ctm: Path) -> list[str]:
        """Returns the words of both files that hubscr's validators reject, as "path:line: word"."""
        return list(unexpected_words(self.segments, self._slots(ctm)))

    def _slots(self, ctm: Path) -> list[Slot]:
        lines = read_ctm(ctm)
        if self._hypothesis_filter is None:
            return [parse_ctm(line, case_sensitive=self.case_sensitive) for line in lines]
        return [slot for line in lines for slot in self._hypothesis_filter.ctm_line(line)]

    def _assign(self, slots: list[Slot]) -> Iterator[tuple[int, Sequence[Slot]]]:
        """Yields the words of each segment. Both files are sorted, so files and channels occur in the same order."""
        channels = [list(group) for _, group in groupby(slots, key=lambda slot: (slot.file, slot.channel))]
        numbered = groupby(enumerate(self.segments), key=lambda item: (item[1].file, item[1].channel))
        for channel, group in numbered:
            segments = list(group)
            words = channels.pop(0) if channels and _channel(channels[0]) == channel else []
            yield from zip(
                (number for number, _ in segments), _by_middle([segment for _, segment in segments], words), strict=True
            )
        if channels:
            self._refuse(channels[0][0])

    def _refuse(self, slot: Slot) -> None:
        name = f"file '{show(slot.file)}' channel '{show(slot.channel)}'"
        if (slot.file, slot.channel) in {(segment.file, segment.channel) for segment in self.segments}:
            raise InputError(
                f"{slot.where}: {name} sorts differently than in {self.stm}; use the same blanks and case in both"
            )
        channels = sorted({show(segment.channel) for segment in self.segments if segment.file == slot.file})
        if channels:
            raise InputError(
                f"{slot.where}: {name} is not in {self.stm}, which has the file with {', '.join(channels)}; name the "
                "channels alike"
            )
        raise InputError(f"{slot.where}: {name} is not in {self.stm}; score it with its own reference")


@dataclass(frozen=True)
class SubsetRules:
    """Rules that assign segments to subsets, by prefix of the file name or by label."""

    prefixes: Mapping[str, str]
    labels: Mapping[str, str]

    @classmethod
    def of(
        cls, segments: list[ReferenceSegment], comments: list[bytes], prefixes: Mapping[str, str] | None
    ) -> SubsetRules:
        if prefixes is None:
            files = {segment.file for segment in segments}
            prefixes = {
                name: prefix
                for name, prefix in FILE_PREFIX_SUBSETS.items()
                if any(file.startswith(prefix.encode()) for file in files)
            }
        declared = [show(match[1].lower()) for comment in comments if (match := _LABEL_LINE.match(comment))]
        labels = {f"label-{label}" if label == ALL or label in prefixes else label: label for label in declared}
        return cls(prefixes, labels)

    def split(self, segments: Sequence[SegmentScore]) -> dict[str, list[int]]:
        """Returns the positions of the segments of each subset."""
        subsets = {
            name: [i for i, segment in enumerate(segments) if segment.file.startswith(lower(prefix))]
            for name, prefix in self.prefixes.items()
        }
        names = [set(re.split("[<,>]", segment.label)) for segment in segments]
        for name, label in self.labels.items():
            subsets[name] = [i for i in range(len(segments)) if label in names[i]]
        return subsets


def score_files(stm: Path, ctm: Path, glm: Path | None = None) -> Score:
    """Scores one hypothesis. To score several against one reference, keep a `Reference` and call its `score`.

    Raises:
        InputError: a file is missing or malformed, or they do not belong together.
    """
    return Reference(stm, glm).score(ctm)


def _network(segment: ReferenceSegment) -> Network:
    try:
        return reference_network(segment.text)
    except InputError as error:
        raise InputError(f"{segment.where}: {error}") from None


def _channel(slots: list[Slot]) -> tuple[bytes, bytes]:
    return slots[0].file, slots[0].channel


def _by_middle(segments: list[ReferenceSegment], words: list[Slot]) -> Iterator[list[Slot]]:
    """Gives each segment the next words with mid-points before its end, and the rest to the last one."""
    start = 0
    for segment in segments[:-1]:
        end = start
        while end < len(words) and words[end].middle < segment.end:
            end += 1
        yield words[start:end]
        start = end
    yield words[start:]


def _score_segment(segment: ReferenceSegment, reference: Network, hypothesis: Network) -> SegmentScore:
    try:
        pairs = align(reference, hypothesis)
    except InputError as error:
        raise InputError(f"{segment.where}: {error}") from None
    operations = [pair.operation for pair in pairs]
    counts = Counts(
        sentences=1,
        correct=operations.count(CORRECT),
        substitutions=operations.count(SUBSTITUTION),
        deletions=operations.count(DELETION),
        insertions=operations.count(INSERTION),
        sentence_errors=int(len(operations) > operations.count(CORRECT)),
    )
    file, channel, speaker, label = map(show, (segment.file, segment.channel, segment.speaker, segment.label))
    return SegmentScore(file, channel, speaker, label, counts, tuple(pairs), segment.begin, segment.end)
