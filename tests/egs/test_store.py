from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from asr_am.egs.loader import Loader, feature_moments
from asr_am.egs.store import EgsSet, load_pdf_counts
from asr_am.errors import InputError
from tests.support.egs_examples import CHUNK, write_examples


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_examples(tmp_path / "egs")


def test_what_was_written_is_read(directory: Path) -> None:
    egs = EgsSet(directory, "train")
    assert egs.frames == 147 and len(egs.features) == 2 and isinstance(egs.features[0], np.memmap)
    assert load_pdf_counts(directory).sum() == 60


@pytest.mark.parametrize(
    "name", ["egs.json", "pdf_counts.npy", "train/index.npz", "train/features.1.npy", "train/targets.0.npy"]
)
def test_a_missing_empty_or_truncated_file_is_named(directory: Path, name: str) -> None:
    path = directory / name
    content = path.read_bytes()
    for damaged in (None, b"", content[: len(content) // 2]):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(InputError, match=path.name):
            EgsSet(directory, "train")
            load_pdf_counts(directory)
        path.write_bytes(content)


def test_random_damage_is_an_input_error_or_harmless(directory: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    files = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    for trial in range(60):
        copy = tmp_path / f"copy{trial}"
        shutil.copytree(directory, copy)
        victim = copy / rng.choice(files)
        content = bytearray(victim.read_bytes())
        for _ in range(4):
            content[rng.randrange(min(len(content), 200))] = rng.randrange(256)
        victim.write_bytes(content)
        try:
            EgsSet(copy, "train")
            load_pdf_counts(copy)
        except InputError:
            pass
        shutil.rmtree(copy)


def test_files_that_do_not_fit_each_other(directory: Path) -> None:
    with pytest.raises(InputError, match="no set 'test'"):
        EgsSet(directory, "test")
    info = json.loads((directory / "egs.json").read_text())
    (directory / "egs.json").write_text(json.dumps({**info, "dim": 7}))
    with pytest.raises(InputError, match=r"not what egs\.json says"):
        EgsSet(directory, "train")
    (directory / "egs.json").write_text(json.dumps({**info, "chunk": 9}))
    with pytest.raises(InputError, match="train-03 lies beyond the end of its shard"):
        EgsSet(directory, "train")
    (directory / "egs.json").write_text(json.dumps(info))
    shutil.copy(directory / "dev" / "targets.0.npy", directory / "train" / "targets.1.npy")
    with pytest.raises(InputError, match="different numbers of features and targets"):
        EgsSet(directory, "train")


@pytest.mark.parametrize(
    "changes",
    [{"dim": 1.5}, {"chunk": True}, {"chunk": 10**30}, {"num_pdfs": 0}, {"sets": 3}, {"sets": {"train": 7}},
     {"streams": {"logmel": "40"}}, {"kind": None}],
)  # fmt: skip
def test_an_impossible_value_in_egs_json_is_an_input_error(directory: Path, changes: dict[str, object]) -> None:
    path = directory / "egs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=r"egs\.json: .*run stage 5"):
        EgsSet(directory, "train")


def test_damage_in_one_of_several_sets_is_found_there(directory: Path) -> None:
    path = directory / "dev/features.0.npy"
    content = bytearray(path.read_bytes())
    content[-np.load(path).nbytes] ^= 1
    path.write_bytes(content)
    egs = EgsSet(directory, "train", "dev")
    assert len(egs.index.utterances) == sum(len(EgsSet(directory, name).index.utterances) for name in ("train", "dev"))
    with pytest.raises(InputError, match=r"/dev: utterance dev-\d+ is damaged in features\.0\.npy"):
        feature_moments(egs)


@pytest.mark.parametrize("name", ["features.0.npy", "features.1.npy", "targets.0.npy", "targets.1.npy"])
def test_every_changed_bit_of_an_utterance_is_found(directory: Path, name: str) -> None:
    path, rng = directory / "train" / name, random.Random(2)
    content = path.read_bytes()
    header = len(content) - np.load(path).nbytes
    padding = np.load(path)[-CHUNK:].nbytes
    for _ in range(30):
        damaged = bytearray(content)
        damaged[rng.randrange(header, len(content) - padding)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        egs = EgsSet(directory, "train")
        loader = Loader(egs, batch_size=4)
        with pytest.raises(InputError, match=r"utterance train-\d+ is (damaged in features|outside 0\.\.5)"):
            list(loader.batches(plan := loader.plan(0), range(len(plan))))
        with pytest.raises(InputError, match="damaged"):
            feature_moments(egs)
    path.write_bytes(content)
    assert len(list(loader.batches(plan, range(len(plan))))) == len(plan)
