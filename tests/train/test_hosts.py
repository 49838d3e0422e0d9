"""Training on two hosts (network namespaces of this machine), under torchrun and under our own launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asr_am.distributed.runtime.security import make_key_file, new_key
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import lease_log

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*arguments: str) -> int:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Makes two namespaces with a link between them. Skips the test if this user may not."""
    names = [f"asr-am-{os.getpid()}-{n}" for n in range(2)]
    links = [f"am{os.getpid()}{end}" for end in "ab"]
    if shutil.which("ip") is None or ip("netns", "add", names[0]):
        pytest.skip("needs the right to make network namespaces (ip netns)")
    try:
        ip("netns", "add", names[1])
        assert ip("link", "add", links[0], "type", "veth", "peer", "name", links[1]) == 0
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def on_both(hosts: list[str], commands: list[list[str]], env: dict[str, str] | None = None) -> None:
    """Runs a command on each host at the same time. Both must succeed."""
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )
        for host, command in zip(hosts, commands, strict=True)
    ]
    try:
        for process in running:
            output = process.communicate(timeout=150)[0].decode()
            assert process.returncode == 0, output
    finally:
        for process in running:
            process.kill()


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=(60,) * 12)


def test_groups_of_learners_under_torchrun(hosts: list[str], egs_dir: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += [f"--master-addr={ADDRESSES[0]}", "--master-port=29413"]
    learner = ["-m", "tests.support.fault_worker_main", "htm", str(egs_dir), str(tmp_path), "[]"]
    commands = [[*torchrun, f"--node-rank={node}", *learner] for node in range(2)]
    on_both(hosts, commands, {**os.environ, "ASR_AM_KEY": new_key()})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["learners"] == 4 and summary["bytes_sent"] > 0 and len(summary["heldout_loss"]) == 2


def test_adpsgd_under_our_launcher_with_a_key_file(hosts: list[str], egs_dir: Path, tmp_path: Path) -> None:
    make_key_file(tmp_path / "team.key")
    learner = [sys.executable, "-m", "tests.support.train_worker_main", "adpsgd", str(egs_dir), str(tmp_path), "-1"]
    program = "import sys; from asr_am.distributed.runtime.launcher import launch; "
    program += "launch(sys.argv[2:], 2, synchronous=False, "
    program += (
        f"nodes=2, node_rank=int(sys.argv[1]), address='{ADDRESSES[0]}:29414', key_file='{tmp_path / 'team.key'}')"
    )
    on_both(hosts, [[sys.executable, "-c", program, str(node), *learner] for node in range(2)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["learners"] == 4 and summary["counts"]["exchanges"] > 0
    owners = {owner for record in lease_log(tmp_path) for owner in record["owner"]}
    assert owners & {0, 1} and owners & {2, 3}, "learners of both hosts took part"
