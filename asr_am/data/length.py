"""Audio files whose header does not say how long they are, or that are truncated.

flac    written to a pipe has no number of samples. libsndfile takes that for the largest possible number.
mp3     without a Xing or Info frame: libsndfile divides the file's size, tags included, by that of its first frame. At
        a variable bit rate, or with a picture in a tag, that is far off, and reading stops there if it is too small.
wav     and sphere files that end too early are shorter files to libsndfile. So are those whose header gives too few
        samples: a recorder or a pipe that was stopped left 0, or what was written until then.
ogg     files that end too early are shorter files to libsndfile. Their last page does not say that it is the last.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import SEEK_CUR, SEEK_END
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import soundfile

from asr_am.errors import InputError

MAX_SECONDS = 7 * 24 * 3600  # a header that claims more does not know the length
BLOCK = 1 << 16  # samples decoded at once
STREAMED_SIZE = 0x7FFF0000  # from this size on, a wav header was written to a pipe (0x7FFFFFFF and others)
SIZE_TOLERANCE = 512  # bytes, for headers that count themselves or padding
WITH_SOUND = (b"data", b"SSND", b"RIFF", b"RIFX", b"FORM")  # chunks: another one means more audio
OGG, OGG_LAST, OGG_HEADER = b"OggS", 4, 27  # begin of a page, flag of the last one, bytes before the segments' sizes
OGG_PAGE = OGG_HEADER + 255 + 255 * 255  # bytes, at most
ID3, ID3_HEADER, ID3_FOOTER_FLAG = b"ID3", 10, 0x10


class _ForwardReader(soundfile.SoundFile):
    """Sequential reader. soundfile seeks after each read, which libsndfile cannot do at an end it did not know."""

    def seekable(self) -> bool:
        return False


def is_endless(header: soundfile.SoundFile | soundfile._SoundFileInfo) -> bool:
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
    """True if a wav, sphere or ogg file ends before what its header or pages promise. False for other formats."""
    with path.open("rb") as file:
        magic = file.read(12)
        if magic.startswith(b"RIFF") and magic.endswith(b"WAVE"):
            data = _find_chunk(file, "<", b"data")
            end = data.begin + data.size if data else None
        elif magic.startswith(b"NIST_1A\n"):
            end = _sphere_end(magic + file.read(1 << 14))
        elif magic.startswith(OGG):
            return not _ends_in_last_page(file)
        else:
            return False
    return end is not None and end > path.stat().st_size + SIZE_TOLERANCE


def _ends_in_last_page(file: BinaryIO) -> bool:
    """True if an ogg file ends with a whole page that is marked as the last one of its stream (RFC 3533)."""
    total = file.seek(0, SEEK_END)
    file.seek(max(0, total - OGG_PAGE))
    tail = file.read()
    page = tail[tail.rfind(OGG) :]
    if len(page) < OGG_HEADER or not page[5] & OGG_LAST:
        return False
    body = OGG_HEADER + page[OGG_HEADER - 1]  # after the sizes of its segments
    return len(page) >= body + sum(page[OGG_HEADER:body])


def hides_samples(path: Path) -> bool:
    """True if a wav, sphere, AU or AIFF file goes on after the samples that its header gives: a streamed file whose
    header was never completed, or two files in one. Raises OSError if it cannot be read.
    """
    with path.open("rb") as file:
        return stream_hides_samples(file)


def stream_hides_samples(file: BinaryIO) -> bool:
    """As `hides_samples`, of an open file."""
    data = _data_chunk(file)
    if data is None:
        return False
    total = file.seek(0, SEEK_END)
    end = data.begin + data.size
    if end + SIZE_TOLERANCE >= total:
        return False
    file.seek(end)
    if file.read(len(ID3)) == ID3:
        return False
    if data.order:  # chunks begin at even bytes
        file.seek(end + end % 2)
        return _ends_in_samples(file, total, data.order)
    file.seek(end)
    return any(block.strip(b"\0") for block in iter(lambda: file.read(BLOCK), b""))  # padding is no sound


def _ends_in_samples(file: BinaryIO, total: int, order: str) -> bool:
    """True unless what follows is chunks that hold no sound, up to the end of the file, or padding."""
    while len(head := file.read(8)) == 8:
        name, size = struct.unpack(f"{order}4sI", head)
        if name in WITH_SOUND:
            return True
        if not (name.isascii() and name.decode().isprintable()) or file.tell() + size > total + SIZE_TOLERANCE:
            file.seek(-8, SEEK_CUR)
            return any(block.strip(b"\0") for block in iter(lambda: file.read(BLOCK), b""))
        file.seek(size + size % 2, SEEK_CUR)
    return False


class _Data(NamedTuple):
    """Where samples are, in bytes.

    Attributes:
        begin: their first byte.
        size: their number by the header.
        order: byte order of chunks in struct's notation, "" without chunks.
        size_at: place of a number of four bytes that is `size`, None if the header cannot be completed here.
    """

    begin: int
    size: int
    order: str = ""
    size_at: int | None = None


def _data_chunk(file: BinaryIO) -> _Data | None:
    """Returns where the samples are, None for another format, or if the header does not say how long they are."""
    file.seek(0)
    if len(magic := file.read(12)) < 12:
        return None
    if magic[:4] in (b"RIFF", b"RIFX") and magic[8:] == b"WAVE":
        return _find_chunk(file, "<" if magic[:4] == b"RIFF" else ">", b"data")
    if magic.startswith(b"FORM") and magic[8:] in (b"AIFF", b"AIFC"):
        found = _find_chunk(file, ">", b"SSND")
        return found and found._replace(size_at=None)  # COMM has a number of samples too
    if magic.startswith(b".snd"):
        begin, size = struct.unpack(">2I", magic[4:])
        return _Data(begin, size, size_at=8) if size < STREAMED_SIZE else None
    if magic.startswith(b"NIST_1A\n"):
        file.seek(0)
        header = file.read(1 << 14)
        end = None if b"shorten" in header.partition(b"end_head")[0] else _sphere_end(header)
        begin = int(header.split(b"\n", 2)[1]) if end is not None else 0
        return _Data(begin, end - begin) if end is not None else None
    return None


def _find_chunk(file: BinaryIO, order: str, wanted: bytes) -> _Data | None:
    while len(head := file.read(8)) == 8:
        name, size = struct.unpack(f"{order}4sI", head)
        if name == wanted:
            return _Data(file.tell(), size, order, file.tell() - 4) if size < STREAMED_SIZE else None
        file.seek(size + size % 2, SEEK_CUR)  # chunks begin at even bytes
    return None


@contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yields `path`, or a temporary copy whose header counts all samples. Raises InputError if that cannot be made."""
    if not hides_samples(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        with copy.open("r+b") as file:
            data = _data_chunk(file)
            total = file.seek(0, SEEK_END)
            if data is not None and data.size_at is not None and total < STREAMED_SIZE:
                file.seek(data.size_at)
                file.write(struct.pack(f"{data.order or '>'}I", total - data.begin))
            elif data is not None and not data.order and data.size_at is None:
                _complete_sphere(file, data, total)
            else:
                raise InputError(
                    f"{path}: goes on after the samples that its header gives; write it again, e.g. by sox"
                )
        yield copy


def _complete_sphere(file: BinaryIO, data: _Data, total: int) -> None:
    """Writes the number of samples per channel into the header, whose size stays."""
    file.seek(0)
    header = file.read(data.begin)
    fields = dict(re.findall(rb"^(\w+) -i (\d+)", header, re.MULTILINE))
    width = max(1, int(fields[b"sample_n_bytes"]) * int(fields.get(b"channel_count", 1)))
    new = re.sub(rb"(?m)^sample_count -i \d+", b"sample_count -i %d" % ((total - data.begin) // width), header)
    file.seek(0)
    file.write(new[: data.begin].ljust(data.begin))


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
        with completed(path) as whole, _open_forward(whole, soundfile.info(whole).format) as file:
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
