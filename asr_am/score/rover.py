"""Combines the words of several systems as NIST's ROVER does: `python -m asr_am.score.rover --ctm A B C --out OUT`.

Fiscus, "A post-processing system to yield reduced word error rates: recognizer output voting error reduction (ROVER)"
(1997). The words of each channel are cut at silences that all systems share. Within a piece the systems are aligned one
after the other with a row of slots, which begins as the words of the first system. A slot has one vote of each system:
a word, or none. In each slot the word with the highest score wins,

    score(w) = alpha N(w) / N + (1 - alpha) C(w),

where N(w) of N systems vote for w, and C(w) is the average or the maximum of their confidences. A missing word has a
given confidence. Of equal scores the earlier system's word wins.

Cuts, costs of the alignment, ties and float32 arithmetic are those of Debian's `sctk rover`, which the tests compare.

Shapes: V votes of all slots, B words of a system in a piece.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from asr_am.compiled import compiled
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.score.cli import CommandLineParser, check_out, exit_code
from asr_am.score.files import CTM_FIELDS, read_ctm, show

SILENCE = 1.0  # seconds of the first system's silences at which the others may be cut
FOREVER = 9999999.9  # end of the silence after the last word, as NIST's program has it
SUB, DEL, INS = 0, 1, 2


@dataclass(frozen=True)
class Vote:
    """A word of a system, or none where its text is None.

    Attributes:
        text: the word as the file has it.
        begin, end: times in seconds.
        confidence: from the file. A word without one has 0, and -1 if the file has none.
    """

    text: bytes | None
    begin: float
    end: float
    confidence: float

    @property
    def key(self) -> bytes | None:
        """What votes are compared by."""
        return None if self.text is None else self.text.lower()


@dataclass(frozen=True)
class Voting:
    """How the words of a slot are chosen.

    Attributes:
        alpha: weight of frequency against confidence, from 0 to 1.
        missing: confidence of a missing word.
        method: whether confidences of equal words are averaged or the highest counts.
    """

    alpha: float = 1.0
    missing: float = 0.0
    method: Literal["average", "maximum"] = "average"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"--alpha {self.alpha:g}: must be from 0 to 1")

    def winner(self, slot: Sequence[Vote]) -> Vote:
        """Returns the word that wins, with the mean times and the mean confidence of its votes."""
        groups: dict[bytes | None, list[Vote]] = {}
        for vote in slot:
            groups.setdefault(vote.key, []).append(vote)

        def score(votes: list[Vote]) -> float:
            confidences = [vote.confidence for vote in votes]
            value = max(0.0, *confidences) if self.method == "maximum" else sum(confidences) / len(votes)
            return self.alpha * (len(votes) / len(slot)) + (1.0 - self.alpha) * value

        votes = max(groups.values(), key=score)
        count = len(votes)
        begin, end = (sum(getattr(vote, name) for vote in votes) for name in ("begin", "end"))
        mean = sum(vote.confidence for vote in votes) / count
        return Vote(votes[0].text, begin / count, begin / count + (end - begin) / count, mean)


Channel = tuple[bytes, bytes]  # file and channel


def rover(ctms: Sequence[Path], out: Path, voting: Voting) -> None:
    """Writes the combination of several systems' words as a CTM file.

    Raises:
        InputError: fewer than two systems, or a file that is missing or damaged.
    """
    if len(ctms) < 2:
        raise InputError("rover: give the CTM files of two systems or more")
    systems = [_read(path) for path in ctms]
    lines = []
    for file, channel in sorted(set().union(*systems)):
        for slot in align_channel([system.get((file, channel), []) for system in systems], voting.missing):
            word = voting.winner(slot)
            if word.text is not None:
                times = f"{word.begin:.3f} {word.end - word.begin:.3f}"
                lines.append(f"{show(file)} {show(channel)} {times} {show(word.text)} {word.confidence:.6f}")
    write_lines(out, lines)


def _read(path: Path) -> dict[Channel, list[Vote]]:
    """Returns the words of a CTM file by file and channel."""
    rows = [(line.where, line.text.split()) for line in read_ctm(path)]
    unknown = 0.0 if any(len(fields) > len(CTM_FIELDS) for _, fields in rows) else -1.0
    votes: dict[Channel, list[Vote]] = {}
    for where, (file, channel, begin, duration, word, *rest) in rows:
        try:
            confidence = float(np.float32(rest[0])) if rest else unknown
        except ValueError:
            confidence = math.nan
        if not math.isfinite(confidence):
            raise InputError(f"{where}: confidence {show(rest[0])!r} is not a number")
        start = float(begin)
        votes.setdefault((file, channel), []).append(Vote(word, start, start + float(duration), confidence))
    return votes


def align_channel(systems: Sequence[Sequence[Vote]], missing: float) -> Iterator[list[Vote]]:
    """Yields the slots of a channel, each with one vote of every system, whose words are in order of time."""
    nothing = Vote(None, 0.0, 0.0, missing)
    for piece in _pieces(systems):
        slots = [[vote] for vote in piece[0]]
        for number, words in enumerate(piece[1:], start=1):
            slots = _add_system(slots, words, number, nothing)
        yield from slots


def _pieces(systems: Sequence[Sequence[Vote]]) -> Iterator[list[Sequence[Vote]]]:
    """Cuts a channel at silences of the first system that overlap a silence of every other one."""
    first = [0] * len(systems)
    while any(begin < len(words) for begin, words in zip(first, systems, strict=True)):
        ends = _next_cut(systems, first)
        yield [words[begin:end] for words, begin, end in zip(systems, first, ends, strict=True)]
        first = ends


def _next_cut(systems: Sequence[Sequence[Vote]], first: Sequence[int]) -> list[int]:
    """Returns for each system the number of words before the next cut."""
    for end in range(first[0] + 1, len(systems[0]) + 1):
        silence = _silence(systems[0], end)
        if silence[1] <= silence[0] + SILENCE:
            continue
        ends = [end]
        for words, begin in zip(systems[1:], first[1:], strict=True):
            if begin == len(words):
                ends.append(begin)
                continue
            for after in range(begin + 1, len(words) + 1):
                low, high = _silence(words, after)
                if min(high, silence[1]) - max(low, silence[0]) > 0:
                    silence = max(low, silence[0]), min(high, silence[1])
                    ends.append(after)
                    break
            else:
                break
        if len(ends) == len(systems):
            return ends
    return [len(words) for words in systems]


def _silence(words: Sequence[Vote], after: int) -> tuple[float, float]:
    """Returns the time between word `after` - 1 and the next one."""
    return words[after - 1].end, words[after].begin if after < len(words) else FOREVER


def _add_system(slots: list[list[Vote]], words: Sequence[Vote], number: int, nothing: Vote) -> list[list[Vote]]:
    """Returns the slots of `number` systems with the votes of another one, and new slots for words that have none."""
    numbers: dict[bytes | None, int] = {None: 0}
    votes = [vote for slot in slots for vote in slot]
    word_V, word_B = (
        np.array([numbers.setdefault(vote.key, len(numbers)) for vote in side], dtype=np.int64)
        for side in (votes, words)
    )
    slot_V = np.repeat(np.arange(len(slots)), [len(slot) for slot in slots]).astype(np.int64)
    result = []
    position, taken = len(slots), len(words)
    for edit in _best_edits(word_V, slot_V, word_B):
        if edit == INS:
            taken -= 1
            result.append([words[taken], *[nothing] * number])
            continue
        position -= 1
        if edit == SUB:
            taken -= 1
        result.append([*slots[position], words[taken] if edit == SUB else nothing])
    return result[::-1]


@compiled
def _best_edits(word_V: np.ndarray, slot_V: np.ndarray, word_B: np.ndarray) -> np.ndarray:
    """Returns the edits of the best alignment, the last one first.

    Every vote of a slot has costs of its own: a word inserted after it stays with it. Number 0 is no word.
    """
    num_votes, num_words = len(word_V), len(word_B)
    cost = np.zeros((num_votes + 1, num_words + 1), np.float32)  # row 0 is before the first slot
    edit, back = np.full(cost.shape, INS), np.zeros(cost.shape, np.int64)
    insertion = np.float32(3.0)
    for b in range(1, num_words + 1):
        cost[0, b] = cost[0, b - 1] + insertion
    begin, end = 0, 1  # rows of the slot before
    for v in range(1, num_votes + 1):
        if v > 1 and slot_V[v - 1] != slot_V[v - 2]:
            begin, end = end, v
        deletion = np.float32(0.001) if word_V[v - 1] == 0 else np.float32(3.0)
        for b in range(num_words + 1):
            best = begin
            for row in range(begin, end):
                if cost[row, b] < cost[best, b]:
                    best = row
            delete = cost[best, b] + deletion
            cost[v, b], edit[v, b], back[v, b] = delete, DEL, best
            if b == 0:
                continue
            best = begin
            for row in range(begin, end):
                if cost[row, b - 1] < cost[best, b - 1]:
                    best = row
            change = np.float32(4.0)
            if word_V[v - 1] == word_B[b - 1]:
                change = np.float32(0.0)
            elif word_V[v - 1] == 0:
                change = np.float32(1.0)
            substitute, insert = cost[best, b - 1] + change, cost[v, b - 1] + insertion
            if substitute <= delete and substitute <= insert:
                cost[v, b], edit[v, b], back[v, b] = substitute, SUB, best
            elif not delete < insert:
                cost[v, b], edit[v, b], back[v, b] = insert, INS, v
    v, b = begin, num_words
    if num_votes:
        begin, end = end, num_votes + 1
        v = begin
        for row in range(begin, end):
            if cost[row, b] < cost[v, b]:
                v = row
    edits = np.empty(num_votes + num_words, np.int64)
    count = 0
    while v > 0 or b > 0:
        edits[count] = edit[v, b]
        v, b, count = back[v, b], b - (edit[v, b] != DEL), count + 1
    return edits[:count]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 1 after one line on stderr about bad input."""
    parser = CommandLineParser(prog="python -m asr_am.score.rover", description=__doc__)
    parser.add_argument(
        "--ctm", type=Path, nargs="+", required=True, help="the systems, best first: the others are aligned with it"
    )
    parser.add_argument("--out", type=Path, required=True, help="CTM file to write")
    parser.add_argument("--alpha", type=float, default=1.0, help="weight of frequency against confidence (default: 1)")
    parser.add_argument("--missing", type=float, default=0.0, help="confidence of a missing word (default: 0)")
    parser.add_argument(
        "--method", choices=("average", "maximum"), default="average", help="of equal words' confidences"
    )

    def work() -> None:
        options = parser.parse_args(arguments)
        check_out(options.out, options.ctm)
        rover(options.ctm, options.out, Voting(options.alpha, options.missing, options.method))

    return exit_code("asr_am.score.rover", work)


if __name__ == "__main__":
    sys.exit(main())
