"""Key files: creation, protection, and when a run needs one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.security import KEYGEN_CMD, choose_key, make_key_file, read_key_file
from asr_am.distributed.runtime.worker_process import free_port
from asr_am.errors import InputError

FAR = "192.0.2.1:29500"  # an address reserved for documentation
NOTHING = [sys.executable, "-c", ""]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    make_key_file(tmp_path / "team.key")
    return tmp_path / "team.key"


def test_the_documented_command_makes_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "team.key"
    command = [sys.executable, *KEYGEN_CMD.split()[1:-1], str(path)]
    subprocess.run(command, check=True, umask=0)
    assert path.stat().st_mode & 0o777 == 0o600 and len(read_key_file(path)) == 40
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "File exists" in again.stderr and len(read_key_file(path)) == 40
    make_key_file(tmp_path / "other.key")
    assert read_key_file(tmp_path / "other.key") != read_key_file(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o610])
def test_a_file_that_others_have_access_to_is_rejected(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(InputError, match=rf"other users have access to it \(mode {mode:o}\): chmod 600 {key_file}"):
        read_key_file(key_file)


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 40, b" " * 40, b"a" * 41, b"a" * 40 + b"\nb\n"])
def test_what_is_no_key_is_rejected(key_file: Path, content: bytes) -> None:
    key_file.write_bytes(content)
    with pytest.raises(InputError, match=rf"key_file={key_file}: is not a key file: create a new one with python -m"):
        read_key_file(key_file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing: cannot be read .*create one with python -m"):
        read_key_file(tmp_path / "nothing")
    with pytest.raises(InputError, match="give the name of a new file"):
        make_key_file(tmp_path / "no folder" / "key")


def test_what_others_could_reach_is_encrypted_unless_asked(key_file: Path) -> None:
    key = read_key_file(key_file)
    for private in (True, False):
        assert choose_key(str(key_file), None, private=private, one_start=False) == key
        assert choose_key(None, False, private=private, one_start=False) is None
    assert choose_key(None, None, private=True, one_start=False) is None
    fresh = {choose_key(None, encrypt, private=False, one_start=True) for encrypt in (None, None, True)}
    assert len(fresh) == 3 and None not in fresh
    for encrypt, private in ((None, False), (True, True), (True, False)):
        with pytest.raises(InputError, match=r"launcher\.key_file is missing: .* launcher\.encrypt=false"):
            choose_key(None, encrypt, private=private, one_start=False)
    with pytest.raises(InputError, match="give only one of them"):
        choose_key(str(key_file), False, private=True, one_start=True)


@pytest.mark.parametrize("node", [0, 1])
def test_several_hosts_do_not_start_without_a_key(node: int, key_file: Path) -> None:
    with pytest.raises(InputError, match=r"launcher\.key_file is missing"):
        launch(NOTHING, 1, synchronous=False, nodes=2, node_rank=node, address=FAR)
    key_file.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        launch(NOTHING, 1, synchronous=False, nodes=2, node_rank=node, address=FAR, key_file=str(key_file))


def test_learners_of_torchrun_on_several_hosts_do_not_start_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29400"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"launcher\.key_file is missing"):
        connect(timeout=0.1)


def test_a_key_of_another_run_does_not_reach_the_learners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_AM_KEY", "of another run")
    program = "import os, sys; sys.exit(3 * ('ASR_AM_KEY' in os.environ))"
    launch([sys.executable, "-c", program], 2, synchronous=True)


def test_two_keys_do_not_meet(tmp_path: Path) -> None:
    """The host that waits for the other says what may be wrong."""
    errors: dict[int, str] = {}
    address = f"127.0.0.1:{free_port('127.0.0.1')}"

    def start(node: int) -> None:
        make_key_file(tmp_path / f"{node}.key")
        try:
            launch(
                NOTHING, 1, synchronous=True, nodes=2, node_rank=node, address=address, timeout=2,
                key_file=str(tmp_path / f"{node}.key"),
            )  # fmt: skip
        except InputError as error:
            errors[node] = str(error)

    threads = [threading.Thread(target=start, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "connections were rejected: give all hosts the same key_file" in errors[0]
    assert "and the same key_file" in errors[1]
