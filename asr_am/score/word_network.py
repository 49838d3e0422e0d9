"""Words and word networks, built from a reference text or from hypothesis slots as sclite does.

A network is a list of arcs with one word each, and for every arc its possible predecessors. Predecessors are ordered as
the branches are written, because that order breaks ties. Arc 0 is the empty start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from asr_am.errors import InputError
from asr_am.score.files import Slot, show

MAX_TOKEN = 9_999  # sclite copies a word or an alternation into 10,000 bytes
MAX_DEPTH = 100

_WORD = re.compile(rb"\S+")
_BRACE = re.compile(rb"[{}]")


@dataclass(frozen=True, slots=True)
class NetworkWord:
    """A word. sclite prints `value` and compares `text`, which lacks the parentheses of `(optional)`."""

    value: bytes
    text: bytes
    optional: bool
    fragment: bool

    @property
    def null(self) -> bool:
        return self.value == b"@"

    def __str__(self) -> str:
        return show(self.value)


@dataclass
class Network:
    """Word network.

    Attributes:
        words: word on each arc, None on arc 0.
        before: predecessors of each arc.
        last: arcs that end the network.
        linear: True if there are no branches and no `@`.
    """

    words: list[NetworkWord | None] = field(default_factory=lambda: [None])
    before: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    last: tuple[int, ...] = (0,)
    linear: bool = True

    def add(self, word: NetworkWord, before: tuple[int, ...]) -> tuple[int]:
        self.words.append(word)
        self.before.append(before)
        self.linear = self.linear and before == (len(self.words) - 2,) and not word.null
        return (len(self.words) - 1,)


@lru_cache(maxsize=100_000)
def make_word(token: bytes) -> NetworkWord:
    """Parses a token as sclite does: drops text after a semicolon, backslashes, and one final '*'."""
    if not token.startswith(b"{"):
        token = _before_semicolon(token).replace(b"\\", b"")
    if len(token) > 1 and token.endswith(b"*"):
        token = token[:-1]
    optional = token.startswith(b"(") and token.endswith(b")")
    fragment = token.startswith(b"-") or token.endswith(b"-") or (optional and token[-2:-1] == b"-")
    return NetworkWord(token, token[1:-1] if optional else token, optional, fragment)


def is_plain_word(word: str) -> bool:
    """Returns True if sclite compares `word` as it is written: it is no markup and loses no character."""
    token = word.encode()
    return make_word(token).text == token and token != b"@" and _BRACE.search(token) is None


def _before_semicolon(token: bytes) -> bytes:
    position = token.find(b";")
    while position > 0 and token[position - 1 : position] == b"\\":
        position = token.find(b";", position + 1)
    return token if position < 0 else token[:position]


def reference_network(text: bytes) -> Network:
    """Builds the network of an STM text with its alternations `{ a b / c / @ }`, which may be nested.

    Raises:
        InputError: sclite would crash or drop words (unclosed braces, braces inside words, an empty alternation).
    """
    network = Network()
    if b"{" not in text:
        for token in text.split():
            network.last = network.add(make_word(_checked(token)), network.last)
        return network
    network.last = _append(network, text, network.last, depth=0)
    network.linear = False
    return network


def hypothesis_network(slots: Iterable[Slot]) -> Network:
    """Builds the network of consecutive CTM slots."""
    network = Network()
    for slot in slots:
        ends: tuple[int, ...] = ()
        for branch in slot.branches:
            end = network.last
            for token in branch:
                end = network.add(make_word(token), end)
            ends += end
        network.last = ends
        network.linear = network.linear and len(slot.branches) == 1
    return network


def _append(network: Network, text: bytes, before: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Adds the words of `text` after the arcs `before` and returns the arcs that end it."""
    if depth > MAX_DEPTH:
        raise InputError(f"alternations nested more than {MAX_DEPTH} deep; simplify them")
    for token in _tokens(text):
        if token.startswith(b"{"):
            ends: tuple[int, ...] = ()
            for branch in _branches(token):
                ends += _append(network, branch, before, depth + 1)
            before = ends
        else:
            before = network.add(make_word(token), before)
    return before


def _tokens(text: bytes) -> Iterator[bytes]:
    """Yields words and alternations, the latter from '{' to the matching '}'."""
    position = 0
    while match := _WORD.search(text, position):
        position = match.start()
        end = _closing_brace(text, position) if match[0].startswith(b"{") else match.end()
        token = _checked(text[position:end])
        if b"{" in token and not token.startswith(b"{"):
            raise InputError(f"'{show(token)}' has a brace inside a word; put blanks around alternations")
        yield token
        position = end


def _closing_brace(text: bytes, start: int) -> int:
    """Returns the position after the alternation that begins at `start`."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += 1 if match[0] == b"{" else -1
        if depth == 0:
            return match.end()
    raise InputError(
        f"'{show(text[start : start + 60])}' has no closing brace; a GLM rule with alternatives needs a context"
    )


def _branches(alternation: bytes) -> list[bytes]:
    """Splits `{ a / b }` at slashes outside inner braces and ignores empty branches."""
    branches, depth, start = [], 0, 1
    for position, char in enumerate(alternation[:-1]):
        depth += (char == 0x7B) - (char == 0x7D)
        if char == 0x2F and depth == 1:
            branches.append(alternation[start:position])
            start = position + 1
    branches.append(alternation[start:-1])
    branches = [branch for branch in branches if branch.strip()]
    if not branches:
        raise InputError(f"'{show(alternation)}' has no alternative; write @ for no word")
    return branches


def _checked(token: bytes) -> bytes:
    if len(token) > MAX_TOKEN:
        raise InputError(f"'{show(token[:40])}...' is longer than {MAX_TOKEN} bytes")
    return token
