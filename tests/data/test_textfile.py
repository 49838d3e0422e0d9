from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from asr_am.data.textfile import numbered_lines


@pytest.mark.parametrize("name", ["lm.gz", "lm", "lm.arpa"])
@pytest.mark.parametrize("text", ["YES\nNO\n", "", "Y"])
def test_a_gzipped_file_is_known_by_its_first_bytes(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()))
    assert [line for _, line in numbered_lines(path)] == text.split()
    (tmp_path / "plain").write_text(text)
    assert [line for _, line in numbered_lines(tmp_path / "plain")] == text.split()
