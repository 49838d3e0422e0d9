"""NIST's csrfilt.sh -dh: rewrites the words of a reference or hypothesis by a GLM before alignment.

Each text is converted to upper case, gets blanks around parentheses, is rewritten by the rules, has hyphens replaced by
blanks (except at word ends, which mark fragments), and has `(a b)` split into `(a) (b)`. Each word of a CTM is filtered
alone. It is then written as the words it became, which share its time, or as the branches of `{a / b}`. Each step below
is one stage of the shell script's pipeline.
"""

from __future__ import annotations

import re
from pathlib import Path

from asr_am.errors import InputError
from asr_am.score.files import MAX_CTM_FIELD, Line, Slot, show, word_slot
from asr_am.score.glm import RuleSet, read_glm

_PREFIX = re.compile(rb"(?:\S+\s+){4}\S+(?:\s*<\S+>)?")
_HYPHEN = re.compile(rb"([^( ])-(?=[^) ])")
_OPTIONAL = re.compile(rb"(\(\s+)([^()\s][^()]*)")
_NEXT_WORD = re.compile(rb"(\S\s+)(?=\S)")
_BEFORE_CLOSE = re.compile(rb"(?<!\s)\s+\)")  # without looking behind, a long blank would be searched from each byte
_CONFIDENCE = re.compile(rb"[0-9.-]*")


class Filter:
    """csrfilt for one side of the comparison. Caches words and texts."""

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self._seen: dict[bytes, bytes] = {}

    @classmethod
    def for_reference(cls, glm: Path) -> Filter:
        return cls(read_glm(glm, ("stm", "ref")))

    @classmethod
    def for_hypothesis(cls, glm: Path) -> Filter:
        return cls(read_glm(glm, ("ctm", "hyp")))

    def text(self, where: str, text: bytes) -> bytes:
        """Filters the words of one line."""
        filtered = self._seen.get(text)
        if filtered is None:
            try:
                filtered = self._seen[text] = _filter(text, self.rules)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
        return filtered

    def stm_line(self, line: Line) -> Line:
        """Filters the words of an STM line and keeps the fields before them."""
        text = b" " + re.sub(rb"[ \t]+", b" ", line.text) + b" "
        prefix = _PREFIX.match(text, 1)
        assert prefix, "read_stm has checked the number of fields"
        return Line(line.where, text[: prefix.end()] + self.text(line.where, text[prefix.end() :]))

    def ctm_line(self, line: Line) -> list[Slot]:
        """Filters the word of a CTM line, which may vanish or become several words or alternatives."""
        fields = line.text.split()
        text = self.text(line.where, fields[4])
        # If a rule deletes the word, csrfilt takes the confidence for the word.
        fields = b" ".join([*fields[:4], *([text] if text else []), *fields[5:]]).split()
        slots = _expand(line.where, fields)
        for word in (word for slot in slots for branch in slot.branches for word in branch):
            if word.startswith(b"<alt") or len(word) > MAX_CTM_FIELD:
                raise InputError(
                    f"{line.where}: the rules turn this word into '{show(word[:40])}', "
                    "which sclite cannot read; correct the rules"
                )
        return slots


def _filter(text: bytes, rules: RuleSet) -> bytes:
    if re.search(rb"[()]", re.sub(rb"\([^()]*\)", b"", text)):
        raise InputError("parentheses are nested or not closed; write optionally deletable words as (word)")
    if not text.startswith(b";;"):
        text = text.upper()
    text = b" " + text.replace(b"(", b"( ").replace(b")", b" )") + b" \n"
    text = rules.apply(text)
    text = _HYPHEN.sub(rb"\1 ", text)
    text = _OPTIONAL.sub(lambda found: found[1] + _NEXT_WORD.sub(rb"\1) ( ", found[2]), text)  # (a b) becomes (a) (b)
    text = text.removeprefix(b" ").removesuffix(b"\n").removesuffix(b" ") + b"\n"
    text = _BEFORE_CLOSE.sub(b")", re.sub(rb"\(\s+", b"(", text))
    if not text.endswith(b"\n"):
        raise InputError("a rule leaves an open parenthesis at the end of the text")
    return text[:-1]


def _expand(where: str, fields: list[bytes]) -> list[Slot]:
    """Last step of csrfilt on a CTM line: splits the time between words and turns `a / b` into branches."""
    fields = re.sub(rb"([{}])", rb" \1 ", b" ".join(fields)).split()
    if len(fields) == 5:
        return [word_slot(where, fields[0], fields[1], float(fields[2]), float(fields[3]), fields[4].lower())]
    words = fields[4:-1] if _CONFIDENCE.fullmatch(fields[-1]) else fields[4:]
    alternatives = b" ".join(words).rstrip(b"/").split(b"/") if b" ".join(words).strip(b"/") else []
    branches = [re.sub(rb"[{}]", b"", alternative).lower().split() for alternative in alternatives]
    if not all(branches):
        raise InputError(f"{where}: an empty alternative; write @ for no word")
    begin, duration = float(fields[2]), float(fields[3])
    timed = [_share(begin, duration, branch) for branch in branches]
    file, channel = fields[0], fields[1]
    if len(timed) == 1:
        return [word_slot(where, file, channel, start, length, word) for start, length, word in timed[0]]
    if not timed:
        return []
    middle = max(0.0, *(start + length / 2.0 for branch in timed for start, length, _ in branch))
    return [Slot(where, file.lower(), channel.lower(), middle, tuple(tuple(branch) for branch in branches))]


def _share(begin: float, duration: float, words: list[bytes]) -> list[tuple[float, float, bytes]]:
    """Splits the time into equal parts, to the three decimals that csrfilt prints."""
    part = duration / len(words)
    return [(float(f"{begin + part * i:.3f}"), float(f"{part:.3f}"), word) for i, word in enumerate(words)]
