"""A folder of recordings with transcripts beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.data.issue_counter import IssueCounter
from asr_am.errors import InputError
from local.kaldi.folder import write_kaldi_dir


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


def test_two_recordings_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has the same name as"):
        written(tmp_path, "amy-1.wav", "amy-1.flac", "amy-1.txt")


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no recordings"):
        written(tmp_path, "1.txt")
