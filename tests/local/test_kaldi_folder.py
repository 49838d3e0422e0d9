"""A folder of recordings with transcripts beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.data.issue_counter import IssueCounter
from asr_am.errors import InputError
from local.kaldi.folder import folder_stamp, plain_words, spell, write_kaldi_dir


def written(folder: Path, *names: str) -> tuple[dict[str, list[str]], IssueCounter]:
    """Makes files of these names, and returns the lines of the Kaldi data directory made of them."""
    for name in names:
        path = folder / "speech" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Yes, yes!\n")
    issues = IssueCounter()
    out = write_kaldi_dir(folder / "speech", folder / "out", issues)
    return {name: (out / name).read_text().splitlines() for name in ("wav.scp", "text", "utt2spk")}, issues


def test_what_has_no_partner_is_counted_and_stays_out_of_text(tmp_path: Path) -> None:
    lines, issues = written(tmp_path, "amy/1.wav", "amy/1.txt", "amy/2.wav", "README.txt")
    assert lines["text"] == ["amy-1 yes yes"]
    assert lines["utt2spk"] == ["amy-1 amy", "amy-2 amy"]
    assert lines["wav.scp"][1] == f"amy-2 {tmp_path}/speech/amy/2.wav"  # stage 0 leaves it out and counts it
    assert issues.first["text without a recording beside it: not used"] == f"{tmp_path}/speech/README.txt"


def test_the_speaker_is_the_subfolder_whatever_the_name_of_the_file(tmp_path: Path) -> None:
    names = ("amy/2024-01-03", "amy/plain", "day 1/bob/2-b", "carl-2024-01")
    lines, _ = written(tmp_path, *(f"{name}{suffix}" for name in names for suffix in (".wav", ".txt")))
    speakers = dict(line.split() for line in lines["utt2spk"])
    assert speakers == {
        "amy-2024-01-03": "amy", "amy-plain": "amy", "day_1-bob-2-b": "day_1-bob", "carl-2024-01": "carl",
    }  # fmt: skip
    assert all(utterance.startswith(speaker) for utterance, speaker in speakers.items())


def test_two_recordings_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has the same name as"):
        written(tmp_path, "amy-1.wav", "amy-1.flac", "amy-1.txt")


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no recordings"):
        written(tmp_path, "1.txt")


def test_names_that_begin_with_a_mark_other_endings_and_macos_files(tmp_path: Path) -> None:
    names = ["_und.wav", "_und.txt", "amy/a.WAV", "amy/a.TXT", "amy/e\u0301.wav", "amy/\u00e9.txt", "amy/b.m4a"]
    lines, issues = written(tmp_path, *names, "amy/._a.txt")
    assert lines["utt2spk"] == ["_und _und", "amy-a amy", "amy-e\u0301 amy"] and len(lines["text"]) == 3
    (what,) = (what for what in issues.first if what.startswith("recording that is none of"))
    assert issues.first[what].endswith("amy/b.m4a")
    assert "text without a recording beside it: not used" not in issues.first


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "far/bob").mkdir(parents=True)
    for name in ("1.wav", "1.txt"):
        (tmp_path / "far/bob" / name).write_text("yes")
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech/bob").symlink_to(tmp_path / "far/bob")
    (tmp_path / "far/bob/back").symlink_to(tmp_path / "speech")
    before = folder_stamp(tmp_path / "speech")
    lines, _ = written(tmp_path, "amy/1.wav", "amy/1.txt")
    assert lines["utt2spk"] == ["amy-1 amy", "bob-1 bob"] and folder_stamp(tmp_path / "speech") != before
    (tmp_path / "speech/lost.wav").symlink_to(tmp_path / "nowhere")
    now = folder_stamp(tmp_path / "speech")
    (tmp_path / "nowhere").write_text("found")
    assert folder_stamp(tmp_path / "speech") != now


def test_a_turkish_capital_i_is_a_letter() -> None:
    assert plain_words("\u0130ZM\u0130R") == ["izmir"] and spell("I\u0307z") == ("i", "z")
