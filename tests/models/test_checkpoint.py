from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from asr_am.errors import InputError
from asr_am.models.model_file import read_torch, write_torch


def test_one_wrong_bit_in_the_weights_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    write_torch({"x": torch.arange(1000.0)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.tensor(123.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"best\.pt: not readable \(checksum of .*data/0 is wrong\); train again"):
        read_torch(path, "train again")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "learner-0.pt"
    write_torch({"x": torch.ones(3)}, path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"learner-0\.pt: cannot be written \(No space left"):
        write_torch({"x": torch.zeros(3)}, path)
    assert read_torch(path, "")["x"].tolist() == [1.0] * 3 and os.listdir(tmp_path) == ["learner-0.pt"]
