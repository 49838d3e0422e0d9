"""scripts/setup.sh where .venv is complete. That it makes one is shown by every run of the tests."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "scripts/setup.sh", "scripts/requirements.lock")


@pytest.mark.parametrize(
    ("python", "status", "message"),
    [(sys.executable, 0, ""), ("/nowhere/python", 1, "setup: .venv/bin/python: you cannot run it (/nowhere/python); ")],
)
def test_a_python_that_the_user_cannot_run_is_one_line(tmp_path: Path, python: str, status: int, message: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    contents = b"".join((ROOT / name).read_bytes() for name in FILES)
    (tmp_path / f".venv/.set-up-{hashlib.sha256(contents).hexdigest()[:16]}").touch()
    (tmp_path / ".venv/bin/python").symlink_to(python)
    done = subprocess.run([tmp_path / "scripts/setup.sh"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", status)
    assert done.stderr.startswith(message)
