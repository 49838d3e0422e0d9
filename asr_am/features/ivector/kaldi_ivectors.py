"""Kaldi's online i-vectors (`ivector_online.scp`, `ivector_period`) as ours, one per segment of a few frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from asr_am.data.kaldi_archive import read_scp, write_archive
from asr_am.data.textfile import read_lines
from asr_am.errors import InputError
from asr_am.features.feature_archive import load_matrix
from asr_am.features.ivector.ivector_archive import IvectorInfo
from asr_am.features.reader import FeatureReader

REMEDY = "give a directory that steps/online/nnet2/extract_ivectors_online.sh wrote for this set"


def import_ivectors(folders: Mapping[str, Path], features_dir: Path, out: Path) -> None:
    """Writes the i-vectors of all sets, and ivectors.json.

    Args:
        folders: Kaldi's directory of each set.
        features_dir: output of stage features, whose utterances need i-vectors.
        out: output folder.

    Raises:
        InputError: a file is missing or damaged, an utterance has no i-vectors, or sets differ in size or period.
    """
    found = {}
    for subset, folder in folders.items():
        period, rows = _period(folder), read_scp(folder / "ivector_online.scp", REMEDY)
        utterances = FeatureReader(features_dir, "mfcc", subset).utterances
        if missing := [name for name in utterances if name not in rows]:
            raise InputError(f"{folder / 'ivector_online.scp'}: lacks {len(missing)} utterances of {subset}, the first "
                             f"{missing[0]}; {REMEDY}")  # fmt: skip
        dims: set[int] = set()

        def entries(rows: Mapping = rows, utterances: list[str] = utterances, dims: set[int] = dims) -> Iterator:
            for name in utterances:
                rows_KS = load_matrix(rows[name], REMEDY)
                dims.add(rows_KS.shape[1])
                yield name, np.ascontiguousarray(rows_KS, dtype=np.float32)

        write_archive(out, f"{subset}_ivectors", entries())
        found[subset] = (period, *sorted(dims))
    if len(set(found.values())) != 1 or len(next(iter(found.values()))) != 2:
        raise InputError(f"align.ivectors: (period, dimensions) are {found}; give i-vectors of one extractor")
    period, dim = next(iter(found.values()))
    IvectorInfo(dim, period, dict.fromkeys(folders, "utterance")).save(out)


def _period(folder: Path) -> int:
    lines = read_lines(folder / "ivector_period", REMEDY)
    if not lines or not lines[0].strip().isdigit() or int(lines[0]) < 1:
        raise InputError(f"{folder / 'ivector_period'}: not a number of frames; {REMEDY}")
    return int(lines[0])
