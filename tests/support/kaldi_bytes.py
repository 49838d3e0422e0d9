"""Kaldi's binary encoding, byte by byte as in io-funcs.cc, kaldi-matrix.cc and packed-matrix.cc."""

from __future__ import annotations

import struct


def token(*names: str) -> bytes:
    return b"".join(name.encode() + b" " for name in names)


def integer(*values: int) -> bytes:
    return b"".join(b"\x04" + struct.pack("<i", value) for value in values)


def unsigned(value: int) -> bytes:
    return b"\xfc" + struct.pack("<I", value)


def number(value: float) -> bytes:
    return b"\x04" + struct.pack("<f", value)


def double(value: float) -> bytes:
    return b"\x08" + struct.pack("<d", value)


def integers(*values: int) -> bytes:
    return b"\x04" + struct.pack("<i", len(values)) + struct.pack(f"<{len(values)}i", *values)


def vector(*values: float) -> bytes:
    return token("FV") + integer(len(values)) + struct.pack(f"<{len(values)}f", *values)


def matrix(rows: list[list[float]]) -> bytes:
    flat = [value for row in rows for value in row]
    return token("FM") + integer(len(rows), len(rows[0])) + struct.pack(f"<{len(flat)}f", *flat)


def double_vector(values: list[float]) -> bytes:
    return token("DV") + integer(len(values)) + struct.pack(f"<{len(values)}d", *values)


def double_matrix(rows: list[list[float]]) -> bytes:
    flat = [value for row in rows for value in row]
    columns = len(rows[0]) if rows else 0
    return token("DM") + integer(len(rows), columns) + struct.pack(f"<{len(flat)}d", *flat)


def packed_matrix(rows: list[list[float]]) -> bytes:
    """The lower triangle of a symmetric matrix, row by row."""
    lower = [value for number, row in enumerate(rows) for value in row[: number + 1]]
    return token("DP") + integer(len(rows)) + struct.pack(f"<{len(lower)}d", *lower)
