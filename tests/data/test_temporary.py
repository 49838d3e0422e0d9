from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.data.temporary import remove_leftovers, replacing


def test_a_file_or_folder_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/old").touch()
    with replacing(tmp_path / "a.txt") as file, replacing(tmp_path / "b") as folder:
        assert file.suffix == ".txt"
        file.write_text("new")
        folder.mkdir()
        (folder / "new").touch()
        assert (tmp_path / "a.txt").read_text() == "old" and (tmp_path / "b/old").exists()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a.txt", "b", "b/new"]
    assert (tmp_path / "a.txt").read_text() == "new"


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a.txt") as file:
        file.write_text("half")
        raise ZeroDivisionError
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_leftovers_of_the_killed_are_removed(tmp_path: Path) -> None:
    (tmp_path / "wav/tmp.asr_am.5.host.store").mkdir(parents=True)
    for name in ("wav/tmp.asr_am.5.host.store/part", "tmp.asr_am.123.host.a.jsonl.gz", "tmp.1.txt", "wav/a.wav"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["tmp.1.txt", "wav/a.wav"]
