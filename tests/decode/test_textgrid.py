"""TextGrid files of recordings whose ids cannot be names of files."""

from __future__ import annotations

from pathlib import Path

from lhotse import SupervisionSegment

from asr_am.decode.ctm import CtmWord
from asr_am.decode.textgrid import write_textgrids


def test_ids_of_any_form_have_files_of_their_own(tmp_path: Path) -> None:
    ids = ["a/b", "a_b", "../ordner-ä/%20é", "x" * 260]
    segments = {name: SupervisionSegment(name, name, 0.0, 1.0, 0) for name in ids}
    words = {name: [CtmWord(0, 50, "yes", 1.0)] for name in ids}
    files = write_textgrids(tmp_path / "grids", segments, {"words": words})
    assert len({*files}) == len(ids) and all(file.parent == tmp_path / "grids" for file in files)
    assert sorted(files) == sorted((tmp_path / "grids").iterdir())
    assert tmp_path / "grids/a_b-A.TextGrid" in files
