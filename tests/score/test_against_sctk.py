"""Scores random STM, CTM and GLM files with our scorer and with NIST's programs. Every segment must have equal counts.

`SCTK_CASES=5000 pytest tests/score/test_against_sctk.py` tries more of them.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.score import Counts, Score, score_files
from asr_am.score.sctk import find_sctk, score_files_sctk

CASES = int(os.environ.get("SCTK_CASES", "100"))
BATCHES = 10

WORDS = (
    b"a",
    b"b",
    b"cat",
    b"Cat",
    b"CATS",
    b"dog",
    b"uh",
    b"um",
    b"uh-huh",
    b"twenty-one",
    b"wo-",
    b"woo-",
    b"wood",
    b"-rd",
    b"-ood",
    b"it's",
    b"he'd",
    b"going",
    b"to",
    b"gonna",
    b"caf\xe9",
    b"na\xc3\xafve",
    b"\xc9t\xe9",
    b"i",
    b"is",
    b"has",
    b"b.'s",
    b"mother-in-law",
    b"x--y",
    b"-",
    b"12",
    b"0.5",
    b"had",
    b"would",
    b"%hesitation",
    b"o'clock",
    b"[noise]",
    b"d*",
    b"e;tag",
    b"f\\;g",
    b"and/or",
    b"a_b",
    b"-a-",
    b"co-op-",
)
PLAIN = (b"a", b"b", b"cat", b"dog", b"uh", b"um", b"wo-", b"wood", b"i", b"is", b"he'd", b"gonna")
TEXT_OF_RULES = (
    b"A",
    b"CAT",
    b"UH",
    b"UM",
    b"UH-HUH",
    b"IT'S",
    b"HE'D",
    b"GONNA",
    b"GOING TO",
    b"I",
    b"B.'S",
    b"CAF\xe9",
    b"DOG",
    b"is has",
    b"TWENTY-ONE",
    b"O'",
    b"12",
    b"( UH )",
    b"WO-",
    b"IGNORE_TIME_SEGMENT_IN_SCORING",
)
CONTEXTS = (
    b" / [ ] __ [ ]",
    b" / [ ] __ [ ]",
    b" / [ ] __ [ ]",
    b"",
    b" / [CAT ] __ [ ]",
    b" / __ [ ]",
    b" / [ ] __",
    b" / [ ] __ [ DOG]",
    b' / " " __ " "',
    b" / [ ] _ [ ] ;; said so",
)
FEW = (b"a", b"b", b"a", b"b-", b"@", b"@", b"c")  # many ties, and sums of 0.001
BLANKS = (b" ", b" ", b" ", b" ", b"\t", b"  ")


@dataclass
class Files:
    """Contents of the STM, the CTM and, in most cases, the GLM of one case."""

    stm: bytes
    ctm: bytes
    glm: bytes | None

    def write(self, folder: Path) -> tuple[Path, Path, Path | None]:
        stm, ctm, glm = folder / "ref.stm", folder / "hyp.ctm", folder / "rules.glm"
        stm.write_bytes(self.stm)
        ctm.write_bytes(self.ctm)
        glm.write_bytes(self.glm or b"")
        return stm, ctm, glm if self.glm is not None else None


class Generator:
    """Draws cases. The same seed draws the same case. `hard` allows more unusual tokens and blanks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hard = self.random.random() < 0.5
        self.words = WORDS if self.hard else self.random.choice((PLAIN, FEW))
        self.torn = self.random.random() < 0.1
        self.with_glm = self.random.random() < 0.7
        self.confidences = self.random.choice((0.0, 0.0, 1.0, 0.5))

    def case(self) -> Files:
        channels = self._channels()
        stm, ctm = [], []
        for file, channel in channels:
            stm_lines, ctm_lines = self._channel(file, channel)
            stm += stm_lines
            ctm += ctm_lines
        if self.random.random() < 0.5:
            self.random.shuffle(stm)
            self.random.shuffle(ctm)
        stm = self._comments() + stm
        if self.random.random() < 0.3:
            ctm.insert(self.random.randrange(len(ctm) + 1), b";; a (comment { of the CTM")
            ctm.insert(self.random.randrange(len(ctm) + 1), b"  ")
        return Files(self._join(stm), self._join(ctm), self._glm() if self.with_glm else None)

    def _join(self, lines: list[bytes]) -> bytes:
        return b"".join(line + b"\n" for line in lines)

    def _channels(self) -> list[tuple[bytes, bytes]]:
        files = self.random.sample((b"sw_1", b"sw_2", b"en_4", b"en_10", b"zz-9"), self.random.randint(1, 3))
        return [(file, channel) for file in files for channel in (b"A", b"B")[: self.random.randint(1, 2)]]

    def _comments(self) -> list[bytes]:
        lines = [b';; CATEGORY "0" "" ""', b';; LABEL "O" "Overall" "Overall"', b';; LABEL "F0" "Field" "All of it"']
        return self.random.choice(([], lines, [*lines, b"", b";; LABEL broken", b"   ;; indented"]))

    def _channel(self, file: bytes, channel: bytes) -> tuple[list[bytes], list[bytes]]:
        stm, ctm = [], []
        speaker = self.random.choice((file + b"_" + channel, b"Spkr", b"spkr2"))
        time = 0.0
        silent = self.random.random() < 0.1
        for _ in range(self.random.randint(1, 5)):
            begin = time + self.random.choice((0.0, 0.0, 1.0, 0.25))
            end = begin + self.random.choice((0.5, 1.0, 2.35, 3.7, 0.0))
            text, plain = self._text()
            label = self.random.choice((b"", b"", b"<o,f0,male>", b"<O>", b"<o,en-f>")) + b" "
            times = b"%.2f %.2f" % (begin, end)
            stm.append(self._blanks(b" ".join((file, channel, speaker, times, label + text))))
            if not silent:
                ctm += self._hypothesis(file, channel, time, end, plain)
            time = end
        return stm, ctm

    def _blanks(self, line: bytes) -> bytes:
        """Adds odd blanks, rarely after the file, because hubscr sorts by them and may tear channels apart."""
        if not self.hard:
            return line
        first, _, rest = line.partition(b" ")
        blank = self.random.choice(BLANKS) if self.torn else b" "
        return first + blank + b"".join(self.random.choice(BLANKS) if c == b" " else c for c in _bytes(rest))

    def _word(self) -> bytes:
        return self.random.choice(self.words)

    def _text(self) -> tuple[bytes, list[bytes]]:
        """Returns a reference text and one way to speak it."""
        if self.random.random() < 0.06:
            mark = self.random.choice(
                (b"IGNORE_TIME_SEGMENT_IN_SCORING", b"ignore_time_segment_in_scoring", b"xIgnoreTimeSegmentInScoring")
            )
            return mark, [self._word()]
        parts = [self._part(0) for _ in range(self.random.choice((0, 1, 2, 3, 4, 6, 9, 25)))]
        return b" ".join(part for part, _ in parts), [word for _, words in parts for word in words]

    def _part(self, depth: int) -> tuple[bytes, list[bytes]]:
        kind = self.random.random()
        if kind < 0.75 or depth > 2:
            word = self._word()
            return word, [word]
        if kind < 0.85:
            words = [self._word() for _ in range(self.random.randint(1, 1 + 2 * self.with_glm))]
            blank = self.random.choice((b"", b" ")) if self.with_glm else b""
            return b"(" + blank + b" ".join(words) + blank + b")", words if self.random.random() < 0.5 else []
        branches = [self._branch(depth) for _ in range(self.random.choice((1, 2, 2, 3)))]
        slash = self.random.choice((b" / ", b" / ", b"/"))
        return b"{ " + slash.join(text for text, _ in branches) + b" }", self.random.choice(branches)[1]

    def _branch(self, depth: int) -> tuple[bytes, list[bytes]]:
        if self.random.random() < 0.25:
            return b"@", []
        parts = [self._part(depth + 1) for _ in range(self.random.randint(1, 2))]
        return b" ".join(text for text, _ in parts), [word for _, words in parts for word in words]

    def _hypothesis(self, file: bytes, channel: bytes, begin: float, end: float, words: list[bytes]) -> list[bytes]:
        spoken = []
        for word in words:
            spoken += self.random.choice(([word], [word], [word], [word], [], [self._word()], [word, self._word()]))
        if self.random.random() < 0.1:
            spoken = []
        lines, time = [], begin
        step = (end - begin) / (len(spoken) or 1)
        for word in spoken:
            duration = self.random.choice((step, step / 2, 0.0, 0.07, 2 * step))
            word = self._hypothesis_word(word)
            line = b"%s %s %.2f %.2f %s" % (file, channel, time, duration, word)
            if self.random.random() < self.confidences:
                line += self.random.choice(
                    (
                        b" 0.93",
                        b" 1",
                        b" .5",
                        b" 0.123456",
                        b" NA" if self.hard else b" 0",
                        b" 0.5 lex" if self.hard else b" 0.1",
                    )
                )
            lines.append(self._blanks(line))
            time += step
        return lines

    def _hypothesis_word(self, word: bytes) -> bytes:
        kind = self.random.random()
        if kind < 0.05:
            return b"(" + word + b")"
        if kind < 0.07 and self.hard:
            return b"@"
        return word.upper() if kind < 0.2 else word

    def _glm(self) -> bytes:
        lines = [b";; rules", b"* name 'random'", b"* format = 'NIST1'", b"* max_nrules = '50'"]
        lines.append(b"* case_sensitive = '%s'" % self.random.choice((b"F", b"T", b"true")))
        lines.append(b"NEVERSAID => NEVER SAID / [ ] __ [ ]")
        for _ in range(self.random.randint(0, 8)):
            if self.random.random() < 0.25:
                lines.append(
                    b';; INPUT_DEPENDENT_APPLICATION = "%s"'
                    % self.random.choice((b"stm", b"ctm", b"REF", b"hyp", b"ctm|stm", b".", b""))
                )
            lines.append(self._rule())
        return self._join(lines)

    def _rule(self) -> bytes:
        source = self.random.choice(TEXT_OF_RULES)
        context = self.random.choice(CONTEXTS)
        target, needs_context = self._target()
        if needs_context and b"_" not in context:
            context = b" / [ ] __ [ ]"
        if self.random.random() < 0.3:
            source = b"[" + source + b"]"
        return source + self.random.choice((b" => ", b"   =>  ")) + target + context

    def _target(self) -> tuple[bytes, bool]:
        upper = [word.upper() for word in (self._word(), self._word(), self._word())]
        simple = [word for word in upper if b"/" not in word and b"_" not in word] or [b"X"]
        first, last = simple[0], simple[-1]
        return self.random.choice(
            (
                (first, False),
                (first + b" " + last, False),
                (b"[]", False),
                (b"(%HESITATION)", False),
                (b"%HESITATION", False),
                (b"[{%s / %s}]" % (first, last), True),
                (b"{%s %s / %s / @}" % (first, last, first), True),
                (b"[{%s/X {%s / Y Z}}]" % (first, last), True),
                (b"( %s %s )" % (first, last), False),
                (b"{ @ / %s }" % last, True),
            )
        )


def _bytes(text: bytes) -> list[bytes]:
    return [text[i : i + 1] for i in range(len(text))]


def _segments(score: Score) -> dict[str, list[Counts]]:
    """Returns the counts of each speaker's segments, because sclite lists segments by speaker."""
    segments = defaultdict(list)
    for segment in score.segments:
        segments[segment.speaker].append(segment.counts)
    return segments


@pytest.mark.skipif(find_sctk() is None, reason="NIST's sctk is not installed (Debian: apt-get install sctk)")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_files_score_as_with_sctk(batch: int, tmp_path: Path) -> None:
    compared = 0
    for seed in range(batch, CASES, BATCHES):
        stm, ctm, glm = Generator(seed).case().write(tmp_path)
        try:
            ours = score_files(stm, ctm, glm)
        except InputError as error:
            with pytest.raises(InputError):  # sclite crashes on these files
                score_files_sctk(stm, ctm, glm)
            assert str(tmp_path) in str(error)
            continue
        theirs = score_files_sctk(stm, ctm, glm)
        assert _segments(ours) == _segments(theirs), f"seed {seed}"
        assert {name: ours.subset(name) for name in ours.subsets} == {
            name: theirs.subset(name) for name in theirs.subsets
        }, f"seed {seed}"
        compared += 1
    assert compared > CASES / BATCHES / 2
