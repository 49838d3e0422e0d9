"""Features of a recording outside the corpus: written to a scratch folder as a set of its own, as the stages do.

Its speaker is new to the models. CMVN statistics are those of the whole recording, fMLLR comes from decoding it as in
stage speaker, and there is one i-vector.

Shapes: T frames, D static features.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from asr_am.data.kaldi_archive import write_archive
from asr_am.data.textfile import write_lines
from asr_am.decode.adapt import adapt_set, load_adaptation
from asr_am.decode.loading import load_ivector_models
from asr_am.errors import InputError
from asr_am.features.adapted import BASE, MATRIX, load_projection, write_transforms
from asr_am.features.cmvn_deltas import accumulate
from asr_am.features.fusion import IVECTOR, base_of, streams_of
from asr_am.features.ivector.extract_ivectors import OPTIONS, speaker_ivectors
from asr_am.features.ivector.kaldi_ivectors import EXTRACTOR, write_online

SET = SPEAKER = "recording"
MATRICES = ("lda", "fmllr")


def computed_kinds(kind: str) -> list[str]:
    """Returns the kinds of static features that a model's input `kind` is computed from, in order."""
    made_from = {IVECTOR: BASE, **dict.fromkeys(MATRICES, BASE)}
    return list(dict.fromkeys(made_from.get(name, base_of(name)) for name in streams_of(kind)))


def write_recording(
    kind: str, static: Mapping[str, np.ndarray], segments: Sequence[tuple[int, int]], features_dir: Path, out: Path
) -> list[str]:
    """Writes the features of a recording into `out` as the set `SET`, one utterance per segment.

    Args:
        kind: features that the acoustic model takes.
        static: float32 [T, D] of each of `computed_kinds(kind)`.
        segments: first frame and frame after the last of each segment.
        features_dir: output of stage features of the corpus that the models were trained on.
        out: an empty folder.

    Returns:
        The utterance ids of the segments.

    Raises:
        InputError: `features_dir` lacks a file, or one is damaged, or its i-vectors are without an extractor.
    """
    names = [f"{SET}-{number:05d}" for number in range(len(segments))]
    for base, static_TD in static.items():
        folder = out / base
        folder.mkdir()
        shutil.copy(features_dir / base / "options.json", folder)
        parts = [(name, static_TD[begin:end]) for name, (begin, end) in zip(names, segments, strict=True)]
        write_archive(folder, SET, parts)
        write_archive(folder, f"{SET}_cmvn", [(SPEAKER, accumulate(static_TD))])
        write_lines(folder / f"{SET}_utt2spk", [f"{name} {SPEAKER}" for name in names])
    for name in streams_of(kind):
        folder = out / name
        if name in MATRICES:
            folder.mkdir()
            load_projection(features_dir, features_dir / name / MATRIX).save(folder / MATRIX)
        if name == "fmllr":
            paths, options = load_adaptation(features_dir / name)
            paths = replace(paths, features_dir=out, work=out / "work")
            write_transforms(folder, SET, adapt_set(paths, SET, options, jobs=1))
        if name == IVECTOR:
            folder.mkdir()
            models = features_dir / name
            if (models / EXTRACTOR).is_dir():
                write_online(models / EXTRACTOR, out, folder, {SET: 0})
            elif not (models / OPTIONS).is_file():
                raise InputError(
                    f"{models}: its i-vectors were imported (align.ivectors), so a new recording has none; train with "
                    "align.extractor instead, which extracts them by Kaldi's extractor"
                )
            else:
                speaker_ivectors(models, out, SET, folder, load_ivector_models(models))
    return names
