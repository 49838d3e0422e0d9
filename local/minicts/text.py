"""Generates sentences from the grammar of topics (grammar.txt), made spontaneous by the speaker's style."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from asr_am.errors import InputError

GRAMMAR = Path(__file__).with_name("grammar.txt")
COMMON = "common"
FILLERS = ("UH", "UH", "UM")
LAUGHTER, NOISE = "[LAUGHTER]", "[NOISE]"
VOCAL_NOISES = (LAUGHTER, NOISE)
UNKNOWN = "<unk>"  # stands for a fragment in transcripts

_REFERENCE = re.compile(r"\$([a-z0-9]+(?:\.[a-z]+)?)")
_ONSET = re.compile(r"[^AEIOUY']*[AEIOU]+")  # letters spoken when cut off after the first vowel

Rules = dict[str, list[tuple[str, ...]]]


@dataclass(frozen=True)
class Token:
    """A word of the verbatim transcript. A fragment ("WEA-") has the word that it began in `cut_from`."""

    word: str
    cut_from: str = ""


@dataclass(frozen=True)
class Style:
    """Spontaneity of a speaker: probabilities per word, and of a vocal noise per utterance."""

    filler: float
    repeat: float
    fragment: float
    vocal_noise: float


class Grammar:
    """Sections of rules. Raises InputError for a rule that is used but not defined."""

    def __init__(self, path: Path = GRAMMAR) -> None:
        self.sections = _parse(path)
        self.topics = sorted(section for section in self.sections if section != COMMON)
        for section, rules in self.sections.items():
            names = {match[1] for token in _tokens(rules) if (match := _REFERENCE.fullmatch(token))}
            for topic in [section] if section != COMMON else self.topics:
                missing = names - self.sections[topic].keys() - self.sections[COMMON].keys()
                if missing:
                    raise InputError(f"{path}: [{topic}] lacks the rules {sorted(missing)}; add them")

    def expand(self, rule: str, topic: str, rng: np.random.Generator) -> list[str]:
        """Returns the words (upper case) of one random expansion of `rule` under `topic`."""
        options = self.sections[topic].get(rule) or self.sections[COMMON][rule]
        words: list[str] = []
        for token in options[rng.integers(len(options))]:
            reference = _REFERENCE.fullmatch(token)
            words += self.expand(reference[1], topic, rng) if reference else [token.upper()]
        return words

    def vocabulary(self) -> list[str]:
        """Returns all words of the grammar, sorted, with hesitations."""
        tokens = {token for rules in self.sections.values() for token in _tokens(rules)}
        return sorted({token.upper() for token in tokens if not _REFERENCE.fullmatch(token)} | set(FILLERS))


@cache
def grammar() -> Grammar:
    return Grammar()


def _tokens(rules: Rules) -> Iterator[str]:
    """Returns words and $references on the right-hand sides."""
    return (token for options in rules.values() for option in options for token in option)


def _parse(path: Path) -> dict[str, Rules]:
    sections: dict[str, Rules] = {}
    rules: Rules = {}
    name = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            rules = sections.setdefault(line.strip("[]"), {})
            continue
        if line.startswith("|"):
            line = line[1:]
        elif ":" in line:
            name, line = line.split(":", 1)
        else:
            raise InputError(f"{path}:{number}: neither a section, a rule nor a continuation")
        for option in line.split("|"):
            match = re.fullmatch(r"(?:(\d+)\*)?(.+)", option.strip())
            if not match:
                raise InputError(f"{path}:{number}: an alternative is empty; remove the | or write it")
            rules.setdefault(name, []).extend([tuple(match[2].split())] * int(match[1] or 1))
    return sections


def spontaneous(words: list[str], style: Style, rng: np.random.Generator) -> list[Token]:
    """Adds the hesitations, repetitions, fragments and vocal noises of `style` to `words`."""
    tokens: list[Token] = []
    for word in words:
        if rng.random() < style.filler:
            tokens.append(Token(FILLERS[rng.integers(len(FILLERS))]))
        onset = _ONSET.match(word)
        if onset and len(word) >= len(onset[0]) + 2 and rng.random() < style.fragment:
            tokens.append(Token(f"{onset[0]}-", cut_from=word))
        if len(word) <= 4 and rng.random() < 2 * style.repeat:  # short words are repeated, long ones cut off
            tokens.append(Token(word))
        tokens.append(Token(word))
    if rng.random() < style.vocal_noise:
        noise = Token(VOCAL_NOISES[rng.integers(len(VOCAL_NOISES))])
        tokens.insert(0 if rng.random() < 0.5 else len(tokens), noise)
    return tokens


def transcript(tokens: list[Token]) -> str:
    """Returns the training transcript. Fragments are the unknown word."""
    return " ".join(UNKNOWN if token.cut_from else token.word for token in tokens)


def reference(tokens: list[Token]) -> str:
    """Returns the text for an STM. Hesitations are optional, vocal noises are left out."""
    words = [token.word for token in tokens if token.word not in VOCAL_NOISES]
    return " ".join("(%HESITATION)" if word in FILLERS else word for word in words)
