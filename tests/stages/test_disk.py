"""A full disk and a read-only one, as real mounts: one line, nothing lost, and the same command goes on afterwards."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import kaldifst
import kaldiio
import numpy as np
import pytest
import soundfile
import torch

from asr_am.errors import InputError
from asr_am.lang.fst_file import silence_stderr, write_fst
from asr_am.stages.app import disk_problem
from asr_am.stages.target import Target
from tests.support.toy_stage import start

NUMBERS = np.zeros(1 << 19)  # 4 MB
TEXT = "x" * (1 << 22)


def mount(folder: Path, *options: str) -> None:
    done = subprocess.run(["mount", "-o", ",".join(options), "-t", "tmpfs", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid():
        pytest.skip("mounting a file system needs root")
    mount(folder, "size=1m")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def large_fst() -> kaldifst.StdVectorFst:
    fst = kaldifst.StdVectorFst()
    for _ in range(1 << 17):
        fst.add_state()
    return fst


def write_fsts(out: Path) -> None:
    """Writes without an exception on a full disk, as OpenFST does."""
    fst = large_fst()
    with kaldifst.VectorFstWriter(f"ark:{out}/a.ark") as writer, silence_stderr():
        writer.write("utterance", fst)
    with kaldifst.SequentialVectorFstReader(f"ark:{out}/a.ark") as reader:
        if [name for name, _ in reader] != ["utterance"]:
            raise InputError("a.ark: is damaged")


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda out: (out / "a").write_text(TEXT),
    "npy": lambda out: np.save(out / "a.npy", NUMBERS),
    "npz": lambda out: np.savez(out / "a.npz", a=NUMBERS),
    "torch": lambda out: torch.save(torch.from_numpy(NUMBERS), out / "a.pt"),
    "wav": lambda out: soundfile.write(out / "a.wav", NUMBERS, 8000),
    "ark": lambda out: kaldiio.save_ark(str(out / "a.ark"), {"a": NUMBERS}),
    "fsts": write_fsts,
    "fst": lambda out: write_fst(large_fst(), out / "a.fst"),
}


@pytest.mark.parametrize("in_place", [False, True], ids=["partial", "in place"])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_is_named_whatever_writes_to_it(
    disk: Path, kind: str, in_place: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Target(disk / "made", [], {}, lambda out: (out / "a").write_text("kept") and None)
    assert made.run()
    target = Target(disk / "out", [disk / "made"], {}, lambda out: WRITERS[kind](out) and None, in_place=in_place)
    with pytest.raises(InputError, match="out: the disk is full; free some space, then the same command continues"):
        target.run()
    assert (disk / "made/a").read_text() == "kept" and not (disk / "out/.done").exists()
    assert capfd.readouterr().err == ""
    mount(disk, "remount", "size=20m")
    assert target.run() and not target.run() and not made.run()


def test_a_disk_that_becomes_read_only_while_a_file_is_open_is_named(tmp_path: Path) -> None:
    """The system call for an open file does not tell its name."""
    error = OSError(errno.EROFS, "Read-only file system")
    found = disk_problem(error, tmp_path)
    assert found == f"{tmp_path}: Read-only file system; make it accessible, or write elsewhere with exp=DIR"
    assert disk_problem(OSError(errno.EPERM, "Operation not permitted"), tmp_path) is None


def test_on_a_read_only_disk_what_is_up_to_date_stays_so_and_the_rest_is_one_line(disk: Path) -> None:
    body = "(out / 'a').write_text('kept')"
    first, mine = f"exp={disk}", "corpus.name=mine"
    assert start(disk.parent, body, first).communicate(timeout=60)[1] == ""
    mount(disk, "remount", "ro")
    again, other = start(disk.parent, body, first), start(disk.parent, body, first, mine)
    assert again.communicate(timeout=60)[1] == "" and again.returncode == 0
    errors = other.communicate(timeout=60)[1]
    reason = "Read-only file system; make it accessible, or write elsewhere with exp=DIR"
    assert errors == f"ERROR stage toy: {disk}/mine: {reason}\n" and other.returncode == 1
    mount(disk, "remount", "rw")
    other = start(disk.parent, body, first, mine)
    assert other.communicate(timeout=60)[1] == "" and (disk / "mine/toy-1/a").exists()
    assert (disk / "minicts/toy-1/a").read_text() == "kept"


def test_a_disk_that_is_too_small_is_named_before_anything_is_made(disk: Path) -> None:
    size = 3 << 20
    mount(disk, "remount", "size=2m")
    started = Target(disk / "exp/out", [], {}, lambda out: (out / "a").write_bytes(bytes(size)) and None)
    target = replace(started, num_bytes=lambda: size)
    with pytest.raises(InputError, match=r"exp/out: needs about 3\.3 MB, but its disk has 2\.1 MB free"):
        target.run()
    assert not any(disk.iterdir())
    mount(disk, "remount", "size=4m")
    with pytest.raises(InputError):  # interrupted after it has written everything
        replace(started, build=lambda out: started.build(out) or stop()).run()
    assert target.run(), "what is there already needs no more space"


def stop() -> None:
    raise InputError("stopped")
