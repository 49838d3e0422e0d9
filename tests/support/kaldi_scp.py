"""Archives by their index, read with kaldiio."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np

from asr_am.data.kaldi_archive import read_scp


def load_scp(path: Path) -> dict[str, np.ndarray]:
    """Returns the entries of an index by key, in its order."""
    return {key: kaldiio.load_mat(str(entry)) for key, entry in read_scp(path, "").items()}
