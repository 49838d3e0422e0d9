"""Stage `align`: trains a chain of GMM systems from features and transcripts, and aligns all sets with each of them.

Shapes: U utterances.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asr_am import disk
from asr_am.errors import InputError
from asr_am.features.reader import FeatureReader
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.train_lda_mllt import LdaOptions, train_lda_mllt
from asr_am.hmm.train_mono import MonoOptions, train_mono
from asr_am.hmm.train_sat import SatOptions, train_sat
from asr_am.hmm.train_tri import TriOptions, train_tri
from asr_am.hmm.training import AlignedData, EmOptions, TrainingContext, subset_of
from asr_am.lang.lang_dir import Lang
from asr_am.lang.transcripts import read_transcripts

logger = logging.getLogger(__name__)
Train = Callable[..., None]


def align_corpus(
    data_dir: Path, lang_dir: Path, features_dir: Path, out: Path, *, mono: MonoOptions, tri: TriOptions,
    lda_mllt: LdaOptions | None = None, sat: SatOptions | None = None, sets: Sequence[str] = ("train", "dev"),
    jobs: int = 1, whole: str = "", copies: bool = True,
) -> None:  # fmt: skip
    """Trains the systems mono, tri and, where options are given, lda_mllt and sat. Each writes a folder into `out`.

    A system's folder holds tree.json, states.npz, gmm.npz and ali/<set>.{ark,scp} (int32 graph labels), plus the files
    that `GmmSystem.kind` looks for. Called again on an unfinished `out`, it resumes after the last finished system.

    Args:
        lda_mllt: options of LDA+MLLT training, None to skip it.
        sat: options of speaker-adaptive training, None to skip it. Needs `lda_mllt`.
        sets: sets to align. Must contain "train", which systems are trained on.
        whole: the system whose alignment of "train" is wanted whole. The last one is whole anyway, and the others have
            the utterances that they or the next system are trained on.
        copies: train on copies of utterances at other speeds too. False: the last system only adapts to their speakers
            and aligns them.

    Raises:
        InputError: an input is not readable, or no utterance can be aligned.
    """
    scratch = out / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    lang = Lang.load(lang_dir)
    sets_data = {subset: load_set(data_dir, features_dir, lang, subset, scratch) for subset in sets}
    if lda_mllt is not None:
        lda_mllt.check(sets_data["train"].frames.dim)
    elif sat is not None:
        raise InputError("align: sat has a section, but lda_mllt, which sat starts from, has none; add one")
    ctx = TrainingContext(sets_data, lang, scratch, jobs, copies=copies)
    systems: dict[str, tuple[EmOptions, Train]] = {
        "mono": (mono, partial(train_mono, options=mono)),
        "tri": (tri, partial(train_tri, previous=out / "mono", options=tri)),
    }
    if lda_mllt is not None:
        systems["lda_mllt"] = lda_mllt, partial(train_lda_mllt, previous=out / "tri", options=lda_mllt)
    if sat is not None:
        systems["sat"] = sat, partial(train_sat, previous=out / "lda_mllt", options=sat)
    trained_on = [getattr(options, "utterances", 1) or sys.maxsize for options, _ in systems.values()]
    needed = [max(pair) for pair in itertools.pairwise([*trained_on, sys.maxsize])]
    for (name, (_, train)), count in zip(systems.items(), needed, strict=True):
        if GmmSystem.is_complete(out / name):
            continue
        disk.remove(out / name)  # of a killed run
        began = time.monotonic()
        last = name == list(systems)[-1]
        train(ctx if name == whole or last else subset_of(ctx, count), out=out / name)
        logger.info("%s: %.0f s", name, time.monotonic() - began)
    disk.remove(scratch)


def load_set(data_dir: Path, features_dir: Path, lang: Lang, subset: str, scratch: Path) -> AlignedData:
    """Loads the frames and transcripts of a set. Frames that are already in `scratch` are not read again."""
    reader = FeatureReader(features_dir, "mfcc", subset)
    transcripts = dict(read_transcripts(data_dir, subset))
    unknown = [utterance for utterance in reader.utterances if utterance not in transcripts]
    if unknown:
        raise InputError(
            f"{data_dir / subset}: {unknown[0]} has features but no transcript; run stage 2 (features) again"
        )
    if not reader.utterances:
        raise InputError(f"{features_dir / 'mfcc' / subset}.scp: lists no utterance; run stage 2 (features) again")
    folder = scratch / f"frames_{subset}"
    if (folder / "index.npz").is_file():
        frames = FrameStore(folder)
    else:
        frames = FrameStore.write(folder, reader.utterances, reader.__getitem__, f"reading features of {subset}")
    words_U = [lang.word_ids(" ".join(transcripts[utterance])) for utterance in frames.utterances]
    logger.debug("%s: %d utterances, %d frames of dimension %d", subset, len(words_U), frames.num_frames, frames.dim)
    return AlignedData(frames, words_U, [reader.speaker(utterance) for utterance in frames.utterances])
