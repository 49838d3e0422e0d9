"""Readers of NIST's STM (reference) and CTM (hypothesis) files, and hubscr's validators.

    STM    file channel speaker begin end [<label,label>] text
    CTM    file channel begin duration word [confidence]

Everything is bytes: the NIST programs know no encoding, fold the case of A-Z only (with `sclite -s` that of names only,
here), and compare bytes. The validators
(stmValidator.pl, ctmValidator.pl) list the words that a filtered English STM or CTM may hold. They warn of tokens that
the rules forgot and do not affect the score.
"""

from __future__ import annotations

import re
import struct
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from asr_am.data.checksums import intact
from asr_am.errors import InputError

STM_FIELDS = ("file", "channel", "speaker", "begin time", "end time")
CTM_FIELDS = ("file", "channel", "begin time", "duration", "word")
MAX_CTM_FIELD = 499  # sclite copies a CTM field into 500 bytes

_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_BRACE = re.compile(rb"[{}]")
_UNPRINTABLE = re.compile(rb"[\x00\x0b\x0c\r]")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file. `where` is "path:number", for messages."""

    where: str
    text: bytes


@dataclass(frozen=True, slots=True)
class ReferenceSegment:
    """One STM line as sclite reads it: lower case (`text` only if case does not matter), times in seconds. `text` still
    has its alternations.
    """

    where: str
    file: bytes
    channel: bytes
    speaker: bytes
    begin: float
    end: float
    label: bytes
    text: bytes

    @property
    def ignored(self) -> bool:
        text = self.text.lower()
        return any(mark in text for mark in (b"ignore_time_segment_in_scoring", b"ignoretimesegmentinscoring"))


@dataclass(frozen=True, slots=True)
class Slot:
    """One CTM line: a word, or after the GLM several branches of words that are assigned to a segment together."""

    where: str
    file: bytes
    channel: bytes
    middle: float
    branches: tuple[tuple[bytes, ...], ...]


def read_lines(path: Path) -> list[Line]:
    """Returns the lines of `path` without line ends. Raises InputError if it is missing, unreadable or not text."""
    try:
        data = intact(path).read_bytes().removeprefix(BOM_UTF8)  # to sclite it is part of the first name
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give an existing text file") from None
    lines = []
    for number, text in enumerate(data.split(b"\n"), start=1):
        text = text.removesuffix(b"\r")
        if bad := _UNPRINTABLE.search(text):
            raise InputError(f"{path}:{number}: byte 0x{bad[0][0]:02x} does not belong in a text file; remove it")
        lines.append(Line(f"{path}:{number}", text))
    return lines if lines[-1].text else lines[:-1]


def read_stm(path: Path) -> tuple[list[bytes], list[Line]]:
    """Returns the comments of an STM file and its segments, sorted as `hubscr.pl sortSTM` does."""
    comments, segments = [], []
    for line in read_lines(path):
        text = line.text.lstrip()
        if text.startswith((b";;", b"**")):
            comments.append(text)
        elif text:
            _check_stm(line.where, text)
            segments.append(Line(line.where, text))
    if not segments:
        raise InputError(f"{path}: no segments; an STM line is: {' '.join(STM_FIELDS)} <labels> words")
    return comments, sorted(segments, key=lambda line: _sort_key(line.text, time_field=3))


def read_ctm(path: Path) -> list[Line]:
    """Returns the words of a CTM file without comments, sorted as `hubscr.pl sortCTM` does."""
    words = []
    for line in read_lines(path):
        text = line.text.lstrip()
        if text and not text.startswith(b";"):
            check_ctm(line.where, text)
            words.append(Line(line.where, text))
    return sorted(words, key=lambda line: _sort_key(line.text, time_field=2))


def parse_stm(line: Line, *, case_sensitive: bool = False) -> ReferenceSegment:
    """Splits an STM line into its fields as sclite does: the sixth is a label if it begins with '<'."""
    fields = line.text.lower().split(None, 5)
    text = fields[5] if len(fields) > 5 else b""
    if case_sensitive and text:
        text = line.text.split(None, 5)[5]
    label = b""
    if text.startswith(b"<"):
        label, _, text = text.replace(b"\t", b" ").partition(b" ")
        label = label.lower()
    begin, end = (float32(float(time)) for time in fields[3:5])
    return ReferenceSegment(line.where, fields[0], fields[1], fields[2], begin, end, label.strip(), text.strip())


def parse_ctm(line: Line, *, case_sensitive: bool = False) -> Slot:
    """Parses a CTM line as one word. Confidence and further fields do not affect the score."""
    file, channel, begin, duration, word = line.text.split()[:5]
    return word_slot(line.where, file, channel, float(begin), float(duration), word if case_sensitive else word.lower())


def word_slot(where: str, file: bytes, channel: bytes, begin: float, duration: float, word: bytes) -> Slot:
    """Makes a slot of a single word from `begin` for `duration` seconds."""
    return Slot(where, file.lower(), channel.lower(), begin + duration / 2.0, ((word,),))


def _check_stm(where: str, text: bytes) -> None:
    fields = text.split(None, 5)
    if len(fields) < len(STM_FIELDS):
        raise InputError(f"{where}: {len(fields)} fields; an STM line is: {' '.join(STM_FIELDS)} <labels> words")
    if any(b"<" in field for field in fields[:3]):
        raise InputError(f"{where}: '<' in the file, channel or speaker; it may only begin the label field")
    begin, end = (_number(where, fields[i], STM_FIELDS[i]) for i in (3, 4))
    if end < begin:
        raise InputError(f"{where}: the segment ends at {end:g} s, before it begins at {begin:g} s")


def check_ctm(where: str, text: bytes) -> None:
    """Raises InputError unless `text` is a CTM line that NIST's programs can read."""
    fields = text.split()
    if b"<" in text and any(field[:4].upper() == b"<ALT" for field in fields):
        raise InputError(f"{where}: <ALT...> markup does not survive NIST's sorting; write alternatives as GLM rules")
    if len(fields) < len(CTM_FIELDS):
        raise InputError(f"{where}: {len(fields)} fields; a CTM line is: {' '.join(CTM_FIELDS)} [confidence]")
    if _BRACE.search(fields[0] + fields[1]):
        raise InputError(f"{where}: a brace in the file or channel name; remove it")
    if len(text) > MAX_CTM_FIELD and max(map(len, fields)) > MAX_CTM_FIELD:
        raise InputError(f"{where}: a field of more than {MAX_CTM_FIELD} bytes; the file is damaged")
    _number(where, fields[2], CTM_FIELDS[2])
    if _number(where, fields[3], CTM_FIELDS[3]) < 0:
        raise InputError(f"{where}: negative duration {show(fields[3])}; it must be at least 0")


def _number(where: str, text: bytes, name: str) -> float:
    if not _NUMBER.fullmatch(text) or abs(float(text)) > 1e9:
        raise InputError(f"{where}: {name} '{show(text[:40])}' is not a number of seconds")
    return float(text)


def _sort_key(text: bytes, time_field: int) -> tuple[bytes, bytes, bytes, float]:
    """Sort key of hubscr.pl: the file, the *blanks* that follow it, the channel, and the time."""
    fields = text.split(None, time_field + 1)
    blanks = text[len(fields[0]) :]
    return fields[0], blanks[: len(blanks) - len(blanks.lstrip())], fields[1], float(fields[time_field])


def float32(value: float) -> float:
    """Rounds to a C float, the type in which sclite reads STM times and adds up costs."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def show(text: bytes) -> str:
    """Decodes bytes for printing."""
    return text.decode("utf-8", errors="backslashreplace")


def lower(text: str) -> str:
    """Returns text with A-Z in lower case: of other letters the NIST programs know no case."""
    return text.encode("utf-8", errors="surrogateescape").lower().decode("utf-8", errors="surrogateescape")


_LETTERS = rb"([a-z]*-)*[a-z]+"
_STM_WORD = re.compile(
    b"|".join((
        rb"ignore_time_segment_in_scoring",
        _LETTERS,
        rb"\(" + _LETTERS + rb"\)",
        rb"[a-z]+\.('s|s)*",
        rb"\([a-z]+\.('s|s)*\)",
        rb"[a-z]+-",
        rb"\([a-z]+-\)",
        _LETTERS + rb"('(d|s|t|re|ll|m|ve|))*",
        rb"\(" + _LETTERS + rb"('(d|s|t|re|ll|m|ve|))\)*",
        rb"o'\S+|d'etre",
        rb"\(%(hesitation|bcack|bcnack)\)",
        rb"%(hesitation|bcack|bcnack)",
        rb"[{}/@]",
    ))
)  # fmt: skip
_CTM_WORD = re.compile(rb"[a-z'-]+|[a-z]\..*|.*@.*|.*%(bcn?ack|hesitation).*")


def unexpected_words(segments: Iterable[ReferenceSegment], slots: Iterable[Slot]) -> Iterator[str]:
    """Yields the words that NIST's validators would reject, as "path:line: word"."""
    for segment in segments:
        for token in segment.text.split():
            if not _STM_WORD.fullmatch(token):
                yield f"{segment.where}: {show(token)}"
    for slot in slots:
        for word in (word for branch in slot.branches for word in branch):
            if not _CTM_WORD.fullmatch(word):
                yield f"{slot.where}: {show(word)}"
