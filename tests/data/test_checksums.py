"""What a stage wrote is read back unchanged, or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from asr_am.data.checksums import intact
from asr_am.data.textfile import read_lines
from asr_am.errors import MAX_MESSAGE, InputError
from asr_am.lang.fst_file import read_fst
from asr_am.lang.prepare import prepare_lang
from asr_am.stages.target import Target


def write_lexicon(folder: Path) -> None:
    (folder / "lexicon.txt").write_text("hello h e l o\nworld w o l d\n<unk> SPN\n")


def lang(tmp_path: Path) -> Target:
    data = Target(tmp_path / "data", [], {}, write_lexicon)
    data.run()

    def build(out: Path) -> None:
        prepare_lang(data.out, out, position_dependent=True, silence_prob=0.5)

    return Target(tmp_path / "lang", [data.out], {}, build)


def test_a_changed_bit_is_found_and_the_remedy_works(tmp_path: Path) -> None:
    stage = lang(tmp_path)
    stage.run()
    path, dice = stage.out / "L.fst", random.Random(1)
    assert read_fst(path, "make it").num_states > 5
    content = path.read_bytes()
    for _ in range(40):
        damaged = bytearray(content)
        damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"L\.fst: damaged: .*; remove it and run the stage"):
            read_fst(path, "make it")
    path.unlink()
    assert stage.run()
    assert path.read_bytes() == content and read_fst(path, "make it")


def test_text_of_a_stage_is_verified_and_other_text_is_not(tmp_path: Path) -> None:
    stage = lang(tmp_path)
    stage.run()
    words = stage.out / "words.txt"
    copy = tmp_path / "words.txt"
    for path in (words, copy):
        path.write_text(words.read_text().replace("hello", "hullo"))
    with pytest.raises(InputError, match="damaged"):
        read_lines(words, "make it")
    assert "hullo 2" in read_lines(copy, "make it")


def test_large_files_are_left_to_their_readers(tmp_path: Path) -> None:
    def build(out: Path) -> None:
        (out / "part").mkdir()
        for name in ("a.ark", "part/b.ark", "a.scp"):
            (out / name).write_text(name)

    Target(tmp_path / "out", [], {}, build, checked_in_parts=("*.ark",)).run()
    for name in ("a.ark", "part/b.ark", "a.scp"):
        (tmp_path / "out" / name).write_text("x" * len(name))
    assert intact(tmp_path / "out/a.ark") and intact(tmp_path / "out/part/b.ark")
    with pytest.raises(InputError, match=r"a\.scp"):
        intact(tmp_path / "out/a.scp")


@pytest.mark.parametrize("record", ["", "[]", "7", "{", '{"crc32": []}', '{"crc32": {"other": 1}}'])
def test_a_folder_with_another_kind_of_done_is_not_verified(tmp_path: Path, record: str) -> None:
    (tmp_path / ".done").write_text(record)
    (tmp_path / "file").write_text("x")
    assert intact(tmp_path / "file") == tmp_path / "file"


def test_a_message_is_one_short_line(tmp_path: Path) -> None:
    line = "ab\n\x00" * 100_000
    message = str(InputError(f"{tmp_path}/x:7: '{line}' is no word; mend it"))
    assert len(message) <= MAX_MESSAGE and message.isprintable()
    assert message.startswith(f"{tmp_path}/x:7: 'ab ") and message.endswith("is no word; mend it")
