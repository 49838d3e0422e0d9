"""Output formats of a Score: table, listing of aligned errors, and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from asr_am.data.temporary import replacing
from asr_am.errors import InputError
from asr_am.score.alignment import CORRECT, DELETION, INSERTION, SUBSTITUTION, Pair
from asr_am.score.scoring import ALL, Counts, Score, SegmentScore

_HEADINGS = ("#Snt", "#Wrd", "Corr", "Sub", "Del", "Ins", "Err", "S.Err")
_MOST_FREQUENT = 50

COUNTS = (
    "sentences", "words", "correct", "substitutions", "deletions", "insertions", "errors", "sentence_errors", "wer",
)  # fmt: skip


def write_table(score: Score, stream: TextIO) -> None:
    """Writes percentages per speaker, per subset and in total, in the style of `sclite -o sum`."""
    groups = [list(score.speakers().items()), [(name, score.subset(name)) for name in score.subsets]]
    rows = [[(name, counts) for name, counts in group if counts.sentences] for group in groups]
    rows.append([(ALL, score.total)])
    width = max(len("speaker"), *(len(name) for group in rows for name, _ in group))
    heading = f"| {'speaker':<{width}} | {_HEADINGS[0]:>6} {_HEADINGS[1]:>7} |" + "".join(
        f"{h:>7}" for h in _HEADINGS[2:]
    )
    rule = "-" * (len(heading) + 2)
    print(rule, heading + " |", sep="\n", file=stream)
    for group in filter(None, rows):
        print(rule, *(_row(name, counts, width) for name, counts in group), sep="\n", file=stream)
    print(rule, file=stream)


def to_json(score: Score) -> dict[str, dict[str, Any]]:
    """Returns counts and WER in percent (None without reference words) of "all" and of each subset."""
    totals = {name: score.subset(name) for name in [ALL, *score.subsets]}
    return {name: {column: getattr(total, column) for column in COUNTS} for name, total in totals.items()}


def write_json(score: Score, path: Path) -> None:
    """Writes `to_json` to a temporary file and renames it."""
    _write_renamed(path, json.dumps(to_json(score), indent=2) + "\n")


def write_alignments(score: Score, path: Path) -> None:
    """Writes the alignment of every segment (REF, HYP, Eval), then the most frequent errors."""
    blocks = [_alignment(segment, case_sensitive=score.case_sensitive) for segment in score.segments]
    blocks += _frequent_errors(score)
    _write_renamed(path, "\n".join(blocks))


def _row(name: str, counts: Counts, width: int) -> str:
    def percent(part: int, whole: int) -> str:
        return f"{100.0 * part / whole:7.1f}" if whole else f"{'-' if not part else f'*{part}*':>7}"

    parts = (counts.correct, counts.substitutions, counts.deletions, counts.insertions, counts.errors)
    cells = [percent(part, counts.words) for part in parts] + [percent(counts.sentence_errors, counts.sentences)]
    return f"| {name:<{width}} | {counts.sentences:>6} {counts.words:>7} |{''.join(cells)} |"


def _alignment(segment: SegmentScore, *, case_sensitive: bool) -> str:
    columns = [_column(pair, case_sensitive=case_sensitive) for pair in segment.pairs]
    counts = segment.counts
    where = f"{segment.file} {segment.channel} {segment.speaker} {segment.begin:.2f} {segment.end:.2f} {segment.label}"
    lines = [
        where.rstrip(),
        f"Scores: (#C #S #D #I) {counts.correct} {counts.substitutions} {counts.deletions} {counts.insertions}",
    ]
    for name, cells in zip(("REF: ", "HYP: ", "Eval:"), zip(*columns, strict=True), strict=False):
        lines.append(f"{name} {' '.join(cells)}".rstrip())
    return "\n".join(lines) + "\n"


def _column(pair: Pair, *, case_sensitive: bool) -> tuple[str, str, str]:
    """Returns the three cells of one pair, errors in capitals unless case matters, padded to one width."""
    words = [str(word) if word else "" for word in (pair.reference, pair.hypothesis)]
    if pair.operation != CORRECT and not case_sensitive:
        words = [word.upper() for word in words]  # may be longer: ß becomes SS
    width = max(1, *map(len, words))
    if pair.operation != CORRECT:
        words = [word or "*" * width for word in words]
    mark = " " if pair.operation == CORRECT else pair.operation
    return f"{words[0]:<{width}}", f"{words[1]:<{width}}", f"{mark:<{width}}"


def _frequent_errors(score: Score) -> Iterator[str]:
    pairs = [pair for segment in score.segments for pair in segment.pairs]
    for title, operation in (("CONFUSIONS", SUBSTITUTION), ("INSERTIONS", INSERTION), ("DELETIONS", DELETION)):
        counter = Counter(
            " -> ".join(str(word) for word in (pair.reference, pair.hypothesis) if word)
            for pair in pairs
            if pair.operation == operation
        )
        lines = [f"{title}: {sum(counter.values())} in all, {len(counter)} different"]
        frequent = sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:_MOST_FREQUENT]
        yield "\n".join([*lines, *(f"{count:6d}  {what}" for what, count in frequent)]) + "\n"


def _write_renamed(path: Path, text: str) -> None:
    if path.is_dir():
        raise InputError(f"{path}: is a directory; give a file to write")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: its folder does not exist; make it, or write elsewhere")
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
