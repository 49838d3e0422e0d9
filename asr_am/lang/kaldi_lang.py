"""A lang directory of Kaldi (`data/lang`) as ours: the same phone and word ids, L as it is."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from asr_am.data.textfile import numbered_lines, read_lines, split_words, write_lines
from asr_am.errors import InputError
from asr_am.lang.lang_dir import read_symbols, write_symbols
from asr_am.lang.lexicon import BEGIN, END, RESERVED_WORDS, UNKNOWN

log = logging.getLogger(__name__)
REMEDY = "give the directory that utils/prepare_lang.sh wrote"


def import_lang(source: Path, out: Path) -> None:
    """Writes the directory, where unknown words are `<unk>`. Raises InputError if a file is missing or inconsistent."""
    phones, words = (read_symbols(source / name, REMEDY) for name in ("phones.txt", "words.txt"))
    unknown = _one_name(source / "oov.txt")
    if unknown not in words or (unknown != UNKNOWN and UNKNOWN in words):
        raise InputError(f"{source / 'oov.txt'}: {unknown} is not the only unknown word of words.txt; {REMEDY}")
    for name in ("L.fst", "L_disambig.fst"):
        if not (source / name).is_file():
            raise InputError(f"{source / name}: no such file; {REMEDY}")
        shutil.copyfile(source / name, out / name)
    lists = {name: _names(source / f"phones/{name}.txt") for name in ("silence", "nonsilence", "optional_silence")}
    for name, members in lists.items():
        if missing := [phone for phone in members if phone not in phones]:
            raise InputError(f"{source / f'phones/{name}.txt'}: phones.txt lacks {missing[0]}; {REMEDY}")
    spoken = [*lists["silence"], *lists["nonsilence"]]
    write_symbols(out / "phones.txt", phones)
    write_symbols(out / "words.txt", {UNKNOWN if word == unknown else word: number for word, number in words.items()})
    lines = []
    for number, line in numbered_lines(source / "phones/align_lexicon.txt", REMEDY):
        fields = split_words(line)
        word, members = "".join(fields[:1]), fields[2:]
        if not members or any(phone not in phones for phone in members):
            raise InputError(f"{source / 'phones/align_lexicon.txt'}:{number}: not `word word phone ...`; {REMEDY}")
        if word in words and word not in RESERVED_WORDS:
            lines.append(" ".join([UNKNOWN if word == unknown else word, *members]))
    write_lines(out / "lexicon.txt", lines)
    description = {
        "silence_phones": lists["silence"],
        "nonsilence_phones": lists["nonsilence"],
        "optional_silence": _one_name(source / "phones/optional_silence.txt"),
        "unk": UNKNOWN,
        "position_dependent": all(any(phone.endswith(mark) for phone in spoken) for mark in (BEGIN, END)),
        "roots": [[phone] for phone in spoken],
    }
    write_lines(out / "lang.json", [json.dumps(description, ensure_ascii=False)])
    log.info("%s: %d pronunciations, %d phones", source, len(lines), len(spoken))


def _names(path: Path) -> list[str]:
    return [name for line in read_lines(path, REMEDY) for name in split_words(line)]


def _one_name(path: Path) -> str:
    names = _names(path)
    if len(names) != 1:
        raise InputError(f"{path}: not one name; {REMEDY}")
    return names[0]
