"""Wire format: the fixed-size header of every frame, decoded and checked before anything else.

A message is sent in chunks. Each chunk is this header and up to CHUNK words of 4 bytes of the message's tensors, which
are laid end to end, each from a word on, in the order of `offset`. Between learners of one host a large message is a
single frame, this header and the place of the words in shared memory. The receiver answers with an ACK when the message
is received by a task, or rejected.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from asr_am.distributed.runtime.security import FRAME_BYTES
from asr_am.distributed.wire_dtype import WIRE_DTYPES, num_words

MAGIC = b"asrm"
VERSION = 1
DTYPES = tuple(WIRE_DTYPES.values())
CHUNK = FRAME_BYTES // 4  # words: 1 MiB stays in a core's cache between the socket and the message
MAX_TENSORS = 8
MAX_WORDS = 1 << 40
FIRST_CLOCK = -(1 << 63)
_HEADER = struct.Struct(f"<4s5B16s2Iq16sQIQ{MAX_TENSORS}Q")
SIZE = _HEADER.size


class Malformed(ValueError):
    """Bytes that are not a header of this format."""


class Kind(IntEnum):
    """Kind of a frame.

    Attributes:
        HELLO: first frame on a connection, with the sender's address as payload.
        CHUNK: part of a message.
        SHARED: a message in shared memory, with the place of the memory as payload (`message_buffers`).
        ACK: a credit for a message. `clock` is the incarnation that sent that message.
        GOODBYE: the sender leaves. `clock` is the rank that it lost, or its own rank.
        UNSHARED: the memory of a SHARED message cannot be mapped. `clock` as in ACK.
    """

    HELLO = 1
    CHUNK = 2
    ACK = 3
    GOODBYE = 4
    SHARED = 5
    UNSHARED = 6


@dataclass(frozen=True)
class WireHeader:
    """Header of a frame.

    Attributes:
        run: identity of the run, 16 bytes.
        source: rank of the sender of this frame.
        clock: clock of the message, or as described for `Kind`.
        seq: number of the message at its sender, from 1.
        conn_epoch: number of the connection, which grows each time a connection is made again.
        offset: position of the chunk in the message, in words.
        exact: bits of those that are int32.
        dtype: type of the others.
    """

    kind: Kind
    run: bytes
    source: int
    incarnation: int
    clock: int = 0
    tag: str = ""
    seq: int = 0
    conn_epoch: int = 0
    offset: int = 0
    lengths: tuple[int, ...] = ()
    exact: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Type of each tensor."""
        return tuple(torch.int32 if self.exact >> k & 1 else self.dtype for k in range(len(self.lengths)))

    @property
    def words(self) -> int:
        """Words of all tensors."""
        return num_words(self.lengths, self.dtypes)


def encode(header: WireHeader) -> bytes:
    """Returns the SIZE bytes of a header."""
    lengths = header.lengths + (0,) * (MAX_TENSORS - len(header.lengths))
    return _HEADER.pack(
        MAGIC, VERSION, header.kind, DTYPES.index(header.dtype), len(header.lengths), header.exact, header.run,
        header.source, header.incarnation, header.clock, header.tag.encode("ascii"), header.seq, header.conn_epoch,
        header.offset, *lengths,
    )  # fmt: skip


def check_tag(tag: str) -> None:
    """Raises ValueError for a tag that does not fit into a header."""
    if not (0 < len(tag) <= 16 and tag.isascii() and tag.isprintable()):
        raise ValueError(f"tag {tag!r}: must be 1 to 16 printable ASCII characters")


def decode(data: bytes) -> WireHeader:
    """Returns the header in `data`. Raises Malformed, and nothing else, if the bytes are not a header."""
    if len(data) != SIZE:
        raise Malformed(f"a header has {SIZE} bytes, not {len(data)}")
    magic, version, kind, dtype, count, exact, *fields = _HEADER.unpack(data)
    run, source, incarnation, clock, tag, seq, conn_epoch, offset, *lengths = fields
    if magic != MAGIC or version != VERSION or dtype >= len(DTYPES):
        raise Malformed(f"starts with {data[:8]!r}: another program, version or data type")
    if count > MAX_TENSORS or exact >> count or any(lengths[count:]) or sum(lengths) > MAX_WORDS:
        raise Malformed(f"{count} tensors of lengths {lengths}")
    name = tag.rstrip(b"\0")
    if not name.isascii() or (name and not name.decode().isprintable()):
        raise Malformed(f"tag {tag!r}")
    try:
        known = Kind(kind)
    except ValueError:
        raise Malformed(f"kind {kind}") from None
    header = WireHeader(
        known, run, source, incarnation, clock, name.decode(), seq, conn_epoch, offset, tuple(lengths[:count]), exact,
        DTYPES[dtype],
    )  # fmt: skip
    if offset > header.words:
        raise Malformed(f"{header.words} words, offset {offset}")
    return header
