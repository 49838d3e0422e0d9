"""Reads AN4's text files: lists of utterances, transcripts, dictionary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asr_am.errors import InputError

VARIANT = re.compile(r"\(\d+\)$")  # suffix of a dictionary word: A(2)
TRANSCRIPT = re.compile(r"^(?P<words>.*?)\s*\((?P<name>[^()\s]+)\)$")
SENTENCE_MARKS = ("<s>", "</s>")


@dataclass(frozen=True)
class Utterance:
    """One recording of the corpus. `audio` is its path in the distribution, `name` the id of the corpus."""

    name: str
    speaker: str
    audio: str
    text: str

    @property
    def id(self) -> str:
        """Utterance id. It begins with the speaker, so that sorting by id sorts by speaker."""
        return f"{self.speaker}-{self.name}"


def read_utterances(etc: Mapping[str, bytes], part: str) -> list[Utterance]:
    """Returns the utterances of `part` ("train", "test") from its list of files and its transcripts.

    Raises:
        InputError: the two name different utterances.
    """
    list_file, transcript_file = f"etc/an4_{part}.fileids", f"etc/an4_{part}.transcription"
    texts = _read_transcripts(etc, transcript_file)
    utterances = []
    for number, entry in _numbered_lines(etc, list_file):
        fields = entry.split("/")
        if len(fields) != 3:
            raise InputError(
                f"{list_file}:{number}: '{entry}' is not <part>/<speaker>/<utterance>; download the corpus again"
            )
        _, speaker, name = fields
        if name not in texts:
            raise InputError(
                f"{transcript_file}: no transcript for '{name}' ({list_file}:{number}); download the corpus again"
            )
        utterances.append(Utterance(name, speaker, f"wav/{entry}.raw", texts.pop(name)))
    if texts:
        raise InputError(
            f"{list_file}: does not list '{next(iter(texts))}' of {transcript_file}; download the corpus again"
        )
    return utterances


def read_lexicon(etc: Mapping[str, bytes]) -> list[str]:
    """Returns the lines of lexicon.txt, `WORD PHONE PHONE ...`, with `WORD(2)` as another line of WORD."""
    lines = []
    for number, line in _numbered_lines(etc, "etc/an4.dic"):
        word, *phones = line.split()
        if not phones:
            raise InputError(f"etc/an4.dic:{number}: '{word}' has no pronunciation; download the corpus again")
        lines.append(" ".join([VARIANT.sub("", word), *phones]))
    return sorted(set(lines))


def text_file(etc: Mapping[str, bytes], name: str) -> str:
    """Returns the contents of one file of `etc`. Raises InputError if it is missing or not UTF-8."""
    if name not in etc:
        raise InputError(f"{name}: missing from the corpus; download it again")
    try:
        return etc[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text ({error}); download the corpus again") from error


def _numbered_lines(etc: Mapping[str, bytes], name: str) -> Iterator[tuple[int, str]]:
    """Yields the stripped lines of a file that are not blank, with their numbers from 1."""
    for number, line in enumerate(text_file(etc, name).split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _read_transcripts(etc: Mapping[str, bytes], name: str) -> dict[str, str]:
    """Returns upper-case words by utterance name, from lines `<s> YES </s> (an251-fash-b)`."""
    texts: dict[str, str] = {}
    for number, line in _numbered_lines(etc, name):
        match = TRANSCRIPT.match(line)
        words = [word.upper() for word in match["words"].split() if word not in SENTENCE_MARKS] if match else []
        if match is None or not words:
            raise InputError(f"{name}:{number}: '{line}' is not `words (utterance)`; download the corpus again")
        if match["name"] in texts:
            raise InputError(f"{name}:{number}: a second transcript for '{match['name']}'; download the corpus again")
        texts[match["name"]] = " ".join(words)
    return texts
