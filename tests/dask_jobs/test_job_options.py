from __future__ import annotations

import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asr_am.dask_jobs.keys import CERTIFICATE, KEY, make_keys, read_keys
from asr_am.errors import InputError
from asr_am.stages.sections import job_options
from tests.support.configurations import config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["jobs=ssh"], r"jobs=ssh: needs hosts; give e\.g\. jobs\.hosts=\[node1,node2\]"),
        (["jobs=ssh", "jobs.hosts=a"], r"jobs\.hosts=a: "),
        (["jobs=ssh", "jobs.hosts=[me@a]"], r"jobs\.hosts: me@a: name the host only, and its user in ~/\.ssh/config"),
        (["jobs=dask", "jobs.keys=/none"], r"/none/key\.pem: cannot be read .*make it with python -m"),
        (["jobs=slurm", "jobs.timeout=0"], r"jobs\.timeout=0.*: must be above 0"),
        (["jobs=slurm", "+jobs.partition=cpu"], r"jobs\.partition: there is no such option"),
        (["jobs=dask", "jobs.dashboard=8787"], r"jobs\.dashboard=8787: "),
        (["jobs=dask", "jobs.scheduler=node0:8786"], "jobs.scheduler=node0:8786: must be an address such as tls://"),
        (["jobs=dask", "jobs.scheduler=tcp://127.0.0.1:8786"], "without TLS can run anything; .* use tls://"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_options(config(*overrides))


@pytest.mark.parametrize("name", ["dask", "ssh", "slurm", "sge", "pbs", "lsf"])
def test_every_choice_has_valid_options_or_names_the_extra(name: str) -> None:
    overrides = [f"jobs={name}", *(["jobs.hosts=[a]"] if name == "ssh" else [])]
    if all(map(find_spec, ("distributed", "dask_jobqueue", "asyncssh"))):
        assert job_options(config(*overrides)).name == name
    else:
        with pytest.raises(InputError, match=rf"jobs={name}: needs the package .*pip install -e '\.\[cluster\]'"):
            job_options(config(*overrides))


def test_local_jobs_import_nothing_of_dask() -> None:
    code = "import sys, asr_am.parallel, asr_am.stages.app; print({'dask', 'distributed'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_key_belongs_to_its_owner(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="the optional extra cluster is not installed")
    folder = tmp_path / "keys"
    command = [sys.executable, "-m", "asr_am.dask_jobs.keys", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"--tls-key {folder / KEY}" in done.stdout
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in (KEY, CERTIFICATE))
    assert read_keys(folder).require_encryption
    with pytest.raises(InputError, match="File exists"):
        make_keys(folder)
    (folder / KEY).chmod(0o640)
    with pytest.raises(InputError, match=r"key\.pem: other users have access to it \(mode 640\): chmod 600"):
        read_keys(folder)
    with pytest.raises(InputError, match=r"none/key\.pem: cannot be read .*make it with python -m"):
        read_keys(tmp_path / "none")
