"""TextGrid files: names, and utterances that overlap."""

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


def test_utterances_that_overlap_are_in_tiers_of_their_own(tmp_path: Path) -> None:
    spans = {"u1": (0.0, 2.0), "u2": (1.0, 0.5), "u3": (1.9, 1.0), "silent": (0.0, 3.0)}
    segments = {name: SupervisionSegment(name, "r", start, length, 0) for name, (start, length) in spans.items()}
    words = {
        "u2": [CtmWord(10, 30, "b", 1.0)], "u1": [CtmWord(50, 140, "a", 1.0)], "u3": [CtmWord(0, 90, "c", 1.0)],
        "silent": [],
    }  # fmt: skip
    (file,) = write_textgrids(tmp_path, segments, {"words": words, "phones": words})
    lines = [line.strip() for line in file.read_text().splitlines()]
    assert [line for line in lines if line.startswith("name")] == [
        f'name = "{name}"' for name in ("words", "phones", "words 2", "phones 2")
    ]
    texts = [line for line in lines if line.startswith("text")]
    assert texts == [f'text = "{word}"' for word in 2 * ["", "a", "c"] + 2 * ["", "b", ""]]
    (begin,) = {lines[i - 2] for i, line in enumerate(lines) if line == 'text = "b"'}
    assert begin == "xmin = 1.100000"
