"""The exit status of a worker process, which tells its launcher what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.stages import train_worker


@pytest.mark.parametrize(
    ("error", "status"),
    [(InputError("mend it"), 1), (RuntimeError("no such GPU"), 70), (KeyboardInterrupt(), 70), (None, 0)],
)
def test_exit_status_of_a_users_mistake_and_of_a_failure(
    error: BaseException | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_worker(*_: object) -> None:
        if error:
            raise error

    ends: list[int] = []
    config = tmp_path / "toy/train/run/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("corpus: {name: toy}\n")
    monkeypatch.setattr(train_worker.TrainConfig, "parse", lambda *_: None)
    monkeypatch.setattr(train_worker, "run_worker", run_worker)
    monkeypatch.setattr(train_worker, "end_process", ends.append)
    monkeypatch.setattr(sys, "argv", ["train_worker", str(config)])
    monkeypatch.setenv("RANK", "3")
    train_worker.main()
    assert ends == [status]
    log = tmp_path / "toy/log/train-learner3.log"
    logged = log.read_text() if log.exists() else ""
    assert str(error or "") in logged and ("Traceback" in logged) == isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    "text", ["", "corpus: {name: toy}", "train: [", "\x00", "launcher: 7\n" * 2, "- 1", "${", "a: " + "9" * 100_000]
)
def test_a_damaged_configuration_is_one_short_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml") as caught:
        train_worker.read_config(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
