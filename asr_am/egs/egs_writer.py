"""Stage egs: pair the features of every utterance with its pdfs and store them in shards.

Shapes: T frames, F feature dimension, L graph labels, P pdfs, U utterances.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from asr_am.egs.ivector_store import write_vectors
from asr_am.egs.stateless_rng import string_keys
from asr_am.egs.store import EgsInfo, Index
from asr_am.errors import InputError
from asr_am.features.fusion import InputReader, middle_labels, stack_frames, stack_of
from asr_am.hmm.alignments import read_alignments
from asr_am.hmm.states import StateTable
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)

BLOCK = 100  # utterances whose features one task of a worker reads


@dataclass(frozen=True)
class Source:
    """Where the features of one set come from and go to; plain values, so that it travels to a worker."""

    features_dir: Path
    kind: str
    subset: str
    out: Path
    random_phase: bool = False

    @property
    def stack(self) -> int:
        return stack_of(self.kind)

    def phase(self, utterance: str) -> int:
        """The frame at which the first stack begins."""
        return int(string_keys([utterance])[0] % np.uint64(self.stack)) if self.random_phase else 0

    def open(self) -> InputReader:
        return InputReader(self.features_dir, self.kind, self.subset)


@lru_cache(maxsize=1)
def _open_once(source: Source) -> InputReader:
    """One reader for all the tasks of a worker: opening it reads the lists of the whole set."""
    return source.open()


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
    random_phase: bool = False,
    jobs: int = 1,
) -> EgsInfo:
    """Write the training examples of `sets` into `out` (see `store` for the files).

    features_dir, kind: as for `InputReader`. align_dir: has states.npz and ali/<set>.ark of graph labels.
    dtype: float16 or float32, of the stored features. shard_frames: frames after which a new shard begins. Where `kind`
    stacks frames, a stack is a frame of the examples; random_phase: each training utterance is stacked from its first,
    second or third frame on, by its name.
    Utterances without an alignment (the aligner gave up on them) are left out, counted, and listed in
    `<out>/<set>/unaligned.txt`. InputError where an alignment does not fit its utterance or the states.
    """
    if dtype not in ("float16", "float32") or chunk < 1 or shard_frames < 1 or "train" not in sets:
        raise InputError("egs: dtype is float16 or float32, chunk and shard_frames are positive, sets has `train`")
    states = StateTable.load(align_dir / "states.npz")
    sizes: dict[str, dict[str, int]] = {}
    for subset in sets:
        source = Source(features_dir, kind, subset, out / subset, random_phase and subset == "train")
        source.out.mkdir(parents=True, exist_ok=True)
        reader = source.open()
        index, counts_P = _write_targets(source, align_dir / "ali", states, chunk, shard_frames)
        unaligned = _check_pairs(index.utterances, reader.utterances, source)
        if reader.vectors:
            write_vectors(source.out, reader.vectors, index.utterances)
        frame_dim = reader.dim - (reader.vectors.dim if reader.vectors else 0)
        _write_features(source, index, frame_dim, chunk, dtype, jobs)
        index.save(source.out)
        frames = int(index.frames_U.sum())
        sizes[subset] = {"utterances": len(index.utterances), "frames": frames, "unaligned": unaligned}
        log.info("%s: %d utterances, %d frames", subset, len(index.utterances), frames)
        if subset == "train":
            np.save(out / "pdf_counts.npy", counts_P)
            log.info("%d of %d pdfs occur in the training set", np.count_nonzero(counts_P), states.num_pdfs)
    period = reader.vectors.period if reader.vectors else 0
    info = EgsInfo(
        kind, reader.dim, states.num_pdfs, chunk, sizes, streams=reader.streams, period=period,
        senones=senone_digest(align_dir, states),
    )  # fmt: skip
    info.save(out)
    return info


def senone_digest(align_dir: Path, states: StateTable) -> str:
    """The same for alignments with the same senones, and for no others: tied states, and the tree that ties them."""
    tree = align_dir / "tree.json"
    return hashlib.sha256(states.labels_L3.tobytes() + (tree.read_bytes() if tree.exists() else b"")).hexdigest()[:16]


def _write_targets(
    source: Source, ali: Path, states: StateTable, chunk: int, shard_frames: int
) -> tuple[Index, np.ndarray]:
    """Write targets.<k>.npy shard by shard; returns the index of all shards and the pdf counts [P]."""
    out, subset = source.out, source.subset
    dtype = np.int16 if states.num_pdfs <= np.iinfo(np.int16).max else np.int32
    utterances: list[str] = []
    places: list[tuple[int, int, int]] = []  # shard, begin, frames
    counts_P = np.zeros(states.num_pdfs, dtype=np.int64)
    pending: list[np.ndarray] = []
    shard, begin = 0, 0
    for utterance, pdfs_T in _read_pdfs(ali, subset, states):
        if begin >= shard_frames:
            np.save(out / f"targets.{shard}.npy", np.concatenate([*pending, np.zeros(chunk, dtype)]))
            shard, begin, pending = shard + 1, 0, []
        pdfs_T = middle_labels(pdfs_T, source.stack, source.phase(utterance))
        utterances.append(utterance)
        places.append((shard, begin, len(pdfs_T)))
        pending.append(pdfs_T.astype(dtype))
        counts_P += np.bincount(pdfs_T, minlength=states.num_pdfs)
        begin += len(pdfs_T)
    if not utterances:
        raise InputError(f"{ali}: no utterance of {subset} is aligned; run stage 3 (align) again")
    np.save(out / f"targets.{shard}.npy", np.concatenate([*pending, np.zeros(chunk, dtype)]))
    shard_U, begin_U, frames_U = np.array(places, dtype=np.int64).T
    return Index(utterances, shard_U, begin_U, frames_U), counts_P


def _read_pdfs(ali: Path, subset: str, states: StateTable) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (utterance, pdfs [T]), checked against the states."""
    seen = set()
    for utterance, labels_T in read_alignments(ali, subset):
        where = f"{ali / subset}.ark: utterance {utterance}"
        if utterance in seen:
            raise InputError(f"{where} occurs twice; run stage 3 (align) again")
        seen.add(utterance)
        if not len(labels_T) or labels_T.min() < 1 or labels_T.max() > len(states.labels_L3):
            raise InputError(
                f"{where}: is empty or has labels outside 1..{len(states.labels_L3)}, those of states.npz; "
                "run stage 3 (align) again"
            )
        yield utterance, states.pdf_L[labels_T - 1]


def _check_pairs(aligned: list[str], utterances: list[str], source: Source) -> int:
    """List the utterances without an alignment in a file, count them; InputError for an alignment without features."""
    stray = sorted(set(aligned) - set(utterances))
    if stray:
        raise InputError(
            f"{source.features_dir}: {source.subset} has no features for utterance {stray[0]} (of {len(stray)} such), "
            "which is aligned; run the stages features and align again"
        )
    missing = sorted(set(utterances) - set(aligned))
    path = source.out / "unaligned.txt"
    path.write_text("".join(f"{utterance}\n" for utterance in missing), encoding="utf-8")
    if missing:
        counts = len(missing), len(utterances)
        log.warning("%s: %d of %d utterances have no alignment and are left out: %s", source.subset, *counts, path)
    return len(missing)


def _write_features(source: Source, index: Index, dim: int, chunk: int, dtype: str, jobs: int) -> None:
    """Write features.<k>.npy, blocks of utterances in parallel; the `chunk` rows at the end of a shard stay zero."""
    for shard in range(int(index.shard_U.max()) + 1):
        rows = int(index.frames_U[index.shard_U == shard].sum()) + chunk
        path = source.out / f"features.{shard}.npy"
        np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(rows, dim)).flush()
    blocks = [index.part(begin, begin + BLOCK) for begin in range(0, len(index.utterances), BLOCK)]
    _open_once.cache_clear()  # the files may have changed since this process read them
    parallel_map(partial(_write_block, source), blocks, jobs, f"examples of {source.subset}")


def _write_block(source: Source, block: Index) -> None:
    reader = _open_once(source)
    rows = zip(block.utterances, *(c.tolist() for c in (block.shard_U, block.begin_U, block.frames_U)), strict=True)
    for utterance, shard, begin, frames in rows:
        shard_TF = np.load(source.out / f"features.{shard}.npy", mmap_mode="r+")
        x_TF = stack_frames(reader.frames(utterance), source.stack, source.phase(utterance))
        if len(x_TF) != frames:
            raise InputError(
                f"{source.features_dir}: utterance {utterance} of {source.subset}: {len(x_TF)} frames of features, but "
                f"{frames} aligned; run the stages features and align again"
            )
        if not np.isfinite(x_TF).all() or np.abs(x_TF).max() > np.finfo(shard_TF.dtype).max:
            raise InputError(
                f"{source.features_dir}: utterance {utterance}: features that {shard_TF.dtype} cannot hold; "
                "use egs.dtype=float32, or look at its recording"
            )
        shard_TF[begin : begin + frames] = x_TF
