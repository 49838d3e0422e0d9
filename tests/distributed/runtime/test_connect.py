"""Learners that cannot connect say why, within their timeout."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.private_dir import MARKER, check_private_dir, private_dir
from asr_am.distributed.runtime.rendezvous import PeerInfo, Rendezvous
from asr_am.distributed.runtime.security import new_key
from asr_am.distributed.runtime.worker_process import WorkerEnv, free_port
from asr_am.errors import ConnectionLost, InputError

SOON = 1.5  # seconds


def who(rank: int, size: int, port: int, host: str = "127.0.0.1", **more: str) -> WorkerEnv:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port), **more}
    return WorkerEnv.read(variables)


def peers(size: int) -> dict[int, PeerInfo]:
    """Returns what `meet` tells of each learner: the first two are on one GPU, the others have none."""
    return {rank: PeerInfo(f"tcp://mail:{rank}", "GPU-1" if rank < 2 else None) for rank in range(size)}


def meet(environment: WorkerEnv, seconds: float = SOON, kept: list[Rendezvous] | None = None) -> dict[int, PeerInfo]:
    rendezvous = Rendezvous(environment, seconds)
    if kept is not None:
        kept.append(rendezvous)  # learner 0 serves the store
    rendezvous.agree_on_run()
    return rendezvous.exchange(*peers(environment.size)[environment.rank])


def outcomes(environments: list[WorkerEnv], seconds: float = 20.0) -> list[object]:
    """Runs the rendezvous of several learners in threads, and returns the results or errors."""
    results: list[object] = [None] * len(environments)
    kept: list[Rendezvous] = []

    def attempt(place: int) -> None:
        try:
            results[place] = meet(environments[place], seconds, kept)
        except InputError as error:
            results[place] = str(error)

    threads = [threading.Thread(target=attempt, args=(place,)) for place in range(len(environments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_they_find_each_other() -> None:
    port = free_port("127.0.0.1")
    found = outcomes([who(rank, 3, port) for rank in range(3)])
    assert found == [peers(3)] * 3


def test_on_this_host_alone_nobody_else_reaches_the_store() -> None:
    port = free_port("127.0.0.1")
    rendezvous = Rendezvous(who(0, 1, port), SOON)
    socket.create_connection(("127.0.0.1", port), timeout=SOON).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this host, as the network's is
        socket.create_connection(("127.0.0.2", port), timeout=SOON)
    del rendezvous


def forge(port: int, name: str, value: str) -> None:
    """Writes an entry into torch's store, as any user of the host can."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    store.set(f"asr_am/0/{name}", value)


def test_an_entry_without_the_key_is_an_error() -> None:
    """Learner 1 is late, and somebody else writes an address of his own in its place."""
    port, key = free_port("127.0.0.1"), new_key()
    first = replace(who(0, 2, port), one_host=False, key=key)
    with pytest.raises(InputError, match=r"the entry 'learner/1' was not written by a learner with this run's key"):
        kept: list[Rendezvous] = []
        thread = threading.Thread(target=lambda: (wait_for_port(port), forge(port, "learner/1", '[2, "tcp://mine"]')))
        thread.start()
        try:
            meet(first, 20.0, kept)
        finally:
            thread.join()
    port = free_port("127.0.0.1")
    found = outcomes([replace(who(rank, 2, port), one_host=False, key=key) for rank in range(2)])
    assert found == [peers(2)] * 2
    port = free_port("127.0.0.1")
    found = outcomes([replace(who(rank, 2, port), one_host=False, key=new_key()) for rank in range(2)], SOON)
    assert "learners 1 of WORLD_SIZE=2 have not connected" in str(found[0]) and "with this run's key" in str(found[1])


def test_entries_of_an_earlier_run_with_the_same_key_are_an_error() -> None:
    """Learner 1 is late, and somebody writes what it wrote in the run before."""
    port, key = free_port("127.0.0.1"), new_key()
    learners = [Rendezvous(replace(who(rank, 2, port), one_host=False, key=key), 20.0) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        for found in pool.map(lambda learner: learner.exchange("tcp://mail", None), learners):
            assert found.keys() == {0, 1}
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    kept = {name: store.get(f"asr_am/0/{name}") for name in ("learner/1", "address/1")}
    del learners, store
    port = free_port("127.0.0.1")
    first = Rendezvous(replace(who(0, 2, port), one_host=False, key=key), 20.0)
    raw = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    for name, value in kept.items():
        raw.set(f"asr_am/0/{name}", value)
    with pytest.raises(InputError, match=r"the entry 'address/1' was not written by a learner with this run's key"):
        first.exchange("tcp://mail", None)


def test_on_one_host_a_forged_entry_is_not_read(tmp_path: Path) -> None:
    """Learners trust a directory that belongs to them, whoever has told its path."""
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        tmp_path.chmod(0o755)
        forge(port, "private_dir", str(tmp_path))
        with pytest.raises(InputError, match=f"{tmp_path}: is not a directory of this user with mode 700"):
            meet(who(1, 2, port))
        del server
    port = free_port("127.0.0.1")
    kept: list[Rendezvous] = []
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(meet(who(0, 2, port), 20.0, kept)))
    thread.start()
    wait_for_port(port)
    forge(port, "learner/1", '[2, "tcp://mine"]')
    assert meet(who(1, 2, port), 20.0) == peers(2)
    thread.join()
    assert results == [peers(2)]
    assert kept[0].made_dir is not None and kept[0].made_dir.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(kept[0].made_dir)


@pytest.mark.parametrize("what", ["link", "file", "missing", "mode", "owner"])
def test_a_directory_that_is_not_private_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "dir"
    if what == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "real")
    elif what == "file":
        path.touch(mode=0o700)
    elif what != "missing":
        path.mkdir(mode=0o700)
        check_private_dir(path)
    if what == "mode":
        path.chmod(0o750)
    elif what == "owner":
        if os.geteuid() != 0:
            pytest.skip("needs root, to give a directory to another user")
        os.chown(path, 65534, 65534)
    with pytest.raises(InputError, match=f"{path}: (is not a directory of this user|cannot be read)"):
        check_private_dir(path)


def test_directories_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, foreign, fresh, notes = (tmp_path / f"asr_am-{name}" for name in ("killed", "foreign", "fresh", "notes"))
    for path, mode in ((killed, 0o700), (foreign, 0o755), (fresh, 0o700), (notes, 0o700)):
        path.mkdir(mode=mode)
        (path / (MARKER if path != notes else "a user's own")).touch()
    with private_dir() as in_use:
        for path in (killed, foreign, notes, in_use):
            os.utime(path, (0, 0))
        with private_dir() as another:
            assert {path.name for path in tmp_path.iterdir()} == {
                path.name for path in (foreign, fresh, notes, in_use, another)
            }
            check_private_dir(another)
    assert not in_use.exists() and not another.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    (tmp_path / ("x" * 100)).mkdir()
    with pytest.raises(InputError, match="too long for the sockets of a run; set TMPDIR"), private_dir():
        pass


def wait_for_port(port: int) -> None:
    for _ in range(2000):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=SOON).close()
            return
        except OSError:
            time.sleep(0.01)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot bind MASTER_ADDR=.* MASTER_PORT={port} .*already in use"):
            meet(who(0, 2, port))
        begin = time.monotonic()
        with pytest.raises(InputError, match=r"did not succeed within 1\.5 s"):
            meet(who(1, 2, port))
        assert time.monotonic() - begin < 20


def test_a_host_that_does_not_answer() -> None:
    port = free_port("127.0.0.1")
    with pytest.raises(InputError, match=f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: does not answer within 1.5 s"):
        meet(who(1, 2, port))
    with pytest.raises(InputError, match=r"nosuchhost\.invalid .*does not answer within 0.1 s"):
        meet(who(1, 2, port, "nosuchhost.invalid"), 0.1)


def test_a_learner_0_that_ends_while_others_connect() -> None:
    port = free_port("127.0.0.1")
    store = [TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)]
    threading.Timer(0.3, store.clear).start()
    with pytest.raises(ConnectionLost, match="learner 0 ended before all learners had connected"):
        meet(who(1, 2, port), 20.0)


def test_missing_learners() -> None:
    with pytest.raises(InputError, match=r"learners 1, 2 of WORLD_SIZE=3 have not connected within 1\.5 s"):
        meet(who(0, 3, free_port("127.0.0.1")))


def test_learners_that_disagree() -> None:
    port = free_port("127.0.0.1")
    first, second = outcomes([who(0, 2, port), who(1, 3, port)], seconds=3.0)
    assert "WORLD_SIZE=2 at learner 0, but 3 at learner 1: they must be equal" in str(first)
    assert "WORLD_SIZE=3" in str(second) or "ended before" in str(second)
    port = free_port("127.0.0.1")
    results = outcomes([who(0, 2, port), who(1, 2, port), who(1, 2, port)])
    assert any(str(result).startswith("RANK=1 was given to two processes") for result in results[1:])
    assert isinstance(results[0], dict)


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": ""},
        {"RANK": "-1"},
        {"RANK": "2"},
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"},
        {"MASTER_PORT": "99999"},
        {"MASTER_PORT": ""},
        {"ASR_AM_RUN": "xyz"},
        {"ASR_AM_SUPERVISOR": "tcp://127.0.0.1:1"},
        {"ASR_AM_KEY": "short"},
        {"ASR_AM_INCARNATION": "x"},
    ],
    ids=str,
)
def test_a_wrong_environment_is_named(wrong: dict[str, str]) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    WorkerEnv.read(good)
    name = "ASR_AM_RUN" if "ASR_AM_SUPERVISOR" in wrong else next(iter(wrong))
    with pytest.raises(InputError, match=name):
        WorkerEnv.read({**good, **wrong})
    for name in ("RANK", "MASTER_ADDR"):
        with pytest.raises(InputError, match=name):
            WorkerEnv.read({key: value for key, value in good.items() if key != name})


def test_a_name_that_other_hosts_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name the address 127.0.1.1."""
    monkeypatch.setattr("asr_am.distributed.runtime.worker_process.is_loopback", lambda host: True)
    own = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
    with pytest.raises(InputError, match=r"^MASTER_ADDR=node1: .*; give the IP address$"):
        WorkerEnv.read(own)
    assert WorkerEnv.read(own | {"MASTER_ADDR": "localhost"}).one_host
    assert WorkerEnv.read(own | {"LOCAL_WORLD_SIZE": "4"}).one_host


def test_a_supervisor_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    variables = {"RANK": "0", "WORLD_SIZE": "2", "ASR_AM_SUPERVISOR": f"tcp://{address}", "ASR_AM_RUN": "0" * 32}
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(InputError, match=f"within 0.5 s the supervisor at tcp://{address} has not answered"):
        connect(timeout=0.5)
