"""Kaldi's binary encoding of objects: tokens, numbers, vectors and matrices, after `\\0B`."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from asr_am.errors import InputError

HEADER = b"\0B"
MAX_TOKEN = 64


class KaldiReader:
    """Reads one object from a binary file.

    Every method raises InputError with the file and the byte where something else is found.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        """Args:
        path: the file.
        remedy: advice for error messages.
        """
        self.path, self.remedy = path, remedy
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
        self.position = len(HEADER)
        if not self.content.startswith(HEADER):
            raise InputError(
                f"{path}: not in Kaldi's binary format; convert it (gmm-copy --binary=true, copy-tree --binary=true, "
                "copy-matrix --binary=true)"
            )

    def error(self, what: str) -> InputError:
        return InputError(f"{self.path}: {what} at byte {self.position}; {self.remedy}")

    def take(self, size: int) -> bytes:
        piece = self.content[self.position : self.position + size]
        if size < 0 or len(piece) < size:
            raise self.error("ends too early")
        self.position += size
        return piece

    def token(self) -> str:
        end = self.content.find(b" ", self.position, self.position + MAX_TOKEN)
        if end < 0:
            raise self.error("no token")
        return self.take(end + 1 - self.position)[:-1].decode("latin-1")

    def expect(self, *tokens: str) -> str:
        """Reads one of `tokens`."""
        begin = self.position
        found = self.token()
        if found not in tokens:
            self.position = begin
            raise self.error(f"no {' or '.join(tokens)}")
        return found

    def integer(self, signed: bool = True) -> int:
        size = b"\4" if signed else b"\xfc"
        if self.take(1) != size:
            raise self.error("no 32-bit integer")
        return int(struct.unpack("<i" if signed else "<I", self.take(4))[0])

    def number(self) -> float:
        size = self.take(1)
        if size not in (b"\4", b"\10"):
            raise self.error("no floating-point number")
        return float(struct.unpack("<f" if size == b"\4" else "<d", self.take(size[0]))[0])

    def integers(self) -> list[int]:
        if self.take(1) != b"\4":
            raise self.error("no vector of 32-bit integers")
        (count,) = struct.unpack("<i", self.take(4))
        return np.frombuffer(self.take(4 * count), dtype="<i4").tolist()

    def vector(self) -> np.ndarray:
        """Reads float32 or float64 as float32 [N]."""
        kind = self.expect("FV", "DV")
        count, width = self.integer(), 4 if kind == "FV" else 8
        return np.frombuffer(self.take(width * count), dtype=f"<f{width}").astype(np.float32)

    def matrix(self) -> np.ndarray:
        """Reads float32 or float64 as float32 [R, C]."""
        kind = self.expect("FM", "DM")
        rows, columns, width = self.integer(), self.integer(), 4 if kind == "FM" else 8
        content = np.frombuffer(self.take(width * rows * columns), dtype=f"<f{width}")
        return content.astype(np.float32).reshape(rows, columns)


class KaldiWriter:
    """Collects one object, which `save` writes."""

    def __init__(self) -> None:
        self.parts = [HEADER]

    def token(self, *tokens: str) -> None:
        self.parts += [f"{token} ".encode() for token in tokens]

    def integer(self, *values: int) -> None:
        self.parts += [b"\4" + struct.pack("<i", value) for value in values]

    def unsigned(self, value: int) -> None:
        self.parts.append(b"\xfc" + struct.pack("<I", value))

    def number(self, value: float) -> None:
        self.parts.append(b"\4" + struct.pack("<f", value))

    def integers(self, values: list[int]) -> None:
        self.parts.append(b"\4" + struct.pack("<i", len(values)) + np.array(values, dtype="<i4").tobytes())

    def vector(self, values_N: np.ndarray) -> None:
        self.token("FV")
        self.integer(len(values_N))
        self.parts.append(values_N.astype("<f4").tobytes())

    def matrix(self, values_RC: np.ndarray) -> None:
        self.token("FM")
        self.integer(*values_RC.shape)
        self.parts.append(values_RC.astype("<f4").tobytes())

    def save(self, path: Path) -> None:
        path.write_bytes(b"".join(self.parts))
