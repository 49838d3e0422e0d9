"""Alignments to make training examples from."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np

from asr_am.hmm.states import StateTable

PDFS = 40


def write_alignments(folder: Path, alignments: dict[str, dict[str, np.ndarray]]) -> Path:
    """Writes a state table and the labels of each utterance of each set."""
    (folder / "ali").mkdir(parents=True, exist_ok=True)
    labels_L3 = np.array([(1 + n // 3, n % 3, (n * 7) % PDFS) for n in range(60)], dtype=np.int32)
    half = np.full(60, np.log(0.5), dtype=np.float32)
    StateTable(labels_L3, half, half, {1 + n: 3 for n in range(20)}, PDFS).save(folder / "states.npz")
    for subset, labels in alignments.items():
        path = folder / "ali" / subset
        kaldiio.save_ark(f"{path}.ark", labels, scp=f"{path}.scp")
    return folder
