"""A unit of work: one output directory made from declared inputs and values, skipped when up to date.

The rules of make, with the config among the sources. A unit's *key* is a digest of its values, of its version, and of
its inputs: for a directory that another unit made, that unit's key and the sizes of its files; for any other file, its
size and time. A unit works in `<out>.partial`, which becomes `<out>` by a rename once `.done` is in it, so a reader
never meets half an output and a failure loses nothing made before. After a kill the partial directory is handed to the
work again if its key is unchanged: what is already there need not be made twice. Nothing here imports torch, which
takes seconds.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asr_am.errors import InputError

log = logging.getLogger(__name__)

DONE = ".done"
KEY = ".key"


@dataclass(frozen=True)
class Target:
    """One output directory and how to make it.

    work: called with the directory to write into; what it finds there is its own, from a run that was cut short.
    in_place: the directory has its final name from the start, for work that people watch while it runs (training).
        Where another run has that name, the work goes on in `<out>.new`, and takes the name when it is finished. The
        other run is then kept as `<out>.old`; an unfinished one never replaces a finished `<out>.old`.
    keep_if: a pattern of files without which a failed start of such work leaves nothing behind.
    apart: names of directories in it that are no part of the output: other programs write there, even later (wandb's),
        or it may be removed (checkpoints).
    beside: files next to the directory that the work writes, too.
    version: raise it when the work's code changes what it makes.
    leads: False in a process that takes part in work which another one (on another host, or of another rank) leads: it
        does the work and leaves the marking to the leader.
    """

    out: Path
    inputs: Sequence[Path]
    config: Mapping[str, object]
    build: Callable[[Path], None]
    in_place: bool = False
    keep_if: str = "*"
    exclude: Sequence[str] = ()
    extra_outputs: Sequence[Path] = ()
    version: int = 1
    is_leader: bool = True

    def key(self) -> str:
        """Hexadecimal digest of all that the output depends on; InputError where an input is missing or damaged."""
        sources = {str(path): _fingerprint(path) for path in self.inputs}
        text = json.dumps([self.version, self.config, sources], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def run(self) -> bool:
        """Make the output unless it is up to date; True if there was work to do."""
        key = self.key()
        if _complete(self.out, key):
            log.info("%s is up to date", self.out)
            return False
        place = self._place(key)
        if not self.is_leader:
            self.build(place)
            return True
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.out):
            if not _complete(place, key):
                self._make(place, key)
            if place != self.out:
                _replace(place, self.out, keep_old=self.in_place)
        return True

    def _place(self, key: str) -> Path:
        """Where the work is done: the same directory before the work has begun, during it and after a kill."""
        if not self.in_place:
            return self.out.with_name(self.out.name + ".partial")
        owner = self.out / KEY
        free = not owner.exists() or owner.read_text() == key
        return self.out if free else self.out.with_name(self.out.name + ".new")

    def _make(self, place: Path, key: str) -> None:
        """Run the work in `place` and mark it done."""
        begin = time.monotonic()
        for path in self.inputs:
            log.info("reads %s", path)
        fresh = _prepare(place, key)
        if place.suffix == ".new":
            log.info("%s was made from other inputs or values: it stays until %s is finished", self.out, place)
        try:
            self.build(place)
        except BaseException:
            if fresh and self.in_place and not any(place.glob(self.keep_if)):
                shutil.rmtree(place)
            raise
        seconds = time.monotonic() - begin
        made = [
            p for p in sorted(place.rglob("*")) if p.is_file() and p.relative_to(place).parts[0] not in self.exclude
        ]
        files = {str(p.relative_to(place)): p.stat().st_size for p in made}
        files |= {os.path.relpath(p, self.out): p.stat().st_size for p in self.extra_outputs}
        done = {
            "key": key,
            "config": self.config,
            "inputs": [str(p) for p in self.inputs],
            "seconds": round(seconds, 1),
        }
        done |= {"commit": git_commit(), "date": datetime.datetime.now().isoformat(timespec="seconds"), "files": files}
        _write_atomically(place / DONE, json.dumps(done, indent=1, default=str))
        log.info("wrote %s: %d files, %.1f s", self.out, len(files), seconds)


def git_commit() -> str:
    """Short hash of the checkout's commit, `+` appended where files differ from it; "unknown" outside git."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _read_done(directory: Path) -> dict:
    """The record of a finished directory, {} where it has none that can be read."""
    try:
        record = json.loads((directory / DONE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("files"), dict) else {}


def _complete(directory: Path, key: str) -> bool:
    """Whether `directory` was finished from the sources behind `key` and still holds every file it was left with."""
    record = _read_done(directory)
    return record.get("key") == key and _damaged(directory, record) is None


def _damaged(directory: Path, record: dict) -> str | None:
    """The first file that is missing, or has another size than `record` says; None where there is none."""
    for name, size in record["files"].items():
        if name in (DONE, KEY):
            continue
        try:
            if (directory / name).stat().st_size != size:
                return name
        except OSError:
            return name
    return None


def _fingerprint(path: Path) -> object:
    record = _read_done(path)
    if record:
        if name := _damaged(path, record):
            raise InputError(
                f"{path / name} is missing, or has not the size that it was made with; run the stage that makes it "
                "again (recipes/<corpus>/run.sh --help)"
            )
        if (newer := path.with_name(path.name + ".new")).exists():
            log.warning("%s is not finished; this stage takes the finished %s", newer, path)
        return [record["key"], {name: size for name, size in record["files"].items() if name not in (DONE, KEY)}]
    if path.is_dir():
        if path.with_name(path.name + ".partial").exists() or (path / KEY).exists():
            raise InputError(
                f"{path} is unfinished; run the stage that makes it first (recipes/<corpus>/run.sh --help)"
            )
        return [
            [str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns]
            for p in sorted(path.rglob("*"))
            if p.is_file()
        ]
    if path.is_file():
        return [path.stat().st_size, path.stat().st_mtime_ns]
    raise InputError(f"{path} does not exist; run the stage that makes it first (recipes/<corpus>/run.sh --help)")


def _prepare(place: Path, key: str) -> bool:
    """Leave `place` empty, or as an interrupted run with the same key left it; True where it is empty."""
    if place.exists():
        mark = place / KEY
        if mark.exists() and mark.read_text() == key:
            log.info("%s: taking up where an interrupted run stopped", place)
            (place / DONE).unlink(missing_ok=True)
            return False
        log.info("%s: removing an unfinished run with other inputs or values", place)
        shutil.rmtree(place)
    place.mkdir(parents=True)
    _write_atomically(place / KEY, key)
    return True


def _replace(place: Path, out: Path, keep_old: bool) -> None:
    """Rename the finished `place` to `out`. A kill in between leaves `place` finished, and the next run renames it."""
    aside = out.with_name(out.name + ".outdated")
    if keep_old and out.exists():
        old = out.with_name(out.name + ".old")
        aside = old if _read_done(out) or not _read_done(old) else out.with_name(out.name + ".unfinished")
        log.info("%s was made from other inputs or values: kept as %s", out, aside)
    if out.exists():
        shutil.rmtree(aside, ignore_errors=True)
        out.rename(aside)
    place.rename(out)
    if not keep_old:
        shutil.rmtree(aside, ignore_errors=True)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the unit for this process; the kernel lets go of it when the process ends, however it ends."""
    path = out.with_name(f".{out.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{out}: another process is making it; wait for it or stop it") from error
        yield
