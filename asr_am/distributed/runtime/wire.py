"""The header before every mail message: of one size, read and checked before anything else is looked at.

A letter travels in pieces, each a message of this header and up to PIECE float32 numbers of the letter's tensors laid
end to end, in the order of `offset`. The receiver writes TAKEN back when the letter is collected, or refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"asrm"
VERSION = 1
FLOAT32 = 1
CHUNK = 1 << 18  # numbers; 1 MiB stays in a core's cache between the socket and the letter
MAX_TENSORS = 8
MAX_NUMBERS = 1 << 40
FIRST_CLOCK = -(1 << 63)
_HEADER = struct.Struct(f"<4s4B16s2Iq16sQIQ{MAX_TENSORS}Q")
SIZE = _HEADER.size


class Malformed(ValueError):
    """Bytes that are no header of this format."""


class Kind(IntEnum):
    """HELLO: first on a connection, with the sender's address as payload. PIECE: of a letter. TAKEN: a credit, for a
    letter that the incarnation `clock` of the receiver sent. LEAVE: the sender goes; `clock` is the rank that it lost,
    its own if none.
    """

    HELLO = 1
    CHUNK = 2
    ACK = 3
    GOODBYE = 4


@dataclass(frozen=True)
class WireHeader:
    """source, incarnation: of whoever sends this message. tag, clock, lengths: of the letter. letter: its number at
    its sender, from 1. attempt: one more after each time the connection broke. offset: of the piece, in numbers.
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


def encode(header: WireHeader) -> bytes:
    """The SIZE bytes of a header."""
    lengths = header.lengths + (0,) * (MAX_TENSORS - len(header.lengths))
    return _HEADER.pack(
        MAGIC, VERSION, header.kind, FLOAT32, len(header.lengths), header.run, header.source, header.incarnation,
        header.clock, header.tag.encode("ascii"), header.seq, header.conn_epoch, header.offset, *lengths,
    )  # fmt: skip


def check_tag(tag: str) -> None:
    """ValueError for a tag that does not fit into a header."""
    if not (0 < len(tag) <= 16 and tag.isascii() and tag.isprintable()):
        raise ValueError(f"tag {tag!r}: is 1 to 16 printable ASCII characters")


def decode(data: bytes) -> WireHeader:
    """The header in `data`; Malformed where it is none, whatever the bytes."""
    if len(data) != SIZE:
        raise Malformed(f"a header has {SIZE} bytes, not {len(data)}")
    magic, version, kind, dtype, count, run, source, incarnation, clock, tag, message, attempt, offset, *lengths = (
        _HEADER.unpack(data)
    )
    if magic != MAGIC or version != VERSION or dtype != FLOAT32:
        raise Malformed(f"starts with {data[:8]!r}: another program, format or type of numbers")
    if count > MAX_TENSORS or any(lengths[count:]) or sum(lengths) > MAX_NUMBERS or offset > sum(lengths):
        raise Malformed(f"{count} tensors of lengths {lengths}, offset {offset}")
    name = tag.rstrip(b"\0")
    if not name.isascii() or (name and not name.decode().isprintable()):
        raise Malformed(f"tag {tag!r}")
    try:
        known = Kind(kind)
    except ValueError:
        raise Malformed(f"kind {kind}") from None
    return WireHeader(known, run, source, incarnation, clock, name.decode(), message, attempt, offset,
                  tuple(lengths[:count]))  # fmt: skip
