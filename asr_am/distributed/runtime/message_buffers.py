"""Memory of messages: buffers of this process, and memory that the learners of one host share.

A large message to a learner of the same host is written once, into an anonymous file in memory (memfd), which the
receiver maps. The message itself is then only a header and the file's place: process, descriptor and inode. The file
has no name and no size limit of a file system, and is gone with the last process that has it. Another user can open it
neither through /proc (the kernel refuses) nor by its mode. Its first byte says who owns the contents:

    FREE    the sender may fill it
    LENT    it belongs to a message. Whoever drops a message's tensors last, or the sender if it never left, frees it
    CLOSED  the sender does not use it any more, so receivers unmap it

Where learners have GPUs all this memory is page-locked: a GPU copies to and from it several times as fast.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from asr_am.distributed.runtime.private_dir import first_on_host

log = logging.getLogger(__name__)

MIN_POOLED = 1 << 16  # words: the allocator reuses smaller blocks itself
MAX_FREE = 4  # free buffers that are kept of each size
STEPS_PER_OCTAVE = 4  # buffer sizes between two powers of two: with one size per length, free buffers would fill memory


def pooled_size(count: int) -> int:
    """Returns the size of the buffers that hold `count` words."""
    step = (1 << count.bit_length() - 1) // STEPS_PER_OCTAVE
    return -(-count // step) * step


class BufferPool:
    """Pool of message buffers. Thread-safe.

    Fresh memory of the size of a model costs more than copying the model, because the system clears each page first.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=MAX_FREE))

    def acquire(self, count: int) -> np.ndarray:
        """Returns a float32 array [count], not cleared. It is free again when it and all its views are deleted."""
        if count < MIN_POOLED:
            return np.empty(count, np.float32)
        size = pooled_size(count)
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            locked = torch.cuda.is_initialized()
            memory = torch.empty(size, pin_memory=True).numpy() if locked else np.empty(size, np.float32)
        # made from a memoryview so that views keep `array` alive, not only `memory`
        array = np.frombuffer(memory.data, np.float32, count)
        weakref.finalize(array, free.append, memory).atexit = False
        return array


class PageLocks:
    """Locks pages of memory that a GPU copies to and from. Made in the thread that has chosen this process' GPU."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def lock(self, owner: object, memory: mmap.mmap) -> None:
        """Locks `memory` until `owner` is deleted. Does nothing without a GPU. Where it fails, copies are slower."""
        if self._gpu is None:
            return
        address, cudart = np.frombuffer(memory, np.uint8).ctypes.data, torch.cuda.cudart()
        with torch.cuda.device(self._gpu):
            if cudart.cudaHostRegister(address, len(memory), 0) == cudart.cudaError.success:
                weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False


MIN_SHARED = 1 << 16  # bytes: a smaller message is sent as fast through a socket
MAX_SEGMENTS = 64  # of one sender. Each has two descriptors
FREE, LENT, CLOSED = range(3)
_FILE_NAME = "asr_am"
_PLACE = struct.Struct("<IIQ")
PLACE_BYTES = _PLACE.size


class SharedSegment:
    """Memory of one sender: a page with the state, then room for one message.

    Args:
        size: bytes of the largest message.

    Attributes:
        memory: the whole mapping.
        place: where other processes find it.
        held: the sender itself still uses its contents.
        sent: it belongs to a message that was sent.

    Raises:
        OSError: there is not enough memory, or a limit of this process is reached.
    """

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create(_FILE_NAME)
        weakref.finalize(self, os.close, descriptor)
        os.fchmod(descriptor, 0o600)
        # all pages now: one that is missing later would end the process (SIGBUS)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE + size)
        self.memory = mmap.mmap(descriptor, 0)
        self.place = _PLACE.pack(os.getpid(), descriptor, os.fstat(descriptor).st_ino)
        self.held = self.sent = False

    def lend(self) -> None:
        self.memory[0], self.held, self.sent = LENT, True, False

    def words(self, count: int) -> np.ndarray:
        """Returns its contents as `count` words (float32). Call it once for each message."""
        array = np.frombuffer(self.memory, np.float32, count, mmap.PAGESIZE)
        weakref.finalize(array, self._drop).atexit = False
        return array

    def _drop(self) -> None:
        if not self.sent:
            self.memory[0] = FREE
        self.held = False

    @property
    def free(self) -> bool:
        return not self.held and self.memory[0] == FREE


class SharedPool:
    """A sender's segments. Thread-safe.

    Args:
        neighbours: ranks of the other learners of this host.
    """

    def __init__(self, rank: int, neighbours: Collection[int], address: str) -> None:
        self._rank, self._neighbours, self._address = rank, set(neighbours), address
        self._lent: dict[SharedSegment, int] = {}  # to which rank
        self._free: defaultdict[int, list[SharedSegment]] = defaultdict(list)  # by size
        self._lock, self._page_locks = threading.Lock(), PageLocks()

    def acquire(self, to: int, count: int) -> SharedSegment | None:
        """Returns a segment for a message of `count` words. None: it must be sent through the socket."""
        if to not in self._neighbours or 4 * count < MIN_SHARED:
            return None
        size = 4 * pooled_size(count)
        with self._lock:
            self._collect()
            if self._free[size]:
                segment = self._free[size].pop()
            elif len(self._lent) + sum(map(len, self._free.values())) >= MAX_SEGMENTS:
                return None
            else:
                try:
                    segment = SharedSegment(size)
                    self._page_locks.lock(segment, segment.memory)
                except OSError as error:
                    self._neighbours.clear()
                    self._warn(f"learner {self._rank} cannot make shared memory of {size >> 20} MiB ({error.strerror})")
                    return None
            segment.lend()
            self._lent[segment] = to
            return segment

    def forget(self, rank: int) -> None:
        """Closes the segments that a dead learner had. Its process may still have them mapped."""
        with self._lock:
            for segment in [segment for segment, to in self._lent.items() if to == rank]:
                self._close(segment)

    def refused_by(self, rank: int) -> None:
        """Shares no memory with a learner that cannot map it."""
        if rank in self._neighbours:
            self._neighbours.discard(rank)
            self._warn(f"learner {rank} cannot map the shared memory of learner {self._rank}")

    def _collect(self) -> None:
        """Takes back the segments whose messages are gone."""
        for segment in [segment for segment in self._lent if segment.free]:
            free = self._free[len(segment.memory) - mmap.PAGESIZE]
            if len(free) < MAX_FREE:
                free.append(segment)
                del self._lent[segment]
            else:
                self._close(segment)

    def _close(self, segment: SharedSegment) -> None:
        segment.memory[0] = CLOSED
        del self._lent[segment]

    def _warn(self, what: str) -> None:
        if first_on_host(self._address, "no-shared-memory"):
            log.warning("%s: messages go through sockets, which is slower", what)


@dataclass(eq=False)
class MappedSegment:
    """A segment of the learner `source`."""

    source: int
    memory: mmap.mmap


class SharedMappings:
    """A receiver's mappings of others' segments. Used by the communication thread."""

    def __init__(self) -> None:
        self._mapped: dict[bytes, MappedSegment] = {}  # by place
        self._page_locks = PageLocks()

    def open(self, source: int, place: bytes, count: int) -> np.ndarray:
        """Returns the message in a segment as a float32 array [count].

        The segment is free again when the array and all its views are deleted.

        Raises:
            OSError: the segment cannot be mapped.
        """
        for key in [key for key, mapping in self._mapped.items() if mapping.memory[0] == CLOSED]:
            del self._mapped[key]
        if place not in self._mapped:
            mapping = self._mapped[place] = MappedSegment(source, _map(place))
            self._page_locks.lock(mapping, mapping.memory)
        memory = self._mapped[place].memory
        if mmap.PAGESIZE + 4 * count > len(memory):
            raise OSError("the segment is too small")
        array = np.frombuffer(memory, np.float32, count, mmap.PAGESIZE)
        weakref.finalize(array, memory.__setitem__, 0, FREE).atexit = False
        return array

    def forget(self, rank: int) -> None:
        """Unmaps the segments of a dead learner, as soon as no message needs them."""
        self._mapped = {place: mapping for place, mapping in self._mapped.items() if mapping.source != rank}


def _map(place: bytes) -> mmap.mmap:
    """Maps a segment of another process. Raises OSError if it is not one, or not the one that is meant."""
    process, descriptor, inode = _PLACE.unpack(place)
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME} "):
        raise OSError(f"{path}: is not a segment")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_ino != inode:
            raise OSError(f"{path}: is another segment")
        return mmap.mmap(file, 0)
    finally:
        os.close(file)
