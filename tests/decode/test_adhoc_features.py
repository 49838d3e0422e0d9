"""Features of a recording outside the corpus, and the error for a missing file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asr_am.decode.adhoc_features import computed_kinds, write_recording
from asr_am.errors import InputError


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    features, out = tmp_path / "features", tmp_path / "out"
    for name in ("mfcc", "lda"):
        (features / name).mkdir(parents=True)
    out.mkdir()
    options = {"kind": "mfcc", "sampling_rate": 8000, "num_bins": 23, "num_ceps": 13}
    (features / "mfcc/options.json").write_text(json.dumps(options))
    assert computed_kinds("lda") == ["mfcc"]
    with pytest.raises(InputError, match=r"lda\.mat"):
        write_recording("lda", {"mfcc": np.ones((50, 13), np.float32)}, [(0, 50)], features, out)
