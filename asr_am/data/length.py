"""Audio files whose header does not say how long they are, or that are truncated.

flac    written to a pipe has no number of samples. libsndfile takes that for the largest possible number.
mp3     without a Xing or Info frame: libsndfile divides the file's size, tags included, by that of its first frame. At
        a variable bit rate, or with a picture in a tag, that is far off, and reading stops there if it is too small.
wav     and sphere files that end too early are shorter files to libsndfile.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from os import SEEK_CUR
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import soundfile

from asr_am.errors import InputError

MAX_SECONDS = 7 * 24 * 3600  # a header that claims more does not know the length
BLOCK = 1 << 16  # samples decoded at once
STREAMED_SIZE = 0x7FFF0000  # from this size on, a wav header was written to a pipe (0x7FFFFFFF and others)
SIZE_TOLERANCE = 512  # bytes, for headers that count themselves or padding
ID3, ID3_HEADER, ID3_FOOTER_FLAG = b"ID3", 10, 0x10


class Header(Protocol):
    """The length that a header claims."""

    @property
    def frames(self) -> int: ...
    @property
    def samplerate(self) -> int: ...


class _ForwardReader(soundfile.SoundFile):
    """Sequential reader. soundfile seeks after each read, which libsndfile cannot do at an end it did not know."""

    def seekable(self) -> bool:
        return False


def is_endless(header: Header) -> bool:
    """True if the header claims more than a recording can have, as headers without a known length do."""
    return header.frames > MAX_SECONDS * header.samplerate


def has_length(path: Path) -> bool:
    """True if the header has the number of samples.

    Raises:
        OSError, SoundFileError: the file is not audio.
        TypeError: the name ends in .raw, which soundfile takes for audio without a header.
    """
    header = soundfile.info(path)
    if header.format != "MP3":
        return not is_endless(header)
    with _open_forward(path, header.format) as file:
        return not is_endless(file)


def is_truncated(path: Path) -> bool:
    """True if a wav or sphere file ends before the samples that its header promises. False for other formats."""
    with path.open("rb") as file:
        magic = file.read(12)
        if magic.startswith(b"RIFF") and magic.endswith(b"WAVE"):
            end = _riff_end(file)
        elif magic.startswith(b"NIST_1A\n"):
            end = _sphere_end(magic + file.read(1 << 14))
        else:
            return False
    return end is not None and end > path.stat().st_size + SIZE_TOLERANCE


def _riff_end(file: BinaryIO) -> int | None:
    """Returns the byte after the last sample, None if unknown."""
    while len(head := file.read(8)) == 8:
        name, size = struct.unpack("<4sI", head)
        if name == b"data":
            return file.tell() + size if size < STREAMED_SIZE else None
        file.seek(size + size % 2, SEEK_CUR)  # chunks begin at even bytes
    return None


def _sphere_end(header: bytes) -> int | None:
    """Returns the byte after the last sample, None if unknown."""
    fields = dict(re.findall(rb"^(\w+) -i (\d+)\s*$", header.partition(b"end_head")[0], re.MULTILINE))
    sizes = [fields.get(name) for name in (b"sample_count", b"sample_n_bytes")]
    begin = header.split(b"\n", 2)[1].strip()
    if None in sizes or not begin.isdigit():
        return None
    return int(begin) + math.prod(map(int, [*sizes, fields.get(b"channel_count", 1)]))


def decode_blocks(path: Path) -> Iterator[np.ndarray]:
    """Yields float32 blocks [N, C] to the end of the file, whatever its header says. Raises InputError on damage."""
    try:
        with _open_forward(path, soundfile.info(path).format) as file:
            while len(block_NC := file.read(out=np.empty((BLOCK, file.channels), np.float32))) > 0:
                yield block_NC
    except (soundfile.SoundFileError, OSError) as error:
        raise InputError(f"{path}: cannot be decoded ({error}); replace it") from error


@contextmanager
def _open_forward(path: Path, audio_format: str) -> Iterator[soundfile.SoundFile]:
    if audio_format != "MP3":
        with _ForwardReader(path) as file:
            yield file
        return
    # libsndfile does not estimate the length of a pipe, whose size is unknown, but it cannot skip long tags there.
    command = ["tail", "-c", f"+{_tags_end(path) + 1}", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as feed:
        assert feed.stdout is not None
        with _ForwardReader(feed.stdout.fileno(), closefd=False) as file:
            yield file


def _tags_end(path: Path) -> int:
    """Returns the size in bytes of the ID3v2 tags at the start of a file."""
    end = 0
    with path.open("rb") as file:
        while (tag := file.read(ID3_HEADER)).startswith(ID3) and len(tag) == ID3_HEADER:
            size = sum((byte & 0x7F) << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=True))
            end += ID3_HEADER + size + (ID3_HEADER if tag[5] & ID3_FOOTER_FLAG else 0)
            file.seek(end)
    return end
