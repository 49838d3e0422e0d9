"""Readers of damaged files: one clear line, or what was there before. `scripts/soak/readers.py` tries many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.soak.readers import examine, fuzz
from tests.support.reader_cases import CASES, Case, write_all


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "all"
    write_all(folder)
    return folder


# config.yaml takes a second, models some 0.1 s.
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("config.yaml", "acoustic model")])
def test_damaged_files_are_refused_or_read_as_they_were(name: str, root: Path, tmp_path: Path) -> None:
    counts = fuzz(name, root, tmp_path / "work", range(15))
    assert not counts.defects
    assert counts.outcomes.total() == 15 and counts.outcomes["refused"] > 0


def test_each_kind_of_defect_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("words\n" * 50)

    def outcomes(read: object, exact: bool = False) -> set[str]:
        case = Case([path], read, exact=exact, text=True)  # type: ignore[arg-type]
        return {examine(case, "test", number, "") for number in range(10)} - {"same"}

    def broken() -> str:
        raise KeyError("x")

    (found,) = outcomes(broken)
    assert found.startswith("KeyError in test_readers.py:") and found.endswith("(file.txt)")
    assert outcomes(lambda: "other") == {"different"}
    assert outcomes(lambda: "other", exact=True) == {"read as something else in spite of checksums (file.txt)"}
