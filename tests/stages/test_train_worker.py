"""How a learner's process ends, from which its supervisor learns what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.stages import train_worker as learner


@pytest.mark.parametrize(
    ("error", "status"), [(InputError("mend it"), 1), (RuntimeError("no such GPU"), 70), (None, 0)]
)
def test_a_mistake_of_the_user_is_told_from_a_failure(
    error: Exception | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn(*_: object) -> None:
        if error:
            raise error

    ends: list[int] = []
    config = tmp_path / "config.yaml"
    config.write_text(f"exp: {tmp_path}\ncorpus: {{name: toy}}\n")
    monkeypatch.setattr(learner, "learn", learn)
    monkeypatch.setattr(learner, "end_process", ends.append)
    monkeypatch.setattr(sys, "argv", ["learner", str(config)])
    monkeypatch.setenv("RANK", "3")
    learner.main()
    assert ends == [status]
    said = (tmp_path / "toy/log/train-learner3.log").read_text()
    assert str(error or "") in said and ("Traceback" in said) == (status == 70)
