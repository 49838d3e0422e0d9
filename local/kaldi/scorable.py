"""Checks in stage 0 for names, references and rules that NIST's programs would misread in stage score.

Names, channels and rules are checked before audio is read, references at the end with the scorer's own parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.kaldi_dir import KaldiDir
from asr_am.data.stm import CHANNELS
from asr_am.errors import InputError
from asr_am.score.csrfilt import Filter
from asr_am.score.files import Line, check_ctm
from asr_am.score.scoring import Reference
from asr_am.score.word_network import is_plain_word

UNFIT = re.compile(r"[{}<]|^;|^\*\*")  # read as a brace, label or comment in NIST's files
FIT = "names in NIST's files cannot contain { } or <, or begin with ; or **"
RULES = "en.glm"
MARKUP = "where { } and @ mean alternatives, (WORD) is optional, and ; \\ and a last * are cut off"


def check_names(source: KaldiDir) -> None:
    """Raises InputError if names or channels of a set that will be scored are not valid in NIST's files."""
    scored = {utterance: span for utterance, span in source.spans.items() if utterance in source.text}
    folded: dict[bytes, str] = {}
    for recording in sorted({span.recording for span in scored.values()} & source.audio.keys()):
        where = source.audio[recording].where
        if UNFIT.search(recording):
            raise InputError(f"{where}: recording {recording}: {FIT}; rename it")
        other = folded.setdefault(recording.encode().lower(), recording)  # NIST's programs fold A-Z only
        if other != recording:
            raise InputError(
                f"{where}: recordings {other} and {recording} differ only in case, so NIST's programs take them for "
                "one; rename one of them"
            )
    for speaker in sorted({source.speaker[utterance] for utterance in scored.keys() & source.speaker.keys()}):
        if UNFIT.search(speaker):
            raise InputError(f"{source.folder / 'utt2spk'}: speaker {speaker}: {FIT}; rename it")
    for utterance, span in scored.items():
        if span.channel is not None and not 0 <= span.channel < len(CHANNELS):
            raise InputError(
                f"{span.where}: utterance {utterance} is on channel {span.channel}, but NIST's references have only 0 "
                "and 1; give the channel a file or a command of its own in wav.scp, or take the line out"
            )


def check_rules(glm: Path) -> None:
    """Raises InputError if the scoring rules cannot be used."""
    Filter.for_reference(glm)
    Filter.for_hypothesis(glm)


def count_markup(words: Iterable[str], issues: IssueCounter) -> None:
    """Counts the words of the lexicon that, if recognised, count as another word or as an optional one."""
    for word in words:
        if not is_plain_word(word):
            issues.add(f"words that are markup in NIST's files, {MARKUP}", word)


def check_scoring(out: Path, subset: str, source: Path, words: Iterable[str]) -> None:
    """Raises InputError if the scorer rejects the references of a set or a word that may be recognised.

    Args:
        out: data directory.
        subset: name of the set.
        source: the user's file that the references were made from, for messages.
        words: words of the lexicon.
    """
    rules = out / RULES if (out / RULES).exists() else None
    try:
        Reference(out / subset / "ref.stm", None, {})
    except InputError as error:
        raise InputError(f"{error}; correct it in {source}, which this is made from") from error
    try:
        Reference(out / subset / "ref.stm", rules, {})
    except InputError as error:
        raise InputError(f"{error}; the scoring rules (glm) have made this of {source}, so correct them") from error
    hypothesis = Filter.for_hypothesis(rules) if rules else None
    for word in words:
        line = Line(f"the word {word} of the lexicon", f"file A 0 1 {word} 1.00".encode())
        check_ctm(line.where, line.text)
        if hypothesis:
            hypothesis.ctm_line(Line(f"{line.where} under glm", line.text))
