"""Pronounces words that the lexicon lacks with Phonetisaurus, a joint n-gram model trained on the lexicon.

J. Novak et al., "Phonetisaurus: Exploring grapheme-to-phoneme conversion with joint n-gram models in the WFST
framework", Natural Language Engineering 22, 2016. Any language and any phones will do.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from local.kaldi.g2p import MAX_PHONE_ERRORS, Phones, letters, phone_error_rate, sample
from local.kaldi.lexicon import Lexicon

logger = logging.getLogger(__name__)

PACKAGE = "phonetisaurus"
RESERVED = "_|"  # joins and separates letters inside Phonetisaurus
MIN_WORDS = 200
MAX_HELD_OUT = 500


def pronounce(words: Collection[str], lexicon: Lexicon) -> dict[str, Phones]:
    """Returns pronunciations of those of `words` that have the letters of the lexicon.

    A twentieth of the lexicon is held out to measure the phone error rate. Training takes 30 s on 20,000 words.

    Raises:
        InputError: Phonetisaurus is not installed, the lexicon is too small, or its spelling does not tell its phones.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError(
            f"--g2p {PACKAGE}: its wheel is not installed; run .venv/bin/pip install {PACKAGE}, or leave --g2p out"
        )
    known = sample([word for word in lexicon.entries if letters(word) and not set(word) & set(RESERVED)])
    if len(known) < MIN_WORDS:
        raise InputError(
            f"--g2p {PACKAGE}: the lexicon has {len(known)} words; {MIN_WORDS} are needed to learn from; "
            "add pronunciations to the lexicon, or leave --g2p out"
        )
    cut = min(len(known) // 20, MAX_HELD_OUT)
    alphabet = {letter for word in known[cut:] for letter in word}
    spelt = sorted(word for word in words if letters(word) and set(word) <= alphabet)
    with tempfile.TemporaryDirectory() as folder:
        made = _train_and_apply(lexicon, known[cut:], [*known[:cut], *spelt], Path(folder))
    errors = phone_error_rate((lexicon.entries[word][0], made.get(word, ())) for word in known[:cut])
    if errors > MAX_PHONE_ERRORS:
        raise InputError(
            f"--g2p {PACKAGE}: {errors:.0%} of the phones of {cut} known words are wrong (at most "
            f"{MAX_PHONE_ERRORS:.0%} is of use): the spelling of these words does not tell their pronunciation; "
            "leave --g2p out"
        )
    logger.info("%s, trained on the lexicon: %.0f %% of phones wrong on %d of its words", PACKAGE, 100 * errors, cut)
    return {word: made[word] for word in spelt if made.get(word)}


def _train_and_apply(lexicon: Lexicon, known: list[str], words: list[str], folder: Path) -> dict[str, Phones]:
    phones = sorted({phone for word in known for variant in lexicon.entries[word] for phone in variant})
    names = {phone: f"p{number}" for number, phone in enumerate(phones)}  # no reserved characters
    lines = [f"{word} {' '.join(names[p] for p in variant)}" for word in known for variant in lexicon.entries[word]]
    write_lines(folder / "lexicon.txt", lines)
    model = str(folder / "model.fst")
    _run("train", "--model", model, str(folder / "lexicon.txt"))
    made: dict[str, Phones] = {}
    for line in _run("predict", "--model", model, words=words).splitlines():
        word, *found = line.split()
        made[word] = tuple(phones[int(name[1:])] for name in found)
    return made


def _run(command: str, *arguments: str, words: Collection[str] = ()) -> str:
    """Returns what the program prints. Raises InputError if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", PACKAGE, command, *arguments], input="".join(f"{word}\n" for word in words),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"--g2p {PACKAGE}: {command} failed with status {done.returncode} ({last}); leave --g2p out")
    return done.stdout
