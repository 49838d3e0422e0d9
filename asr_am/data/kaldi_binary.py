"""Kaldi's binary encoding of objects: tokens, numbers, vectors and matrices, after `\\0B`."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from asr_am.errors import InputError

HEADER = b"\0B"
MAX_TOKEN = 64
MAX_VALUE = 1e15  # in a matrix of a file


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

    def vector(self, dtype: type[np.floating] = np.float32) -> np.ndarray:
        """Reads float32 or float64 as `dtype` [N]."""
        kind = self.expect("FV", "DV")
        return self._values(kind, self._size(), dtype)

    def matrix(self, dtype: type[np.floating] = np.float32) -> np.ndarray:
        """Reads float32 or float64 as `dtype` [R, C]."""
        kind = self.expect("FM", "DM")
        rows, columns = self._size(), self._size()
        return self._values(kind, rows * columns, dtype).reshape(rows, columns)

    def symmetric_matrix(self) -> np.ndarray:
        """Reads a packed lower triangle as float64 [R, R]."""
        kind, size = self.expect("FP", "DP"), self._size()
        values = self._values(kind, size * (size + 1) // 2, np.float64)
        lower_RR = np.zeros((size, size))
        lower_RR[np.tril_indices(size)] = values
        return lower_RR + np.tril(lower_RR, -1).T

    def _size(self) -> int:
        size = self.integer()
        if size < 0:
            raise self.error("a negative size")
        return size

    def _values(self, kind: str, count: int, dtype: type[np.floating]) -> np.ndarray:
        width = 4 if kind.startswith("F") else 8
        return np.frombuffer(self.take(width * count), dtype=f"<f{width}").astype(dtype)


def read_mixture(reader: KaldiReader) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads a DiagGmm: weights [G], means and variances [G, D], float32. Raises InputError if it is none."""
    reader.expect("<DiagGMM>", "<DiagGMMBegin>")
    if reader.expect("<GCONSTS>", "<WEIGHTS>") == "<GCONSTS>":
        reader.vector()
        reader.expect("<WEIGHTS>")
    weights_G = reader.vector()
    reader.expect("<MEANS_INVVARS>")
    scaled_GD = reader.matrix()
    reader.expect("<INV_VARS>")
    precision_GD = reader.matrix()
    reader.expect("</DiagGMM>", "<DiagGMMEnd>")
    if scaled_GD.shape != precision_GD.shape or len(scaled_GD) != len(weights_G) or not len(weights_G):
        raise reader.error("a mixture with arrays of different sizes")
    if not (np.isfinite(scaled_GD).all() and (precision_GD > 0).all() and (weights_G > 0).all()):
        raise reader.error("a mixture with a weight or variance that is not positive")
    return weights_G, scaled_GD / precision_GD, 1 / precision_GD


def read_matrix(path: Path, remedy: str) -> np.ndarray:
    """Reads a file of one matrix, binary or text, as float64 [R, C]. Raises InputError if it holds none."""
    try:
        content = path.read_bytes()
        matrix = KaldiReader(path, remedy).matrix(np.float64) if content.startswith(HEADER) else _parse_matrix(content)
        if not (np.abs(matrix) < MAX_VALUE).all():
            raise ValueError("a value that is not finite, or huge")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: holds no matrix ({error}); {remedy}") from error
    return matrix


def _parse_matrix(content: bytes) -> np.ndarray:
    text = content.decode("ascii").strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError("no matrix in brackets")
    rows = [[float(x) for x in line.split()] for line in text[1:-1].splitlines() if line.strip()]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("rows of different lengths")
    return np.array(rows)


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
