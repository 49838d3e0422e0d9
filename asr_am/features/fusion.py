"""Network inputs: several feature kinds side by side, i-vectors, and stacking of frames for a low frame rate.

A kind is one feature kind, or several joined by `+`, which are concatenated in this order in every frame.
`fmllr+ivector+logmel` is the input of Zhang et al. (ICASSP 2019, section 4.2): fMLLR (40), i-vector (100), log-mel with
deltas and double deltas (120), 260 in all. Any subset in any order works, except `ivector` alone, which has no frames:
i-vectors are stored per speaker or segment and added to the frames when these are read.

A kind that ends in `_lfr` has a low frame rate: STACK adjacent frames are stacked into one, as Ladkat et al.
(Interspeech 2019, section 3.2) do. It cannot be joined with others. Features on disk, alignments and decoding graphs
keep the full rate. Stage egs stacks features and takes the label of the middle frame of each stack. Decoding repeats
the score of a stack for each of its frames, so HMM topology, LM weights and word times are those of the full rate.

Shapes: T frames, K stacks, F features of all frame streams, V all inputs, S dimensions of the i-vector, P pdfs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.features.adapted import Features, open_features
from asr_am.features.ivector.ivector_archive import IvectorReader

STACK = 3
SUFFIX = "_lfr"
IVECTOR = "ivector"


def stack_of(kind: str) -> int:
    """Returns the number of frames that models for `kind` take as one."""
    return STACK if kind.endswith(SUFFIX) else 1


def base_of(kind: str) -> str:
    """Returns the kind on disk whose frames are stacked."""
    return kind.removesuffix(SUFFIX)


def stack_frames(x_TF: np.ndarray, size: int, phase: int = 0) -> np.ndarray:
    """Stacks frames from `phase` on, `size` side by side. The last frame is repeated to fill the last stack.

    Returns:
        [K, size F] with K = ceil((T - phase) / size).
    """
    if size == 1:
        return x_TF
    count = -(-(len(x_TF) - phase) // size)
    frame_K = np.arange(phase, phase + count * size)
    return x_TF[np.minimum(frame_K, len(x_TF) - 1)].reshape(count, -1)


def middle_labels(labels_T: np.ndarray, size: int, phase: int = 0) -> np.ndarray:
    """Returns the label of the middle frame of each stack, [K] (of the last frame, if the stack has no middle)."""
    middle_K = np.arange(phase, len(labels_T), size) + size // 2
    return labels_T[np.minimum(middle_K, len(labels_T) - 1)]


def repeat_stacks(scores_KP: np.ndarray, size: int, frames: int) -> np.ndarray:
    """Repeats the scores of each stack (of phase 0) for all of its frames, to [frames, P]."""
    return scores_KP[:frames] if size == 1 else np.repeat(scores_KP, size, axis=0)[:frames]


def streams_of(kind: str) -> list[str]:
    """Returns the kinds that `kind` joins. Raises InputError if one is repeated or empty, or if none has frames."""
    names = kind.split("+")
    if len(names) > 1 and (stacked := [name for name in names if stack_of(name) > 1]):
        raise InputError(f"features {kind!r}: {stacked[0]} cannot be joined with others; use it alone")
    if len(set(names)) < len(names) or "" in names or not set(names) - {IVECTOR}:
        raise InputError(f"features {kind!r}: must be different kinds joined by `+`, one of them other than {IVECTOR}")
    return names


class InputReader:
    """The inputs of one set by utterance id. Holds no open file, so it can be pickled and used after a fork.

    Attributes:
        utterances: utterance ids, sorted.
        streams: width of each kind, in order.
        stack: frames that models take as one.
        dim: V, times `stack`.
        vectors: the i-vectors, None if the kind has none.
    """

    def __init__(self, features_dir: Path, kind: str, subset: str) -> None:
        """Raises InputError if files of a stream are missing, or if streams have different utterances."""
        names = streams_of(kind)
        self._frames: dict[str, Features] = {
            name: open_features(features_dir, base_of(name), subset) for name in names if name != IVECTOR
        }
        (first_name, self._first), *others = self._frames.items()
        for name, reader in others:
            if different := set(reader.utterances) ^ set(self._first.utterances):
                raise InputError(
                    f"{features_dir}: utterance {min(different)} of {subset} has only one of {first_name} and {name}; "
                    "run the stages that write them again"
                )
        self.utterances = self._first.utterances
        self.vectors = IvectorReader(features_dir / IVECTOR, subset, self.speaker) if IVECTOR in names else None
        widths = {name: reader.dim for name, reader in self._frames.items()}
        widths |= {IVECTOR: self.vectors.dim} if self.vectors else {}
        self.stack = stack_of(kind)
        self.streams = {name: self.stack * widths[name] for name in names}
        self.dim = sum(self.streams.values())

    def speaker(self, utterance: str) -> str:
        """Returns the speaker of `utterance`."""
        return self._first.speaker(utterance)

    def __contains__(self, utterance: str) -> bool:
        return utterance in self._first

    def frames(self, utterance: str) -> np.ndarray:
        """Returns the frame streams without the i-vector, not stacked, float32 [T, F].

        Raises InputError if their lengths differ.
        """
        found = {name: reader[utterance] for name, reader in self._frames.items()}
        lengths = {name: len(x_TF) for name, x_TF in found.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(
                f"utterance {utterance}: numbers of frames differ, {lengths}; run stage 2 (features) again"
            )
        return np.concatenate(list(found.values()), axis=1) if len(found) > 1 else found[next(iter(found))]

    def __getitem__(self, utterance: str) -> np.ndarray:
        """Returns all inputs, not stacked, float32 [T, V].

        Raises InputError for an unknown utterance, a speaker without i-vector, or a damaged archive.
        """
        x_TF = self.frames(utterance)
        if self.vectors is None:
            return x_TF
        at = columns(self.streams)[IVECTOR].start
        parts = (x_TF[:, :at], self.vectors.per_frame(utterance, len(x_TF)), x_TF[:, at:])
        return np.concatenate(parts, axis=1)


def columns(streams: Mapping[str, int]) -> dict[str, slice]:
    """Returns the columns of each stream, given the width of each in order."""
    ends = itertools.accumulate(streams.values())
    return {name: slice(end - width, end) for (name, width), end in zip(streams.items(), ends, strict=True)}
