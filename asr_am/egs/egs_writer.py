"""Stage egs: pairs the features of every utterance with its pdfs and writes them to shards.

Shapes: T frames, F feature dimension, L graph labels, P pdfs, U utterances.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from asr_am import disk
from asr_am.data.npz import read_npz, write_npz
from asr_am.disk import write_at
from asr_am.egs.ivector_store import write_ivectors
from asr_am.egs.stateless_rng import string_keys
from asr_am.egs.store import EgsInfo, Index, crc32_of
from asr_am.errors import InputError
from asr_am.features.fusion import InputReader, middle_labels, stack_frames, stack_of
from asr_am.hmm.alignments import read_alignments
from asr_am.hmm.states import StateTable
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)

BLOCK = 100  # utterances of one task of a worker process


@dataclass(frozen=True)
class Source:
    """Input and output of one set, in plain values that can be pickled.

    Attributes:
        kind: Kind of features, as for `InputReader`.
        random_phase: Begins the first stack at a frame that depends on the utterance's name.
    """

    features_dir: Path
    kind: str
    subset: str
    out: Path
    random_phase: bool = False

    @property
    def stack(self) -> int:
        return stack_of(self.kind)

    def phase(self, utterance: str) -> int:
        """Returns the frame at which the first stack begins."""
        return int(string_keys([utterance])[0] % np.uint64(self.stack)) if self.random_phase else 0

    def open(self) -> InputReader:
        return InputReader(self.features_dir, self.kind, self.subset)


@lru_cache(maxsize=1)
def _open_once(source: Source) -> InputReader:
    """Caches one reader for all tasks of a worker, as opening it reads the lists of the whole set."""
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
    """Writes the training examples of several sets (see `store` for the files).

    Utterances that could not be aligned are skipped, counted, and listed in `<out>/<set>/unaligned.txt`. If `kind`
    stacks frames, a frame of the examples is a stack.

    Args:
        kind: Kind of features, as for `InputReader`.
        align_dir: Folder with states.npz, and graph labels in ali/<set>.ark.
        sets: Names of the sets. Must contain `train`.
        chunk: Frames of a training chunk.
        dtype: Type of the stored features, float16 or float32.
        shard_frames: Number of frames after which a new shard begins.
        random_phase: Stacks a training utterance from its first, second or third frame on, depending on its name.

    Raises:
        InputError: An alignment does not fit its utterance or the states, or an option is not valid.
    """
    if dtype not in ("float16", "float32") or chunk < 1 or shard_frames < 1 or "train" not in sets:
        raise InputError(
            "egs: dtype must be float16 or float32, chunk and shard_frames at least 1, and sets must contain `train`"
        )
    states = StateTable.load(align_dir / "states.npz")
    sizes: dict[str, dict[str, int]] = {}
    for subset in sets:
        source = Source(features_dir, kind, subset, out / subset, random_phase and subset == "train")
        source.out.mkdir(parents=True, exist_ok=True)
        reader = source.open()
        index, counts_P = _write_targets(source, align_dir / "ali", states, chunk, shard_frames)
        unaligned = _check_pairs(index.utterances, reader.utterances, source)
        if reader.vectors:
            write_ivectors(source.out, reader.vectors, index.utterances)
        frame_dim = reader.dim - (reader.vectors.dim if reader.vectors else 0)
        index = _write_features(source, index, frame_dim, chunk, dtype, jobs)
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
    """Returns a digest of the senones: tied states, and the tree that ties them."""
    tree = align_dir / "tree.json"
    return hashlib.sha256(states.labels_L3.tobytes() + (tree.read_bytes() if tree.exists() else b"")).hexdigest()[:16]


def _write_targets(
    source: Source, ali: Path, states: StateTable, chunk: int, shard_frames: int
) -> tuple[Index, np.ndarray]:
    """Writes targets.<k>.npy shard by shard. Returns the index of all shards and the pdf counts [P]."""
    out, subset = source.out, source.subset
    dtype = np.int16 if states.num_pdfs <= np.iinfo(np.int16).max else np.int32
    utterances: list[str] = []
    rows: list[tuple[int, int, int]] = []  # shard, begin, frames
    counts_P = np.zeros(states.num_pdfs, dtype=np.int64)
    pending: list[np.ndarray] = []
    shard, begin = 0, 0
    for utterance, pdfs_T in _read_pdfs(ali, subset, states):
        if begin >= shard_frames:
            np.save(out / f"targets.{shard}.npy", np.concatenate([*pending, np.zeros(chunk, dtype)]))
            shard, begin, pending = shard + 1, 0, []
        pdfs_T = middle_labels(pdfs_T, source.stack, source.phase(utterance))
        utterances.append(utterance)
        rows.append((shard, begin, len(pdfs_T)))
        pending.append(pdfs_T.astype(dtype))
        counts_P += np.bincount(pdfs_T, minlength=states.num_pdfs)
        begin += len(pdfs_T)
    if not utterances:
        raise InputError(f"{ali}: no utterance of {subset} is aligned; run stage 3 (align) again")
    np.save(out / f"targets.{shard}.npy", np.concatenate([*pending, np.zeros(chunk, dtype)]))
    shard_U, begin_U, frames_U = np.array(rows, dtype=np.int64).T
    unknown_U = np.zeros(len(utterances), dtype=np.uint32)  # until the examples are written
    return Index(utterances, shard_U, begin_U, frames_U, unknown_U), counts_P


def _read_pdfs(ali: Path, subset: str, states: StateTable) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (utterance, pdfs [T]) after checking labels against the states."""
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
    """Writes a list of utterances without an alignment and returns their number.

    Raises InputError for an alignment without features.
    """
    stray = sorted(set(aligned) - set(utterances))
    if stray:
        raise InputError(
            f"{source.features_dir}: {source.subset} has alignments but no features for {len(stray)} utterances, such "
            f"as {stray[0]}; run stages 2 (features) and 3 (align) again"
        )
    missing = sorted(set(utterances) - set(aligned))
    path = source.out / "unaligned.txt"
    path.write_text("".join(f"{utterance}\n" for utterance in missing), encoding="utf-8")
    if missing:
        counts = len(missing), len(utterances)
        log.warning("%s: %d of %d utterances have no alignment and are left out: %s", source.subset, *counts, path)
    return len(missing)


def _write_features(source: Source, index: Index, dim: int, chunk: int, dtype: str, jobs: int) -> Index:
    """Writes features.<k>.npy in parallel, by blocks of utterances. Returns the index with checksums.

    The last `chunk` rows of a shard stay zero.
    """
    for shard in range(int(index.shard_U.max()) + 1):
        rows = int(index.frames_U[index.shard_U == shard].sum()) + chunk
        _create_array(source.out / f"features.{shard}.npy", dtype, (rows, dim))
    blocks = [index.part(begin, begin + BLOCK) for begin in range(0, len(index.utterances), BLOCK)]
    _open_once.cache_clear()  # files may have changed since this process read them
    finished = source.out / "finished"  # checksums of the blocks that a killed run has written
    finished.mkdir(exist_ok=True)
    write = partial(_write_once, source, finished)
    crc32s = parallel_map(write, blocks, jobs, f"examples of {source.subset}")
    disk.remove(finished)
    return replace(index, crc32_U=np.concatenate(crc32s))


def _create_array(path: Path, dtype: str, shape: tuple[int, int]) -> None:
    """Creates an array of zeros. One that a killed run has left stays: its finished blocks are not written again."""
    try:
        found = np.load(path, mmap_mode="r")
        if found.dtype == dtype and found.shape == shape:
            return
    except (OSError, ValueError):
        pass
    np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape).flush()


def _write_once(source: Source, finished: Path, block: Index) -> np.ndarray:
    """Returns the checksums of a block of utterances, which it writes unless a killed run has done so."""
    path = finished / f"{block.shard_U[0]}.{block.begin_U[0]}.npz"
    if path.exists():
        with suppress(InputError):  # after a power cut
            return read_npz(path, "crc32", remedy="")[0]
    crc32_U = _write_block(source, block)
    write_npz(path, {"crc32": crc32_U})
    return crc32_U


def _write_block(source: Source, block: Index) -> np.ndarray:
    """Writes the features of a block of utterances. Returns the checksums, uint32."""
    crc32s = []
    reader = _open_once(source)
    rows = zip(block.utterances, *(c.tolist() for c in (block.shard_U, block.begin_U, block.frames_U)), strict=True)
    for utterance, shard, begin, frames in rows:
        path = source.out / f"features.{shard}.npy"
        shard_TF = np.load(path, mmap_mode="r")
        x_TF = stack_frames(reader.frames(utterance), source.stack, source.phase(utterance))
        if len(x_TF) != frames:
            raise InputError(
                f"{source.features_dir}: utterance {utterance} of {source.subset}: {len(x_TF)} frames of features, but "
                f"{frames} aligned; run stages 2 (features) and 3 (align) again"
            )
        if not np.isfinite(x_TF).all() or np.abs(x_TF).max() > np.finfo(shard_TF.dtype).max:
            raise InputError(
                f"{source.features_dir}: utterance {utterance}: features out of the range of {shard_TF.dtype}; "
                "set egs.dtype=float32, or check its recording"
            )
        x_TF = np.ascontiguousarray(x_TF, shard_TF.dtype)
        write_at(path, shard_TF.offset + begin * shard_TF.strides[0], x_TF.tobytes())
        targets_T = np.load(source.out / f"targets.{shard}.npy", mmap_mode="r")
        crc32s.append(crc32_of(targets_T[begin : begin + frames], x_TF))
    return np.array(crc32s, dtype=np.uint32)
