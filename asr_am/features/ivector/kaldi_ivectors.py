"""I-vectors of Kaldi's: those that extract_ivectors_online.sh has written, or new ones by an extractor of Kaldi's."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from asr_am.data.kaldi_archive import Entry, read_scp, write_archive
from asr_am.data.textfile import read_lines
from asr_am.errors import InputError
from asr_am.features.feature_archive import load_matrix
from asr_am.features.ivector.estimator import split_speaker
from asr_am.features.ivector.extract_ivectors import Group, write_ivectors
from asr_am.features.ivector.ivector_archive import IvectorInfo
from asr_am.features.ivector.kaldi_extractor import FILES, NORMALISED, PERIOD, read_extractor
from asr_am.features.ivector.speech import BASE, Speech
from asr_am.features.kinds import read_kind
from asr_am.features.reader import FeatureReader

REMEDY = "give a directory that steps/online/nnet2/extract_ivectors_online.sh wrote for this set"
ONE_EXTRACTOR = "give i-vectors of one extractor"
EXTRACTOR = "kaldi"  # folder of the extractor's files, in that of the i-vectors


def import_ivectors(folders: Mapping[str, Path], features_dir: Path, out: Path) -> None:
    """Copies Kaldi's i-vectors (`ivector_online.scp`, `ivector_period`) of all sets, and writes ivectors.json.

    Args:
        folders: Kaldi's directory of each set.
        features_dir: output of stage features, whose utterances need i-vectors.

    Raises:
        InputError: a file is missing or damaged, an utterance has no i-vectors, or sets differ in size or period.
    """
    periods, dim = {_period(folder) for folder in folders.values()}, 0
    if len(periods) != 1:
        raise InputError(f"align.ivectors: periods of {sorted(periods)} frames; {ONE_EXTRACTOR}")
    for subset, folder in folders.items():
        scp = folder / "ivector_online.scp"
        rows, utterances = read_scp(scp, REMEDY), FeatureReader(features_dir, BASE, subset).utterances
        if missing := [name for name in utterances if name not in rows]:
            raise InputError(f"{scp}: lacks {len(missing)} utterances of {subset}, the first {missing[0]}; {REMEDY}")
        dim = dim or load_matrix(rows[utterances[0]], REMEDY).shape[1]
        write_archive(out, f"{subset}_ivectors", _load(rows, utterances, dim))
    IvectorInfo(dim, periods.pop(), dict.fromkeys(folders, "utterance")).save(out)


def _load(rows: Mapping[str, Entry], utterances: Iterable[str], dim: int) -> Iterator[tuple[str, np.ndarray]]:
    for name in utterances:
        rows_KS = load_matrix(rows[name], REMEDY)
        if rows_KS.shape[1] != dim:
            raise InputError(f"{rows[name]}: {rows_KS.shape[1]} dimensions, others have {dim}; {ONE_EXTRACTOR}")
        yield name, rows_KS.astype(np.float32)


def _period(folder: Path) -> int:
    lines = read_lines(folder / "ivector_period", REMEDY)
    if not lines or not lines[0].strip().isdigit() or int(lines[0]) < 1:
        raise InputError(f"{folder / 'ivector_period'}: not a number of frames; {REMEDY}")
    return int(lines[0])


def extract_ivectors(folder: Path, features_dir: Path, out: Path, restarts: Mapping[str, int], jobs: int = 1) -> None:
    """Copies an extractor of Kaldi's to out/kaldi, and writes the online i-vectors of all sets, and ivectors.json.

    Args:
        features_dir: output of stage features, with the MFCCs that the extractor was trained on.
        restarts: sets, each with the number of a speaker's utterances after which estimation begins anew, 0 for never.

    Raises:
        InputError: a file is missing or damaged, or the MFCCs are others.
    """
    copy = out / EXTRACTOR
    copy.mkdir(exist_ok=True)
    for name in [*FILES, *([NORMALISED] if (folder / NORMALISED).exists() else [])]:
        try:
            shutil.copyfile(folder / name, copy / name)
        except OSError as error:
            raise InputError(
                f"{folder / name}: cannot be read ({error.strerror}); see conf/align/kaldi.yaml"
            ) from error
    write_online(copy, features_dir, out, restarts, jobs)


def write_online(copy: Path, features_dir: Path, out: Path, restarts: Mapping[str, int], jobs: int = 1) -> None:
    """Writes online i-vectors as `extract_ivectors` does, by the extractor in the folder `copy`."""
    extractor = read_extractor(copy)
    for subset, restart in restarts.items():
        speech = Speech(features_dir, subset, normalise=False)
        if (found := read_kind(features_dir / BASE).dim) != extractor.num_ceps:
            raise InputError(
                f"{features_dir / BASE}: {found} MFCCs per frame, but Kaldi's extractor takes {extractor.num_ceps}; "
                "set features.kinds.mfcc as in conf/mfcc_hires.conf, which it was trained with"
            )
        work = partial(_write_group, copy, speech, restart)
        write_ivectors(speech.by_speaker(), subset, out, work, jobs)
    IvectorInfo(extractor.model.dim, PERIOD, dict.fromkeys(restarts, "utterance")).save(out)


def _write_group(copy: Path, speech: Speech, restart: int, task: tuple[Path, Group]) -> None:
    """Writes the i-vectors of a group of speakers as one archive."""
    path, group = task
    extractor = read_extractor(copy)
    rows: dict[str, np.ndarray] = {}
    for _, utterances in group:
        for part in split_speaker(utterances, restart):
            rows |= zip(part, extractor.online(map(speech.reader.raw, part)), strict=True)
    write_archive(path.parent, path.name, sorted(rows.items()))
