"""Global mapping rules (GLM), read and applied as NIST's rfilter1 does.

    ;; comment                               the first token of the first line is the comment mark
    * max_nrules = '2500'                    settings: format, max_nrules, case_sensitive, copy_no_hit
    ;; INPUT_DEPENDENT_APPLICATION = "ctm"   restricts what follows to matching inputs (stm|ctm or ref|hyp)
    UH      => %HESITATION / [ ] __ [ ]      source => target / left context __ right context
    [HE'D]  => [{HE HAD / HE WOULD}] / [ ] __ [ ]

Rules rewrite in one pass from left to right. At each character the first rule in file order that matches wins.
Contexts are matched against the input, and output is not rewritten again. The parser follows rfilter1/include/grules2.c
of SCTK character by character, because existing GLM files depend on its quirks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.errors import InputError
from asr_am.score.files import Line, read_lines, show

MAX_LINE = 131  # rfilter1 reads a GLM line into a buffer of 132 bytes
MAX_TEXT = 99_998  # and a line to filter into one of 100,000

_SECTION = re.compile(rb';;\s+INPUT_DEPENDENT_APPLICATION\s*=\s*"([^"]*)"')
_BLANK = frozenset(b" \t\n\v\f\r")


@dataclass(frozen=True, slots=True)
class Rule:
    """Rewrites `source` as `target` between the contexts `left` and `right`."""

    source: bytes
    target: bytes
    left: bytes
    right: bytes

    def matches(self, text: bytes, position: int) -> bool:
        before = position - len(self.left)
        return (
            text.startswith(self.source, position)
            and before >= 0
            and text.startswith(self.left, before)
            and text.startswith(self.right, position + len(self.source))
        )


@dataclass
class RuleSet:
    """Rules of a GLM that apply to one kind of input."""

    rules: list[Rule]
    case_sensitive: bool
    _by_start: dict[bytes, list[Rule]] = field(default_factory=dict)

    def apply(self, text: bytes) -> bytes:
        """Rewrites one line. Raises InputError if it would overflow rfilter1's buffers."""
        if len(text) > MAX_TEXT:
            raise InputError(f"a text of {len(text)} bytes; the limit is {MAX_TEXT}, so split the segment")
        folded = text if self.case_sensitive else text.lower()
        output, position, copied = [], 0, 0
        while position < len(text):
            rule = next(
                (r for r in self._starting(folded[position : position + 2]) if r.matches(folded, position)), None
            )
            if rule is None:
                position += 1
                continue
            output += [text[copied:position], rule.target]
            position = copied = position + len(rule.source)
        result = b"".join([*output, text[copied:]])
        if len(result) > MAX_TEXT:
            raise InputError(f"the rules make a text of {len(result)} bytes; the limit is {MAX_TEXT}")
        return result

    def _starting(self, start: bytes) -> list[Rule]:
        """Returns the rules whose source can begin with these two bytes, in file order."""
        found = self._by_start.get(start)
        if found is None:
            found = [rule for rule in self.rules if rule.source and start.startswith(rule.source[:2])]
            self._by_start[start] = found
        return found


def read_glm(path: Path, inputs: tuple[str, str]) -> RuleSet:
    """Reads the rules of `path` for `inputs`, ("stm", "ref") or ("ctm", "hyp").

    Raises:
        InputError: the file would make rfilter1 stop, after which csrfilt loses all text.
    """
    pieces = list(_pieces(_select(read_lines(path), inputs)))
    if not pieces:
        raise InputError(f"{path}: no rules for {'/'.join(inputs)}; omit the GLM to score without rules")
    mark = _comment_mark(pieces[0][0].text)
    settings = _Settings()
    rules: list[Rule] = []
    room = 0  # rfilter1 allocates the table at the first rule
    for line, whole in pieces[1:]:
        text = line.text.rstrip()
        if not text or (mark and text.startswith(mark)):
            continue
        if not whole:
            raise InputError(f"{line.where}: longer than {MAX_LINE} bytes; wrap the comment or shorten the rule")
        if text.startswith(b"*"):
            settings.read(line.where, text)
            continue
        room = room or settings.max_nrules
        rules.append(_parse_rule(line.where, text.split(mark)[0] if mark else text))
        settings.check(line.where)
        if len(rules) >= min(room, settings.max_nrules):
            limit = min(room, settings.max_nrules)
            raise InputError(f"{line.where}: {limit} rules or more; put * max_nrules = '{2 * limit}' before the rules")
    if not rules:
        raise InputError(f"{path}: no rules for {'/'.join(inputs)}; omit the GLM to score without rules")
    settings.check(str(path))
    if not settings.case_sensitive:
        rules = [Rule(r.source.lower(), r.target, r.left.lower(), r.right.lower()) for r in rules]
    return RuleSet(rules, settings.case_sensitive)


@dataclass
class _Settings:
    """Settings from lines that begin with '*'. Keywords are found anywhere in the line, even in the value."""

    max_nrules: int = 400
    case_sensitive: bool = True
    copy_no_hit: bool = True
    format: bytes = b"NIST1"

    def read(self, where: str, text: bytes) -> None:
        quoted = re.search(rb"[\"']([^\"']*)", text)
        if not quoted:
            raise InputError(f"{where}: the setting has no quoted value; write * name = 'value'")
        value, keys = quoted[1], text.upper()
        if b"FORMAT" in keys:
            self.format = value
        if b"MAX_NRULES" in keys:
            number = re.match(rb"\s*[+-]?\d{1,7}", value)
            self.max_nrules = int(number[0]) if number else 0
        if b"COPY_NO_HIT" in keys:
            self.copy_no_hit = value.upper() in (b"T", b"YES", b"TRUE")
        if b"CASE_SENSITIVE" in keys:
            self.case_sensitive = value.upper() in (b"T", b"YES", b"TRUE")

    def check(self, where: str) -> None:
        if self.format != b"NIST1":
            raise InputError(f"{where}: rule format '{show(self.format)}'; only NIST1 is supported")
        if not self.copy_no_hit:
            raise InputError(f"{where}: copy_no_hit is not 'T'; it would delete all text that no rule matches")


def _select(lines: list[Line], inputs: tuple[str, str]) -> Iterator[Line]:
    """Returns the lines outside sections and those of the sections whose expression matches, as csrfilt does."""
    applies = True
    for line in lines:
        if section := _SECTION.match(line.text):
            expression = section[1].lower().decode("latin-1")
            try:
                applies = bool(expression) and any(re.search(expression, name) for name in inputs)
            except (re.error, OverflowError, RecursionError) as error:
                raise InputError(f"{line.where}: '{expression}' is not a regular expression ({error})") from None
        if applies:
            yield line


def _pieces(lines: Iterator[Line]) -> Iterator[tuple[Line, bool]]:
    """Splits lines as rfilter1's fgets does, and marks the pieces that begin a line."""
    for line in lines:
        for start in range(0, max(1, len(line.text)), MAX_LINE):
            yield Line(line.where, line.text[start : start + MAX_LINE]), start == 0


def _comment_mark(text: bytes) -> bytes:
    match = re.match(rb"[!-~]*", text)
    return match[0] if match else b""


def _parse_rule(where: str, line: bytes) -> Rule:
    """Parses `source => target / left __ right`. The context begins at the last slash outside brackets."""
    line = line.rstrip()
    arrow = line.find(b"=>")
    if arrow < 0:
        raise InputError(f"{where}: no '=>' in rule '{show(line)}'")
    slash, slot = line.rfind(b"/"), -1
    if slash >= 0:
        if line.find(b"]", slash) < line.find(b"[", slash):
            slash = -1
        else:
            slot = line.find(b"_", slash)
    source = _unbracket(line[:arrow].strip())
    target_end = len(line) - 1 if slash < 0 else _skip_back(line, slash - 1, arrow)
    target = _after_marker(line, arrow, target_end)
    left = right = b""
    if slash >= 0 and slot >= 0:
        left = _after_marker(line, slash, _skip_back(line, slot - 1, slash))
        right = _after_marker(line, slot, len(line) - 1)
    if re.search(rb"\{[^}]*\[[^]{}]* [^]{}]*\]", target):
        raise InputError(f"{where}: brackets inside braces would become part of the words; write [{{a b / c d}}]")
    return Rule(source, target, left, right)


def _skip_back(line: bytes, end: int, stop: int) -> int:
    while end > stop and line[end] in _BLANK:
        end -= 1
    return end


def _after_marker(line: bytes, start: int, end: int) -> bytes:
    """Returns the field between the first blank after the marker at `start` and the byte at `end`."""
    while start < end and line[start] not in _BLANK:
        start += 1
    if start >= end:
        return b""
    return _unbracket(line[start : end + 1].lstrip())


def _unbracket(text: bytes) -> bytes:
    if text[:1] + text[-1:] in (b"[]", b'""'):
        return text[1:-1]
    return text
