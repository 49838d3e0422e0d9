"""Stage data: when it adds copies at other speeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.data.manifests import read_supervisions
from asr_am.stages import data
from tests.support.manifest_corpus import write_corpus

HOURS = 2 * 3 * 0.9 / 3600  # of the training speech of `write_corpus`


@pytest.mark.parametrize(("below", "copies"), [(float("inf"), 2), (1.01 * HOURS, 2), (0.99 * HOURS, 0)])
def test_copies_are_made_below_a_number_of_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: float, copies: int
) -> None:
    monkeypatch.setattr(data, "corpus_function", lambda *_: lambda out, jobs: write_corpus(out))
    data.prepare({"_target_": "local.tiny.prepare"}, [0.9, 1.1], below, 1, ["train", "dev", "test"], tmp_path)
    assert len(list(read_supervisions(tmp_path, "train"))) == 6 * (1 + copies)
    assert len(list(read_supervisions(tmp_path, "dev"))) == 6
