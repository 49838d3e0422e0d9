"""Processes that are started, monitored, restarted and ended. Most of them import nothing, and start quickly."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from asr_am.distributed import node_agent as agent
from asr_am.distributed import supervisor
from asr_am.distributed.cluster_config import Crash, Faults
from asr_am.distributed.launch_spec import ExitStatus, LaunchSpec
from asr_am.distributed.leases import HostLost, LearnerLost
from asr_am.distributed.runtime import launcher as starting
from asr_am.distributed.runtime.launcher import launch, make_agent
from asr_am.distributed.runtime.worker_process import WorkerProcesses, free_port
from asr_am.errors import EXIT_PREEMPTED, InputError, Preempted
from asr_am.stages import target
from asr_am.stages.target import Target, held_locks
from tests.support.forked_workers import FORK_SERVER

ROOT = Path(__file__).parents[3]
PREAMBLE = """
import json, os, pathlib, signal, sys, time
rank, incarnation = int(os.environ["RANK"]), int(os.environ["ASR_AM_INCARNATION"])
folder = pathlib.Path(sys.argv[1])
def leave():
    path = folder / f"{rank}.{incarnation}.json"
    path.with_suffix(".tmp").write_text(json.dumps({**os.environ, "pid": os.getpid()}))
    path.with_suffix(".tmp").rename(path)
def wait_for(count):
    while len(list(folder.glob("*.json"))) < count: time.sleep(0.01)
leave()
"""


def script(folder: Path, text: str) -> list[str]:
    """Returns a command whose processes write their environment to `folder`, and then execute `text`."""
    return [sys.executable, "-c", PREAMBLE + text, str(folder)]


def left(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns what the processes wrote, by `<rank>.<incarnation>`."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def assert_gone(folder: Path) -> None:
    """Checks that the launcher has waited for its children."""
    assert not [name for name, noted in left(folder).items() if Path(f"/proc/{noted['pid']}").exists()]


def await_gone(folder: Path) -> None:
    """Waits until processes of other parents are zombies or gone."""
    deadline = time.monotonic() + 30
    for noted in left(folder).values():
        status = Path(f"/proc/{noted['pid']}/stat")
        while status.exists() and status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"learner {noted['RANK']} is still there"
            time.sleep(0.01)


def forked_launcher(command: list[str], learners: int) -> Any:
    """Starts a process that launches a synchronous team."""
    process = FORK_SERVER.Process(target=partial(launch, synchronous=True), args=(command, learners))
    process.start()
    return process


def launch_host(command: list[str], node: int, address: str) -> None:
    """Launches the learner of one of two hosts. Ends with status 75 if the run was asked to end."""
    try:
        launch(
            command, 1, synchronous=True, nodes=2, node_rank=node, address=address, encrypt=False,
            signals=["TERM", "USR1"], grace=20.0,
        )  # fmt: skip
    except Preempted:
        os._exit(EXIT_PREEMPTED)


def make_by_learner(out: Path, command: list[str]) -> None:
    """Makes a target whose build is a learner's."""

    def build(out: Path) -> None:
        launch(command, 1, synchronous=True, inherited_files=held_locks())

    Target(out, [], {}, build, in_place=True).run()


def test_learners_are_told_who_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_AM_SUPERVISOR", "of another run")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch(script(tmp_path, ""), 2, synchronous=True, env={"MORE": "x"})
    noted = left(tmp_path)
    assert list(noted) == ["0.0", "1.0"]
    for rank, variables in enumerate(noted.values()):
        assert [variables[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [
            str(rank), str(rank), "2", "2",
        ]  # fmt: skip
        assert variables["OMP_NUM_THREADS"] == "1" and variables["MORE"] == "x"
        assert "MASTER_ADDR" not in variables and "ASR_AM_SUPERVISOR" not in variables
    assert noted["0.0"]["ASR_AM_RUN"] == noted["1.0"]["ASR_AM_RUN"]
    assert noted["0.0"]["ASR_AM_PRIVATE_DIR"] == noted["1.0"]["ASR_AM_PRIVATE_DIR"]
    assert not Path(noted["0.0"]["ASR_AM_PRIVATE_DIR"]).exists(), "removed at the end"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"was killed by signal 9 \(SIGKILL\); start the same command again"),
        ("sys.exit(3)", "exit status 3; see its message above; when its cause is gone, the same command continues"),
    ],
)
def test_synchronous_a_death_starts_all_again_and_the_last_one_ends_all(tmp_path: Path, end: str, said: str) -> None:
    command = script(tmp_path, f"wait_for(3 + 3 * incarnation)\nif rank == 1: {end}\ntime.sleep(600)")
    with pytest.raises(LearnerLost, match=rf"learner 1 on .* {said}") as error:
        launch(command, 3, synchronous=True, max_restarts=1, restart_after=0.01)
    assert error.value.rank == 1
    assert list(left(tmp_path)) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert_gone(tmp_path)


def test_what_a_killed_learner_had_started_is_ended_too(tmp_path: Path) -> None:
    helper = PREAMBLE + "time.sleep(600)"
    text = f"""
import subprocess
subprocess.Popen([sys.executable, "-c", {helper!r}, sys.argv[1]], env={{**os.environ, "RANK": "7"}})
wait_for(2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(LearnerLost):
        launch(script(tmp_path, text), 1, synchronous=True, max_restarts=0)
    await_gone(tmp_path)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_learner_that_fails_ends_all(tmp_path: Path, synchronous: bool) -> None:
    command = script(tmp_path, "wait_for(3)\nif rank == 2: sys.exit(1)\ntime.sleep(600)")
    with pytest.raises(InputError, match=r"learner 2 on .* failed: see its message above"):
        launch(command, 3, synchronous=synchronous)
    assert_gone(tmp_path)


def test_asynchronous_the_dead_are_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    text = "if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\nif rank == 0: wait_for(5)"
    launch(script(tmp_path, text), 2, synchronous=False, restart_after=0.05, max_restarts=3)
    assert list(left(tmp_path)) == ["0.0", "1.0", "1.1", "1.2", "1.3"]


def test_asynchronous_all_are_started_again_if_the_strategy_cannot_go_on(tmp_path: Path) -> None:
    text = """
wait_for(3 + 3 * incarnation)
if incarnation < 2:
    os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)
"""
    launch(script(tmp_path, text), 3, synchronous=False, together=True, restart_after=0.01, max_restarts=2)
    assert list(left(tmp_path)) == [f"{rank}.{incarnation}" for rank in range(3) for incarnation in range(3)]


def test_asynchronous_the_others_go_on_if_a_cleaner_has_taken_the_sockets(tmp_path: Path) -> None:
    text = """
wait_for(3)
if rank == 1:
    import shutil
    shutil.rmtree(os.environ["ASR_AM_PRIVATE_DIR"])
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
(folder / f"{rank}.done").touch()
"""
    launch(script(tmp_path, text), 3, synchronous=False, restart_after=0)
    assert sorted(left(tmp_path)) == ["0.0", "1.0", "2.0"]
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["0.done", "2.done"]


def test_when_all_are_dead_the_run_is(tmp_path: Path) -> None:
    with pytest.raises(LearnerLost, match=r"was killed by .* as all others had before"):
        launch(script(tmp_path, "os.kill(os.getpid(), 9)"), 2, synchronous=False, restart_after=0.01, max_restarts=1)
    assert list(left(tmp_path)) == ["0.0", "0.1", "1.0", "1.1"]


def test_an_injected_crash_says_itself_whether_the_learner_comes_back(tmp_path: Path) -> None:
    faults = Faults(crashes=[Crash(1, 0.0, None), Crash(2, 0.0, 0.02)])
    text = "if rank and not incarnation: os.kill(os.getpid(), 9)\nif rank == 0: wait_for(4)"
    launch(script(tmp_path, text), 3, synchronous=False, restart_after=600, faults=faults)
    assert list(left(tmp_path)) == ["0.0", "1.0", "2.0", "2.1"]


def test_wrong_values_are_rejected_at_once(tmp_path: Path) -> None:
    command = script(tmp_path, "")
    with pytest.raises(InputError, match="cannot be started"):
        launch([str(tmp_path / "nothing")], 1, synchronous=True)
    with pytest.raises(InputError, match="must be at least one of each"):
        launch(command, 0, synchronous=True)
    with pytest.raises(InputError, match="node_rank=2: must be 0 to 1 with nodes=2"):
        launch(command, 1, synchronous=True, nodes=2, node_rank=2, address="127.0.0.1:1")
    with pytest.raises(InputError, match="address is missing"):
        launch(command, 1, synchronous=True, nodes=2)
    with pytest.raises(InputError, match="address='here': must be host:port"):
        launch(command, 1, synchronous=True, nodes=2, address="here")
    with pytest.raises(InputError, match="there is no learner 4 among 2"):
        launch(command, 2, synchronous=True, faults=Faults(crashes=[Crash(4, 1.0)]))
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InputError, match=f"cannot bind address={address} "):
            launch(command, 1, synchronous=False, address=address)
    assert not left(tmp_path)


def test_no_learner_outlives_its_launcher(tmp_path: Path) -> None:
    text = """
from asr_am.distributed.runtime.worker_process import set_parent_death_signal
set_parent_death_signal(int(os.environ["ASR_AM_LAUNCHER"]))
(folder / f"ready{rank}").touch()
time.sleep(600)
"""
    launchers = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        launchers[number] = forked_launcher(script(folder, text), 2)
    for number, launcher in launchers.items():
        while len(list((tmp_path / number.name).glob("ready*"))) < 2:
            assert launcher.is_alive()
            time.sleep(0.02)
        os.kill(launcher.pid, number)
    for launcher in launchers.values():
        launcher.join(30)
    assert [launcher.exitcode for launcher in launchers.values()] == [143, -9]
    for number in launchers:
        await_gone(tmp_path / number.name)


def test_a_learner_whose_launcher_died_before_it_could_ask_for_a_signal_ends(tmp_path: Path) -> None:
    text = """
from asr_am.distributed.runtime.worker_process import set_parent_death_signal
from asr_am.errors import InputError
while not (folder / "killed").exists(): time.sleep(0.01)
try:
    set_parent_death_signal(int(os.environ["ASR_AM_LAUNCHER"]))
except InputError as error:
    (folder / "said").write_text(str(error))
"""
    shell = ["sh", "-c", '"$@"; true', "sh"]  # a process in between hides the launcher's end
    launchers = {}
    for name, between in (("child", []), ("grandchild", shell)):
        (tmp_path / name).mkdir()
        launchers[name] = forked_launcher([*between, *script(tmp_path / name, text)], 1)
    for name, launcher in launchers.items():
        while not left(tmp_path / name):
            assert launcher.is_alive()
            time.sleep(0.02)
        launcher.kill()
        launcher.join()
        (tmp_path / name / "killed").touch()
    for name in launchers:
        await_gone(tmp_path / name)
        assert "the launcher of this learner has ended" in (tmp_path / name / "said").read_text()


def test_learners_hold_the_lock_of_their_run_when_its_launcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "out", tmp_path / "folder"
    folder.mkdir()
    launcher = FORK_SERVER.Process(target=make_by_learner, args=(out, script(folder, "time.sleep(600)")))
    launcher.start()
    again = Target(out, [], {}, lambda out: None, in_place=True)
    while not left(folder):
        assert launcher.is_alive()
        time.sleep(0.02)
    with pytest.raises(InputError, match=f"another process is making it .process {launcher.pid} on "):
        again.run()
    launcher.kill()
    launcher.join()
    monkeypatch.setattr(target, "LOCK_WAIT", 0.2)
    with pytest.raises(InputError, match="or processes that it has started"):
        again.run()
    os.kill(left(folder)["0.0"]["pid"], signal.SIGKILL)
    monkeypatch.setattr(target, "LOCK_WAIT", 30.0)
    assert again.run()


class Hosts:
    """The same call of `launch` on several hosts, here in threads, each `late` seconds after the one before. errors:
    by node rank.
    """

    def __init__(self, folder: Path, text: str, learners: list[int], late: float = 0.0, **options: Any) -> None:
        self.errors: dict[int, BaseException] = {}
        self.address = options.pop("address", None) or f"127.0.0.1:{free_port('127.0.0.1')}"
        self._threads = [
            threading.Thread(target=self._run, args=(script(folder, text), node, count, len(learners), options))
            for node, count in enumerate(learners)
        ]
        for thread in self._threads:
            thread.start()
            time.sleep(late)

    def wait(self) -> dict[int, BaseException]:
        deadline = time.monotonic() + 90
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        assert not any(thread.is_alive() for thread in self._threads), self.errors
        return self.errors

    def _run(self, command: list[str], node: int, learners: int, nodes: int, options: dict[str, Any]) -> None:
        try:
            launch(command, learners, nodes=nodes, node_rank=node, address=self.address, encrypt=False, **options)
        except BaseException as error:
            self.errors[node] = error


@pytest.mark.parametrize("busy", [0, 1])
def test_a_host_whose_learner_ends_slowly_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    """It saves for longer than hosts wait for each other's heartbeats."""
    for module in (agent, supervisor):
        monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT", 2.0)
    hosts = Hosts(
        tmp_path, f"""
if rank == {busy} and incarnation == 0:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), os._exit(71)))
wait_for(2)
if incarnation == 0:
    if rank != {busy}: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
""", [1, 1], synchronous=True, restart_after=0.01,
    )  # fmt: skip
    assert hosts.wait() == {}
    assert list(left(tmp_path)) == ["0.0", "0.1", "1.0", "1.1"]


def test_what_a_learner_has_started_lives_until_it_has_ended(tmp_path: Path) -> None:
    """It may need the processes of a DataLoader while it saves what it has done."""
    launching = forked_launcher(script(tmp_path, """
import subprocess
if rank == 0:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    def save(*_):
        time.sleep(0.3)
        (folder / f"saved-{child.poll()}-{child.pid}").touch()
        os._exit(71)
    signal.signal(signal.SIGTERM, save)
(folder / f"ready-{rank}").touch()
time.sleep(600)
"""), 2)  # fmt: skip
    while len(list(tmp_path.glob("ready-*"))) < 2:
        time.sleep(0.01)
    os.kill(launching.pid, signal.SIGTERM)
    launching.join(30)
    (saved,) = tmp_path.glob("saved-*")
    _, status, child = saved.name.split("-")
    assert status == "None", "it had ended before"
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text(encoding="utf-8")
    assert_gone(tmp_path)


def test_two_hosts_synchronous(tmp_path: Path) -> None:
    hosts = Hosts(
        tmp_path, "wait_for(4)\nif rank == 3: os.kill(os.getpid(), 9)\ntime.sleep(600)", [2, 2],
        synchronous=True, max_restarts=0,
    )  # fmt: skip
    errors = hosts.wait()
    for node in (0, 1):
        error = errors[node]
        assert isinstance(error, LearnerLost) and error.rank == 3 and "SIGKILL" in str(error)
    noted = left(tmp_path)
    assert [noted[f"{rank}.0"]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert len({(n["MASTER_ADDR"], n["MASTER_PORT"], n["ASR_AM_RUN"], n["WORLD_SIZE"]) for n in noted.values()}) == 1
    assert_gone(tmp_path)


@pytest.mark.parametrize("asked", [0, 1])
def test_the_run_ends_when_any_host_is_asked_to(tmp_path: Path, asked: int) -> None:
    text = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))\n(folder / f'ready-{rank}').touch()\ntime.sleep(600)"
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    hosts = [FORK_SERVER.Process(target=launch_host, args=(script(tmp_path, text), node, address)) for node in (0, 1)]
    for host in hosts:
        host.start()
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert all(host.is_alive() for host in hosts)
        time.sleep(0.01)
    os.kill(hosts[asked].pid, signal.SIGTERM)
    for host in hosts:
        host.join(30)
    assert [host.exitcode for host in hosts] == [EXIT_PREEMPTED] * 2
    assert_gone(tmp_path)


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_that_waits_for_the_other_ends_when_it_is_asked_to(tmp_path: Path, node: int) -> None:
    host = FORK_SERVER.Process(
        target=launch_host, args=(script(tmp_path, ""), node, f"127.0.0.1:{free_port('127.0.0.1')}")
    )
    host.start()
    while not catches(host.pid, signal.SIGUSR1):
        time.sleep(0.01)
    os.kill(host.pid, signal.SIGUSR1)
    host.join(10)
    assert host.exitcode == EXIT_PREEMPTED and not left(tmp_path)


def catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler of a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & 1 << number - 1)


def test_two_hosts_asynchronous(tmp_path: Path) -> None:
    text = "if rank == 1 and not incarnation: os.kill(os.getpid(), 9)\nwait_for(3)"
    hosts = Hosts(tmp_path, text, [1, 1], synchronous=False, restart_after=0.05)
    assert hosts.wait() == {}
    assert list(left(tmp_path)) == ["0.0", "1.0", "1.1"]


def test_orders_that_come_all_at_once_are_all_carried_out(tmp_path: Path) -> None:
    """As from a supervisor whose last host has just come, to an agent that was not looking."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as host0:
        port = host0.bind_to_random_port("tcp://127.0.0.1")
        late = make_agent(LaunchSpec(script(tmp_path, ""), 1, False, 2, 1, f"127.0.0.1:{port}"))
        run_message = {"do": "run", "run": "this", "supervisor": f"tcp://127.0.0.1:{port}", "master": None}
        for message in (run_message, {"do": "start", "rank": 1, "incarnation": 0}):
            host0.send(json.dumps(message).encode())
        time.sleep(0.3)
        thread = threading.Thread(target=late.run, daemon=True)
        thread.start()
        reports = []
        while not reports or reports[-1]["op"] != "ended":
            assert host0.poll(30_000), reports
            reports.append(json.loads(host0.recv()))
            host0.send(b'{"do": "live"}')
        host0.send(b'{"do": "stop"}')
        thread.join(30)
    assert not thread.is_alive()
    assert list(left(tmp_path)) == ["1.0"]


def test_hosts_that_do_not_come_or_do_not_fit(tmp_path: Path) -> None:
    errors = Hosts(tmp_path, "", [1, 2], synchronous=True).wait()
    assert all("host 1 was started with different" in str(errors[node]) for node in (0, 1))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(InputError, match=r"host 1, 2 of 3 has not connected within 0\.3 s"):
        launch(script(tmp_path, ""), 1, synchronous=True, nodes=3, address=address, timeout=0.3, encrypt=False)
    with pytest.raises(InputError, match=rf"address={address}: no answer within 0\.3 s"):
        launch(
            script(tmp_path, ""), 1, synchronous=True, nodes=2, node_rank=1, address=address, timeout=0.3,
            encrypt=False,
        )  # fmt: skip
    assert not left(tmp_path)


def test_hosts_may_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HEARTBEAT_TIMEOUT", 0.5)
    monkeypatch.setattr(agent, "HEARTBEAT_TIMEOUT", 0.5)
    hosts = Hosts(tmp_path, "time.sleep(1)", [1, 1, 1], late=1.0, synchronous=True)
    assert hosts.wait() == {}
    assert len(left(tmp_path)) == 3


@pytest.mark.parametrize("same", [True, False])
def test_a_command_may_be_started_again_while_other_hosts_are_awaited(tmp_path: Path, same: bool) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    ended = SilentHost(address, True, nodes=3, host=socket.gethostname() if same else "another")
    errors = Hosts(tmp_path, "", [1, 1, 1], late=1.0, synchronous=True, address=address).wait()
    ended.close()
    if same:
        assert errors == {} and len(left(tmp_path)) == 3
    else:
        assert "node_rank=1 is used by another host" in str(errors[0])


def test_a_supervisor_that_was_stopped_declares_nobody_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that blocks its loop stands for a process that is stopped."""
    for module in (supervisor, agent, starting):
        monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT", 0.5)
    monkeypatch.setattr(agent, "AGENT_TIMEOUT", 1000.0)  # the other host is not stopped, and would end its learners
    ended, stops = WorkerProcesses.ended, iter([2.0])

    def stopped(workers: WorkerProcesses) -> list[ExitStatus]:
        if len(left(tmp_path)) == 2 and list(workers._running) == [0]:
            time.sleep(next(stops, 0.0))
        return ended(workers)

    monkeypatch.setattr(WorkerProcesses, "ended", stopped)
    assert Hosts(tmp_path, "wait_for(2)\ntime.sleep(3)", [1, 1], synchronous=True).wait() == {}
    assert next(stops, None) is None


class SilentHost:
    """Reports for duty, and is never heard of again."""

    def __init__(self, address: str, synchronous: bool, nodes: int = 2, host: str = "silent") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://{address}")
        message = {"op": "node", "node": 1, "nodes": nodes, "learners": 1, "in_step": synchronous, "host": host}
        self._socket.send(b"\xff no JSON")
        self._socket.send(b"[1]")
        self._socket.send(json.dumps(message).encode())

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_a_host_that_is_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HEARTBEAT_TIMEOUT", 0.5)
    for synchronous in (True, False):
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        host = SilentHost(address, synchronous)
        command = script(tmp_path, "time.sleep(600)" if synchronous else "time.sleep(1)")
        if synchronous:
            with pytest.raises(HostLost, match=r"learner 1 cannot be reached any more: .* host silent") as lost:
                launch(command, 1, synchronous=True, nodes=2, address=address, encrypt=False)
            assert lost.value.nodes == (0,)
        else:
            launch(command, 1, synchronous=False, nodes=2, address=address, encrypt=False)  # the other one finishes
        host.close()
