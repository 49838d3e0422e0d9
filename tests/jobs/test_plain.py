from __future__ import annotations

import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lhotse import Recording, SupervisionSegment
from lhotse.audio import AudioSource
from lhotse.supervision import AlignmentItem

from asr_am.data.kaldi_archive import Entry
from asr_am.errors import InputError, one_line
from asr_am.features.spectral import SpectralOptions
from asr_am.hmm.adaptation import SpeakerTransform
from asr_am.jobs.plain import TREE, NotPlain, decode, encode


def test_values_survive() -> None:
    recording = Recording("r", [AudioSource("file", [0, 1], "a.wav")], 8000, 16000, 2.0).resample(16000)
    segment = SupervisionSegment("s", "r", 0.5, 1.0, 1, "YES", speaker="x").with_alignment(
        "word", [AlignmentItem("YES", 0.5, 0.25)]
    )
    value = [
        None, True, 3, 0.1 + 0.2, float("inf"), "é\n", (1, [2.5, ()]), {("a", 1): {"b": Path("x/y")}},
        SpectralOptions(8000, 23, 13), Entry("a.ark", 5, None, 7), recording, segment,
    ]  # fmt: skip
    found = decode(encode(value))
    assert found == value and [type(one) for one in found] == [type(one) for one in value]
    assert found[-2].transforms == recording.transforms and found[-1].alignment == segment.alignment


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((3, 2), np.float16)), np.array("text"),
        np.zeros((0, 4), np.int32), np.array([True]),
    ],
)  # fmt: skip
def test_arrays_survive(array: np.ndarray) -> None:
    found = decode(encode(SpeakerTransform("s", array, "full", float(np.float32(3)), 1.0)))
    assert isinstance(found, SpeakerTransform)
    assert found.transform.dtype == array.dtype and found.transform.tobytes() == array.tobytes()


def test_scalars_and_tensors_survive() -> None:
    scalar, tensor = decode(encode((np.float32(0.1), torch.arange(3, dtype=torch.float64))))
    assert type(scalar) is np.float32 and scalar == np.float32(0.1)
    assert tensor.dtype == torch.float64 and tensor.tolist() == [0, 1, 2]


def test_functions_of_ours_survive() -> None:
    assert decode(encode(one_line)) is one_line
    assert decode(encode(partial(one_line, message="a\nb")))() == "a b"


def test_equal_values_have_equal_encodings() -> None:
    """Checks that work which a killed run has finished is found again."""
    one, other = ([{"a": np.ones(3)}, SpectralOptions(8000, 23)] for _ in range(2))
    assert encode(one) == encode(other) != encode([{"a": np.ones(4)}, SpectralOptions(8000, 23)])


class Own:
    def method(self) -> None: ...


@pytest.mark.parametrize(
    "value",
    [
        object(), Own(), Own().method, {1}, b"bytes", range(3), lambda: None, os.system, json.dumps, Own, InputError,
        test_values_survive, np.array([object()]), [1, {"a": {2}}], partial(print), torch.nn.Parameter(torch.ones(1)),
    ],
)  # fmt: skip
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(NotPlain):
        encode(value)


@pytest.mark.parametrize(
    "tree",
    [
        {"function": ["os", "system"]}, {"function": ["asr_am.parallel", "os"]},
        {"function": ["asr_am.data.textfile", "replacing"]}, {"dataclass": ["subprocess", "Popen", {"dict": []}]},
        {"function": ["asr_am.errors", "InputError"]}, {"dataclass": ["asr_am.errors", "one_line", {"dict": []}]},
        {"dataclass": ["asr_am.errors", "InputError", {"dict": [["message", "x"]]}]},
        {"partial": [{"function": ["os", "system"]}, ["true"], {"dict": []}]},
        {"named": ["asr_am.errors", "one_line", ["x"]]}, {"pickle": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_cannot_name_anything_else(tree: Any) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **{TREE: np.frombuffer(json.dumps(tree).encode(), np.uint8)})
    with pytest.raises((NotPlain, ValueError)):
        decode(buffer.getvalue())


def test_pickles_are_not_loaded() -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **{TREE: np.frombuffer(b'{"array": "0"}', np.uint8), "0": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        decode(buffer.getvalue())
