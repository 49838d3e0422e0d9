"""Utterances of the test set with errors, as every system recognised them, from score/<run>/errors.txt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from urllib.parse import quote

from asr_am.data.textfile import numbered_lines
from asr_am.score.files import lower

REMEDY = "run stage 9 (score) again"
HEADER = re.compile(r"(\S+) (\S+) (\S+) (\d+\.\d+) (\d+\.\d+)")
SCORES = re.compile(r"Scores: \(#C #S #D #I\) (\d+) (\d+) (\d+) (\d+)")
PREFIX = len("REF:  ")
KINDS = {"S": "substitution", "D": "deletion", "I": "insertion"}


@dataclass(frozen=True)
class Piece:
    """Characters of an alignment's line, and the kind of error they are, "" for correct words."""

    text: str
    kind: str


@dataclass(frozen=True)
class AlignedWords:
    """Reference and hypothesis of one system, below each other."""

    run: str
    errors: int
    reference: Sequence[Piece]
    hypothesis: Sequence[Piece]


@dataclass
class Utterance:
    """A segment of the reference.

    Attributes:
        audio: link to the recording, from the folder of the report. "" if it is no file.
        errors: of all systems together.
    """

    recording: str
    channel: str
    speaker: str
    begin: float
    end: float
    audio: str
    errors: int = 0
    alignments: list[AlignedWords] = field(default_factory=list)


def read_utterances(corpus_dir: Path, runs: Sequence[str], most: int) -> tuple[list[Utterance], int]:
    """Reads the utterances in which any of the systems has an error, those with most errors first.

    Returns `most` of them, and the number of all. `runs` are names in exp/<corpus>/score, in the order of the page.

    Raises:
        InputError: an errors.txt is unreadable.
    """
    links = _audio_links(corpus_dir)
    utterances: dict[tuple[str, ...], Utterance] = {}
    for run in runs:
        path = corpus_dir / "score" / run / "errors.txt"
        for block in _blocks(path) if path.exists() else ():
            header, scores = HEADER.match(block[0]), SCORES.match(block[1]) if len(block) == 5 else None
            if header is None or scores is None:  # the lists of frequent errors, at the end
                continue
            recording, channel, speaker, begin, end = header.groups()
            utterance = utterances.setdefault(
                header.groups(),
                Utterance(recording, channel, speaker, float(begin), float(end), links.get(recording, "")),
            )
            errors = sum(map(int, scores.groups()[1:]))
            utterance.errors += errors
            utterance.alignments.append(AlignedWords(run, errors, *_pieces(*(line[PREFIX:] for line in block[2:]))))
    wrong = sorted((u for u in utterances.values() if u.errors), key=lambda utterance: -utterance.errors)
    return wrong[:most], len(wrong)


def _blocks(path: Path) -> Iterator[list[str]]:
    """Yields groups of lines between empty lines."""
    block: list[str] = []
    for _, line in numbered_lines(path, REMEDY):
        if line:
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _pieces(reference: str, hypothesis: str, marks: str) -> tuple[list[Piece], list[Piece]]:
    """Cuts two lines whose words are below each other at the errors, which `marks` has letters below."""
    cuts = [(0, "")]
    for found in re.finditer("[SDI]", marks):
        begin = found.start()
        width = max(len(line[begin:].partition(" ")[0]) for line in (reference, hypothesis))
        cuts += [(begin, KINDS[found.group()]), (begin + width, "")]
    ends = [begin for begin, _ in cuts[1:]]
    rows: tuple[list[Piece], list[Piece]] = ([], [])
    for (begin, kind), end in zip_longest(cuts, ends):
        for row, line in zip(rows, (reference, hypothesis), strict=True):
            row.append(Piece(line[begin:end], kind))
    return rows


def _audio_links(corpus_dir: Path) -> Mapping[str, str]:
    """Returns the path of each recording of test by its id as scored, relative to exp/<corpus>/report where in exp."""
    manifest = corpus_dir / "data" / "test" / "recordings.jsonl.gz"
    if not manifest.exists():
        return {}
    recordings = (json.loads(line) for _, line in numbered_lines(manifest, "run stage 0 (data) again"))
    return {
        lower(recording["id"]): quote(_from_report(source["source"]))
        for recording in recordings
        for source in recording["sources"][:1]
        if source["type"] == "file"
    }


def _from_report(source: str) -> str:
    return f"/{source.lstrip('/')}" if source.startswith("/") else f"../data/{source}"  # //x would be a host
