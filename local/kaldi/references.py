"""Writes the NIST reference of a set: the user's STM with the names of our recordings, or one from the transcripts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from intervaltree import IntervalTree
from lhotse import SupervisionSegment

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.kaldi_dir import channel_number, read_kaldi_dir
from asr_am.data.stm import CHANNELS, channel_letter, is_comment, write_reco2file_and_channel, write_stm
from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.errors import InputError
from asr_am.score.word_network import is_plain_word
from local.kaldi.lexicon import Lexicon
from local.kaldi.scorable import MARKUP
from local.kaldi.sets import CorpusSet
from local.kaldi.words import Spelling, clean

IGNORED = "ignore_time_segment_in_scoring"
MAX_DROPPED = 0.05  # largest share of the user's references without an utterance


def write_references(out: Path, corpus: CorpusSet, stm: Path | None, lexicon: Lexicon, issues: IssueCounter) -> None:
    """Writes out/ref.stm and out/reco2file_and_channel. `stm` is the user's own reference of this set."""
    if stm is not None:
        write_lines(out / "ref.stm", _translated(stm, corpus, Spelling(lexicon.vocabulary), issues))
    else:
        write_stm(out / "ref.stm", [_spoken(u, lexicon, corpus.folder) for u in corpus.utterances], label=_label)
    write_reco2file_and_channel(out / "reco2file_and_channel", corpus.utterances)


def _label(utterance: SupervisionSegment) -> str:
    return f"O,{utterance.gender}" if utterance.gender else "O"


def _spoken(utterance: SupervisionSegment, lexicon: Lexicon, folder: Path) -> SupervisionSegment:
    """Returns the utterance without noises, which are not scored on either side."""
    text = lexicon.scored(utterance.text or "")
    if markup := [word for word in text.split() if not is_plain_word(word)]:
        raise InputError(
            f"{folder / 'text'}: utterance {utterance.id}: {markup[0]} is not a word in NIST's references, {MARKUP}; "
            "rename it here and in the lexicon, or give an stm"
        )
    return replace(utterance, text=text)


def _translated(stm: Path, corpus: CorpusSet, spelling: Spelling, issues: IssueCounter) -> list[str]:
    """Returns the lines of `stm` under the names and channels of our recordings, sorted, comments first.

    Words of the lexicon get its spelling, because NIST's programs compare bytes and fold the case of A-Z only.

    Raises:
        InputError: an utterance has no reference, a line is malformed, two are of the same time, or too many references
            have no utterance.
    """
    names = _names(corpus)
    spans: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for u in corpus.utterances:
        spans.setdefault((u.recording_id, channel_letter(u)), []).append((u.start, u.end, u.id))
    times = {side: IntervalTree.from_tuples(utterances) for side, utterances in spans.items()}
    comments, records, dropped = [], [], 0
    covered: set[str] = set()
    seen: dict[tuple[str, int, float, float], str] = {}
    for number, line in numbered_lines(stm):
        if is_comment(line):
            comments.append(line)
            continue
        where = f"{stm}:{number}"
        file, channel, begin, end, speaker_and_times, text = _fields(line, where)
        first = seen.setdefault((file, channel, begin, end), where)
        if first != where:
            raise InputError(f"{where}: a second reference for the time of {first}, counted twice; remove one of them")
        side = names.get((file, channel), ("", ""))
        found = times[side].overlap(begin, end) if side in times else set()
        covered.update(utterance.data for utterance in found)
        if found:
            spelt = _spelt(text, spelling)
            if spelt != text:
                issues.add("references in another spelling: as in the lexicon", where)
            records.append((*side, begin, f"{side[0]} {side[1]} {speaker_and_times} {spelt}".rstrip()))
        elif IGNORED not in line.lower():
            issues.add("references without a usable utterance: left out", where)
            dropped += 1
    if dropped > MAX_DROPPED * (len(records) + dropped):
        raise InputError(
            f"{stm}: {dropped} of {len(records) + dropped} references have no utterance, the first "
            f"{issues.first['references without a usable utterance: left out']}; names of recordings come from "
            "reco2file_and_channel: correct it, or remove stm"
        )
    lacking = [utterance.id for utterance in corpus.utterances if utterance.id not in covered]
    if lacking:
        raise InputError(
            f"{stm}: no reference for utterance {lacking[0]} ({len(lacking)} in all); add it, or remove stm"
        )
    return [*comments, *(line for *_, line in sorted(records))]


def _spelt(text: str, spelling: Spelling) -> str:
    """Respells labels and words of a reference. Tokens are separated by blanks and `( { / } @ )`."""

    def word(match: re.Match[str]) -> str:
        return match[0] if match[0] in spelling.vocabulary else spelling.find(clean(match[0])) or clean(match[0])

    return " ".join(re.sub(r"[^\s(){}/@]+", word, text).split())


def _fields(line: str, where: str) -> tuple[str, int, float, float, str, str]:
    """Splits a line into file, channel, begin, end, speaker and times as written, and labels and words."""
    try:
        file, channel, speaker, begin, end, *text = line.split(maxsplit=5)
        number = channel_number(channel)
        if number is None:
            raise ValueError(f"channel {channel}")
        times = float(begin), float(end)
    except ValueError as error:
        raise InputError(f"{where}: not `file channel speaker begin end <labels> words`; correct it") from error
    if not times[0] <= times[1]:
        raise InputError(f"{where}: ends at {end} s, before it begins at {begin} s; correct it")
    return file, number, *times, f"{speaker} {begin} {end}", "".join(text).rstrip()


def _names(corpus: CorpusSet) -> dict[tuple[str, int], tuple[str, str]]:
    """Maps NIST's file and channel of each recording to our recording and its channel letter."""
    sides = read_kaldi_dir(corpus.folder, IssueCounter()).sides
    names = {}
    for utterance in corpus.utterances:
        recording, letter = utterance.recording_id, channel_letter(utterance)
        names[sides.get(recording, (recording, CHANNELS.index(letter)))] = recording, letter
    return names
