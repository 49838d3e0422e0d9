"""A disk that fails, fills up, takes time, and loses what was not synced when the power goes.

It is a layer over a real directory, in place of the steps in `asr_am.disk`. What processes see is in the real
directory. Beside it is kept what is durable: the content of each file as of its last sync, and the names in each
directory as of its last sync. After a loss of power each directory has an arbitrary number of the changes since, in
their order, and each file its durable content, or a part of the new one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

from asr_am import disk
from asr_am.distributed.simulator.scheduler import Scheduler


@dataclass(eq=False)
class Node:
    """A file, or a directory.

    Attributes:
        content: of a file.
        synced: content that is durable.
        entries: names in a directory.
        kept: names that are durable.
        changes: changes of names since the last sync, in order. None: the name is removed.
    """

    is_dir: bool
    content: bytes = b""
    synced: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)
    changes: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, change: dict[str, Node | None]) -> None:
        self.changes.append(change)
        _apply(self.entries, change)


def _apply(entries: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class SimFile:
    """A file that is open to append or to write. Takes `room` bytes, then the disk is full."""

    def __init__(self, node: Node, file: BinaryIO, room: int | None) -> None:
        self.node, self.file, self._room = node, file, room

    def write(self, data: bytes) -> int:
        data = bytes(data)
        fits = data if self._room is None else data[: self._room]
        self.node.content += fits
        self.file.write(fits)
        if self._room is not None:
            self._room -= len(fits)
            if len(fits) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.file.close()


class SimDisk:
    """The disk of a virtual cluster, shared by its hosts.

    Args:
        root: the real directory, empty at first.
        rng: chooses delays, and what is lost.

    Attributes:
        full_until: virtual time until which the disk is full.
        failing: number of syncs to come that fail with an input/output error.
        at_step: called before each step of a process.
        faults: number of faults that took place, by kind.
    """

    def __init__(self, root: Path, scheduler: Scheduler, rng: random.Random) -> None:
        self.root, self._scheduler, self._rng = root, scheduler, rng
        self._tree = Node(is_dir=True)
        self.full_until, self.failing = -1.0, 0
        self.at_step: Callable[[], None] = lambda: None
        self.faults: Counter[str] = Counter()

    @contextmanager
    def installed(self) -> Iterator[SimDisk]:
        steps = ("write", "open_to_append", "append", "sync", "rename", "link", "make_dir", "remove", "sync_dir")
        with mock.patch.multiple(disk, **{step: getattr(self, step) for step in steps}):
            yield self

    # steps

    def write(self, path: Path, fill: disk.Fill) -> None:
        self._wait()
        node = Node(is_dir=False)
        parent = self._node(path.parent)
        with path.open("wb") as real:
            parent.change({path.name: node})
            fill(SimFile(node, real, self._room()))  # type: ignore[arg-type]
        self._sync(node)

    def open_to_append(self, path: Path) -> Any:
        self._wait()
        return SimFile(self._node(path), path.open("ab"), None)

    def append(self, file: SimFile, data: bytes) -> None:
        self._wait()
        file._room = self._room()
        try:
            file.write(data)
        finally:
            file.file.flush()

    def sync(self, file: SimFile) -> None:
        self._sync(file.node)

    def rename(self, old: Path, new: Path) -> None:
        self._wait()
        node = self._node(old)
        os.replace(old, new)
        assert old.parent == new.parent, "one directory only"
        self._node(old.parent).change({old.name: None, new.name: node})

    def link(self, old: Path, new: Path) -> None:
        self._wait()
        node = self._node(old)
        os.link(old, new)
        self._node(new.parent).change({new.name: node})

    def make_dir(self, path: Path) -> None:
        self._wait()
        if not path.exists():
            path.mkdir()
            self._node(path.parent).change({path.name: Node(is_dir=True)})

    def remove(self, path: Path) -> None:
        """Removes the parts of a directory one by one, at any of which a process may end."""
        if path.is_dir():
            for part in sorted(path.iterdir()):
                self.remove(part)
        self._wait()
        if not path.exists():
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        self._node(path.parent).change({path.name: None})

    def sync_dir(self, path: Path) -> None:
        self._wait()
        node = self._node(path)
        node.kept, node.changes = dict(node.entries), []

    # faults

    def power_loss(self) -> None:
        """Loses what was not durable. No process may be running."""
        self.faults["power loss"] += 1
        self._lose(self._tree)
        for path in self.root.iterdir():
            disk_path = path
            shutil.rmtree(disk_path) if disk_path.is_dir() else disk_path.unlink()
        self._write_out(self._tree, self.root)

    def _lose(self, node: Node) -> None:
        if node.is_dir:
            entries = dict(node.kept)
            for change in node.changes[: self._rng.randint(0, len(node.changes))]:
                _apply(entries, change)
            self.faults["names lost"] += entries.keys() != node.entries.keys()
            node.entries, node.kept, node.changes = entries, dict(entries), []
            for part in entries.values():
                self._lose(part)
        elif node.content != node.synced:
            safe = len(node.synced) if node.content.startswith(node.synced) else 0  # of a file that only grows
            torn = node.content[: self._rng.randint(safe, len(node.content))]
            content = self._rng.choice([node.synced, torn, node.content])
            self.faults["content lost"] += content != node.content
            node.content = node.synced = content

    def _write_out(self, node: Node, path: Path) -> None:
        if not node.is_dir:
            path.write_bytes(node.content)
            return
        path.mkdir(exist_ok=True)
        for name, part in node.entries.items():
            self._write_out(part, path / name)

    # helpers

    def _node(self, path: Path) -> Node:
        node = self._tree
        for name in path.relative_to(self.root).parts:
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = node.entries[name]
        return node

    def _sync(self, node: Node) -> None:
        content = node.content
        self._wait()
        if self.failing:
            self.failing -= 1
            self.faults["disk error"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        node.synced = content

    def _room(self) -> int | None:
        if self._scheduler.now >= self.full_until:
            return None
        self.faults["disk full"] += 1
        return self._rng.choice([0, 100, 3000])

    def _wait(self) -> None:
        """Lets some time pass, in which anything may happen."""
        self.at_step()
        self._scheduler.sleep(self._rng.choice([0.0, 0.001, 0.001, 0.01, 0.2]))
