"""Features of a recording outside the corpus, and the error for a missing file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asr_am.decode.adhoc_features import computed_kinds, write_recording
from asr_am.errors import InputError
from asr_am.features.ivector.ivector_archive import IvectorInfo


def write_kinds(root: Path, *names: str) -> tuple[Path, Path]:
    """Writes folders of feature kinds. Returns the folder of all, and an empty one."""
    features, out = root / "features", root / "out"
    for folder in (out, *(features / name for name in names)):
        folder.mkdir(parents=True)
    options = {"kind": "mfcc", "sampling_rate": 8000, "num_bins": 23, "num_ceps": 13}
    (features / "mfcc/options.json").write_text(json.dumps(options), encoding="utf-8")
    return features, out


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    features, out = write_kinds(tmp_path, "mfcc", "lda")
    assert computed_kinds("lda") == ["mfcc"]
    with pytest.raises(InputError, match=r"lda\.mat"):
        write_recording("lda", {"mfcc": np.ones((50, 13), np.float32)}, [(0, 50)], features, out)


def test_imported_ivectors_are_without_an_extractor(tmp_path: Path) -> None:
    features, out = write_kinds(tmp_path, "mfcc", "ivector")
    IvectorInfo(3, 10, {"train": "utterance"}).save(features / "ivector")
    with pytest.raises(InputError, match=r"imported \(align\.ivectors\).*align\.extractor"):
        write_recording("ivector+mfcc", {"mfcc": np.ones((50, 13), np.float32)}, [(0, 50)], features, out)
