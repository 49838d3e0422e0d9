from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asr_am.data.npz import read_npz, write_npz


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, {"x": np.arange(3)})
    with pytest.raises(ValueError, match="pickle"):
        write_npz(path, {"x": np.zeros(1000), "y": np.array([object()])})
    assert read_npz(path, "x", remedy="")[0].tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == [path]
