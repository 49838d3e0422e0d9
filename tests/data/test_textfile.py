from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from asr_am.data.textfile import file_name, numbered_lines


@pytest.mark.parametrize("name", ["lm.gz", "lm", "lm.arpa"])
@pytest.mark.parametrize("text", ["YES\nNO\n", "", "Y"])
def test_a_gzipped_file_is_known_by_its_first_bytes(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()))
    assert [line for _, line in numbered_lines(path)] == text.split()
    (tmp_path / "plain").write_text(text)
    assert [line for _, line in numbered_lines(tmp_path / "plain")] == text.split()


def test_every_id_has_a_file_name_of_its_own(tmp_path: Path) -> None:
    plain = ["a", "a_b", "a%2Fb", "ä-é", ".hidden", "x" * 180]
    assert [file_name(name) for name in plain] == plain
    odd = ["a/b", "a\0b", "", ".", "..", "../a", "/a", "x" * 181, "x" * 260, "é" * 200, "\udce4/"]
    names = [file_name(name) for name in odd]
    assert len({*names, *plain}) == len(odd) + len(plain)
    for name in names:
        (tmp_path / f"{name}.TextGrid.partial").touch()
    assert len(list(tmp_path.iterdir())) == len(odd)
