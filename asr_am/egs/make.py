"""Stage egs: pair the features of every utterance with its pdfs and store them in shards.

Shapes: T frames, F feature dimension, L graph labels, P pdfs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kaldiio
import numpy as np

from asr_am.egs.store import EgsInfo, Index
from asr_am.errors import InputError
from asr_am.features.reader import FeatureReader
from asr_am.hmm.states import StateTable
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where one set comes from, and how it is stored; plain values, so that it travels to a worker."""

    features_dir: Path
    kind: str
    align_dir: Path
    subset: str
    out: Path
    chunk: int
    dtype: str

    @property
    def alignments(self) -> Path:
        return self.align_dir / "ali" / f"{self.subset}.scp"


def make_egs(
    features_dir: Path,
    kind: str,
    align_dir: Path,
    out: Path,
    *,
    sets: Sequence[str] = ("train", "dev"),
    chunk: int = 21,
    dtype: str = "float16",
    shard_frames: int = 2_000_000,
    jobs: int = 1,
) -> EgsInfo:
    """Write the training examples of `sets` into `out` (see `store` for the files).

    features_dir, kind: as for `FeatureReader`. align_dir: has states.npz and ali/<set>.scp of graph labels.
    dtype: float16 or float32, of the stored features. shard_frames: frames after which a new shard begins.
    Utterances without an alignment (the aligner gave up on them) are left out, counted, and listed in
    `<out>/<set>/unaligned.txt`. InputError where an alignment does not fit its utterance or the states.
    """
    if dtype not in ("float16", "float32") or chunk < 1 or shard_frames < 1 or "train" not in sets:
        raise InputError("egs: dtype is float16 or float32, chunk and shard_frames are positive, sets has `train`")
    states = StateTable.load(align_dir / "states.npz")
    sizes: dict[str, dict[str, int]] = {}
    dim = 0
    for subset in sets:
        source = Source(features_dir, kind, align_dir, subset, out / subset, chunk, dtype)
        counts_P, sizes[subset], dim = _make_set(source, states, shard_frames, jobs)
        if subset == "train":
            np.save(out / "pdf_counts.npy", counts_P)
            log.info("%d of %d pdfs occur in the training set", np.count_nonzero(counts_P), states.num_pdfs)
    info = EgsInfo(kind=kind, dim=dim, num_pdfs=states.num_pdfs, chunk=chunk, sets=sizes)
    info.save(out)
    return info


def _make_set(
    source: Source, states: StateTable, shard_frames: int, jobs: int
) -> tuple[np.ndarray, dict[str, int], int]:
    """Write one set; returns its pdf counts, its sizes and the feature dimension."""
    reader = FeatureReader(source.features_dir, source.kind, source.subset)
    source.out.mkdir(parents=True, exist_ok=True)
    aligned = _pair(source, reader.utterances)
    parts = np.array_split(np.array(aligned, dtype=object), max(1, min(len(aligned), 4 * jobs)))
    lengths = parallel_map(partial(_lengths, source), [list(p) for p in parts], jobs, f"lengths of {source.subset}")
    frames_U = np.concatenate(lengths)
    shard_U, begin_U = _layout(frames_U, shard_frames)
    bounds = np.flatnonzero(np.diff(shard_U, prepend=-1, append=shard_U[-1] + 1))
    work = [(k, aligned[a:b], frames_U[a:b]) for k, (a, b) in enumerate(itertools.pairwise(bounds))]
    counts = parallel_map(partial(_write_shard, source, states), work, jobs, f"examples of {source.subset}")
    Index(aligned, shard_U, begin_U, frames_U).save(source.out)
    log.info("%s: %d utterances, %d frames in %d shards", source.subset, len(aligned), frames_U.sum(), len(work))
    sizes = {
        "utterances": len(aligned),
        "frames": int(frames_U.sum()),
        "unaligned": len(reader.utterances) - len(aligned),
    }
    return np.sum(counts, axis=0), sizes, reader.dim


def _pair(source: Source, utterances: list[str]) -> list[str]:
    """The utterances that have both features and an alignment; the others are listed in a file."""
    aligned = set(_load_scp(source.alignments))
    stray = sorted(aligned - set(utterances))
    if stray:
        raise InputError(
            f"{source.alignments}: utterance {stray[0]} (of {len(stray)} such) has an alignment but no features in "
            f"{source.features_dir}; run stage features again"
        )
    missing = [u for u in utterances if u not in aligned]
    (source.out / "unaligned.txt").write_text("".join(f"{u}\n" for u in missing), encoding="utf-8")
    if missing:
        log.warning("%s: %d of %d utterances have no alignment and are left out (the first: %s); see %s",
                    source.subset, len(missing), len(utterances), missing[0], source.out / "unaligned.txt")  # fmt: skip
    if len(missing) == len(utterances):
        raise InputError(f"{source.alignments}: aligns none of the {len(utterances)} utterances; run stage align again")
    return [u for u in utterances if u in aligned]


def _load_scp(path: Path) -> dict[str, np.ndarray]:
    """A lazy map from utterance to alignment."""
    try:
        return kaldiio.load_scp(str(path))
    except Exception as error:  # kaldiio raises whatever the damage leads to
        raise InputError(f"{path}: not a readable list of alignments ({error}); run stage align again") from error


def _alignment(alignments: dict[str, np.ndarray], utterance: str, path: Path) -> np.ndarray:
    try:
        labels_T = np.asarray(alignments[utterance])
    except Exception as error:  # as above
        raise InputError(f"{path}: utterance {utterance}: unreadable ({error}); run stage align again") from error
    if labels_T.ndim != 1 or not len(labels_T) or not np.issubdtype(labels_T.dtype, np.integer):
        raise InputError(f"{path}: utterance {utterance}: not a vector of labels; run stage align again")
    return labels_T


def _lengths(source: Source, utterances: list[str]) -> np.ndarray:
    alignments = _load_scp(source.alignments)
    return np.array([len(_alignment(alignments, u, source.alignments)) for u in utterances], dtype=np.int64)


def _layout(frames_U: np.ndarray, shard_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """The shard of each utterance and its first row there; a shard ends once it holds `shard_frames`."""
    begin_U = np.cumsum(frames_U) - frames_U
    _, shard_U = np.unique(begin_U // shard_frames, return_inverse=True)
    first_K = begin_U[np.flatnonzero(np.diff(shard_U, prepend=-1))]
    return shard_U.astype(np.int32), begin_U - first_K[shard_U]


def _write_shard(source: Source, states: StateTable, work: tuple[int, list[str], np.ndarray]) -> np.ndarray:
    """Write features.<k>.npy and targets.<k>.npy; returns the pdf counts [P]."""
    shard, utterances, frames_U = work
    reader = FeatureReader(source.features_dir, source.kind, source.subset)
    alignments = _load_scp(source.alignments)
    rows = int(frames_U.sum()) + source.chunk
    target_dtype = np.int16 if states.num_pdfs <= np.iinfo(np.int16).max else np.int32
    open_shard = partial(np.lib.format.open_memmap, mode="w+")
    x_TF = open_shard(source.out / f"features.{shard}.npy", dtype=source.dtype, shape=(rows, reader.dim))
    y_T = open_shard(source.out / f"targets.{shard}.npy", dtype=target_dtype, shape=(rows,))
    begin = 0
    for utterance, frames in zip(utterances, frames_U.tolist(), strict=True):
        part = slice(begin, begin + frames)
        y_T[part] = _pdfs(_alignment(alignments, utterance, source.alignments), utterance, states, source)
        x_TF[part] = _features(reader, utterance, frames, source)
        begin += frames
    counts_P = np.bincount(y_T[:begin], minlength=states.num_pdfs).astype(np.int64)
    x_TF.flush()
    y_T.flush()
    return counts_P


def _pdfs(labels_T: np.ndarray, utterance: str, states: StateTable, source: Source) -> np.ndarray:
    if labels_T.min() < 1 or labels_T.max() > len(states.labels_L3):
        raise InputError(
            f"{source.alignments}: utterance {utterance}: label {labels_T.max()} is not among the "
            f"{len(states.labels_L3)} of states.npz; the two are of different runs: run stage align again"
        )
    return states.pdf_L[labels_T - 1]


def _features(reader: FeatureReader, utterance: str, frames: int, source: Source) -> np.ndarray:
    x_TF = reader[utterance]
    if len(x_TF) != frames:
        raise InputError(
            f"{source.alignments}: utterance {utterance}: {frames} frames aligned, but its features have "
            f"{len(x_TF)}; run the stages features and align again"
        )
    limit = float(np.finfo(source.dtype).max)
    if not np.isfinite(x_TF).all() or np.abs(x_TF).max() > limit:
        raise InputError(
            f"{source.features_dir}: utterance {utterance}: features are not finite numbers below {limit:g}"
        )
    return x_TF
