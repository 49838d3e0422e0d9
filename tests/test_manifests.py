"""The commands in recipes/*.yaml: their options are those of the stage, once Kubeflow has set its variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SET_BY_KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "asr-am-master-0", "RANK": "1"}


@pytest.mark.parametrize(("name", "role"), [("pytorchjob", "Master"), ("mpijob", "Launcher")])
def test_the_command_of_a_pod_is_a_valid_configuration(name: str, role: str) -> None:
    job = yaml.safe_load((ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8"))
    (roles,) = (value for key, value in job["spec"].items() if key.endswith("ReplicaSpecs"))
    _, _, command = roles[role]["template"]["spec"]["containers"][0]["command"]
    options = command[command.index("-m ") :]
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {options} --cfg job"], cwd=ROOT, env=os.environ | SET_BY_KUBEFLOW,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launcher = yaml.safe_load(done.stdout)["launcher"]
    if name == "pytorchjob":
        assert (launcher["nodes"], launcher["node_rank"], launcher["address"]) == (2, 1, "asr-am-master-0:29500")
    else:
        assert launcher["name"] == "mpi"
