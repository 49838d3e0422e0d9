"""Damages files at random and reads them. A reader gives one clear line, or what was there before.

    python -m scripts.soak.readers [--count 10000] [--reader NAME ...] [--first N]

Prints a line per reader: how many damaged files were read as the same, as something else, or refused with an
InputError. Everything else is a defect: another exception, a crash, more than TIMEOUT seconds or MEMORY bytes, a
message of several lines or one that names no file, and another content where a checksum should have told. Exits with
1 if there is a defect, after the command that repeats it. Damage depends on the reader's name and the number only.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from asr_am.data.textfile import GZIP
from asr_am.errors import MAX_MESSAGE, InputError
from asr_am.stages.target import git_commit
from scripts.soak.results import record
from tests.support.reader_cases import CASES, Case, write_all

SECTION = "Damaged files"
OUTCOMES = ("same", "different", "refused", "defect")
TIMEOUT = 60.0  # seconds
MEMORY = 1 << 30  # bytes beyond what the process had before
NUMBERS = (
    b"9" * 5000, b"-1", b"0", b"1e999", b"nan", b"-inf", b"99999999999999999999", b"2147483648", b"0x10", b"1_0",
    b"\xd9\xa1", b"1.5",
)  # fmt: skip
JUNK = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b"\t", b"\xc2\xa0", b";;", b"{", b"}", b"<", b"/", b"|",
)  # fmt: skip


def damage(content: bytes, dice: random.Random, text: bool) -> bytes:
    """Returns a damaged copy: cut, flipped, inserted, removed, moved or repeated bytes, in text also other values."""
    if content.startswith(GZIP) and dice.random() < 0.7:  # the archive itself is damaged in the other cases
        return gzip.compress(damage(gzip.decompress(content), dice, text), 1)
    kinds = [truncate, flip, flip, overwrite, insert, remove, swap, repeat]
    if text:
        kinds += [number, number, junk, line, line, long, field_value, field_value]
    for _ in range(1 if dice.random() < 0.7 else 3):
        content = dice.choice(kinds)(content, dice)
    return content


def truncate(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.choice([0, dice.randrange(len(content) + 1)])]


def flip(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 8]) if changed else 0):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def span(content: bytes, dice: random.Random) -> tuple[int, int]:
    begin = dice.randrange(len(content) + 1)
    return begin, min(len(content), begin + dice.choice([1, 4, 8, 64, 1000]))


def overwrite(content: bytes, dice: random.Random) -> bytes:
    begin, end = span(content, dice)
    value = dice.choice([b"\x00", b"\xff", b"\x7f", dice.randbytes(1)])
    return content[:begin] + dice.choice([value * (end - begin), dice.randbytes(end - begin)]) + content[end:]


def insert(content: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(content) + 1)
    return content[:begin] + dice.randbytes(dice.choice([1, 2, 4, 100])) + content[begin:]


def remove(content: bytes, dice: random.Random) -> bytes:
    begin, end = span(content, dice)
    return content[:begin] + content[end:]


def swap(content: bytes, dice: random.Random) -> bytes:
    a, b, c = sorted(dice.randrange(len(content) + 1) for _ in range(3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def repeat(content: bytes, dice: random.Random) -> bytes:
    begin, end = span(content, dice)
    return content[:end] + content[begin:end] * dice.choice([1, 2, 50]) + content[end:]


def number(content: bytes, dice: random.Random) -> bytes:
    """Replaces a run of digits."""
    at = [i for i in range(len(content)) if content[i : i + 1].isdigit() and not content[i - 1 : i].isdigit()]
    if not at:
        return content
    begin = end = dice.choice(at)
    while end < len(content) and content[end : end + 1].isdigit():
        end += 1
    return content[:begin] + dice.choice(NUMBERS) + content[end:]


def junk(content: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(content) + 1)
    return content[:begin] + dice.choice(JUNK) + content[begin:]


def line(content: bytes, dice: random.Random) -> bytes:
    """Removes, repeats, moves or reorders a line or its words."""
    lines = content.split(b"\n")
    i, j = dice.randrange(len(lines)), dice.randrange(len(lines))
    words = lines[i].split(b" ")
    match dice.randrange(5):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case 3:
            dice.shuffle(words)
            lines[i] = b" ".join(words)
        case 4:
            del words[dice.randrange(len(words))]
            lines[i] = b" ".join(words)
    return b"\n".join(lines)


def long(content: bytes, dice: random.Random) -> bytes:
    """Inserts a word of 100 kB."""
    begin = dice.randrange(len(content) + 1)
    return content[:begin] + dice.choice([b"x", b"9", b"{", b"[", b"/", b"a "]) * 100_000 + content[begin:]


VALUES: tuple[Any, ...] = (
    None, -1, 0, 1e308, float("nan"), "x", "", [], {}, [1, 2], 10**30, True, "command", [[]], {"a": None}, "/dev/zero",
)  # fmt: skip


def field_value(content: bytes, dice: random.Random) -> bytes:
    """Replaces or removes a value of JSON, or of one of its lines."""
    lines = content.split(b"\n")
    chosen = dice.randrange(len(lines))
    for begin, end in ((0, len(lines)), (chosen, chosen + 1)):
        try:
            value = json.loads(b"\n".join(lines[begin:end]))
        except (ValueError, RecursionError):
            continue
        changed = json.dumps(_with_other_value(value, dice)).encode()
        return b"\n".join([*lines[:begin], changed, *lines[end:]])
    return number(content, dice)


def _with_other_value(value: Any, dice: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or dice.random() < 0.1:
        return dice.choice(VALUES)
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = dice.choice(keys)
    if dice.random() < 0.15:
        del value[key]
    else:
        value[key] = _with_other_value(value[key], dice)
    return value


HEAD = [
    "| reader | files | same | different | refused | defects | MiB | commit | date |",
    "|:--|--:|--:|--:|--:|--:|--:|:--|:--|",
]


@dataclass
class Counts:
    """What reading the damaged files of one reader gave.

    Attributes:
        outcomes: number of files by outcome.
        defects: by kind of defect, the first number and how many there were.
        memory: bytes that reading took at most, beyond what the process had before.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: dict[str, tuple[int, int]] = field(default_factory=dict)
    memory: int = 0

    def add(self, outcome: str, number: int) -> None:
        if outcome in ("same", "different", "refused"):
            self.outcomes[outcome] += 1
        else:
            self.outcomes["defect"] += 1
            first, count = self.defects.get(outcome, (number, 0))
            self.defects[outcome] = first, count + 1


def examine(case: Case, name: str, number: int, expected: str) -> str:
    """Damages one file of a case, reads the case and mends the file.

    Returns:
        "same", "different", "refused", or the description of a defect.
    """
    dice = random.Random(f"{name} {number}")
    path = dice.choice(case.files)
    content = path.read_bytes()
    damaged = damage(content, dice, case.text or path.suffix in (".json", ".scp", ".crc32", ".txt"))
    if damaged == content:
        return "same"
    path.write_bytes(damaged)
    try:
        found = case.read()
    except InputError as error:
        return _judge(str(error), case)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "asr_am" in frame.filename] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        return f"{type(error).__name__} in {where} ({path.name})"
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    if found == expected:
        return "same"
    return f"read as something else in spite of checksums ({path.name})" if case.exact else "different"


def _judge(message: str, case: Case) -> str:
    if len(message) > MAX_MESSAGE or not message.isprintable():
        return "a message that is not one short line"
    names = {name for path in case.files for name in (path.name, path.parent.name)}
    return "refused" if any(name in message for name in names) else f"a message without a file: {message[:60]}"


def run_part(make: Callable[[], Case], name: str, numbers: range, pipe: Connection) -> None:
    """Examines a range of numbers in this process. Sends (number, outcome, bytes of memory) for each."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # OpenFst and kaldilm report on stderr
    os.dup2(null, 2)
    case = make()
    expected = case.read()
    assert case.read() == expected, f"{name}: reads the same files differently"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    virtual = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 4 * MEMORY, -1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number_ in numbers:
        pipe.send((number_, None, 0))
        outcome = examine(case, name, number_, expected)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        pipe.send((number_, outcome if grown < MEMORY else f"{grown >> 20} MiB of memory", grown))
        if grown >= MEMORY:
            break


def fuzz(name: str, root: Path, work: Path, numbers: range) -> Counts:
    """Examines a reader in processes of their own, so that a crash or an endless loop is counted and no more.

    `root` has the files of `write_all`. The folder `work` must not exist.
    """
    counts, context, todo = Counts(), multiprocessing.get_context("fork"), numbers
    while todo:
        shutil.rmtree(work, ignore_errors=True)
        receive, send = context.Pipe(duplex=False)
        make = lambda: CASES[name](root, work)  # noqa: E731
        process = context.Process(target=run_part, args=(make, name, todo, send))
        process.start()
        send.close()
        at, outcome, last = todo[0] - 1, "did not start", todo[0] - 1
        try:
            while receive.poll(TIMEOUT if at >= todo[0] else 60):
                at, outcome, memory = receive.recv()
                if outcome is not None:
                    counts.add(outcome, at)
                    counts.memory, last = max(counts.memory, memory), at
            outcome = f"no answer within {TIMEOUT:g} s"
        except EOFError:
            process.join()
            outcome = None if last == todo[-1] or outcome is not None else f"ended by signal {-(process.exitcode or 0)}"
        if at < todo[0]:
            raise SystemExit(f"{name}: cannot read its own files")
        process.kill()
        process.join()
        if outcome is not None:
            counts.add(outcome, at)
            last = at
        todo = range(last + 1, numbers.stop)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage files at random and read them.")
    parser.add_argument("--count", type=int, default=10_000, help="damaged files per reader")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--reader", action="append", choices=CASES, help="default: all")
    arguments = parser.parse_args()
    print("\n".join(HEAD), flush=True)
    about = f"{git_commit()} | {datetime.date.today()}"
    bad, totals = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "all"
        write_all(root)
        for name in arguments.reader or CASES:
            numbers = range(arguments.first, arguments.first + arguments.count)
            counts = fuzz(name, root, Path(folder) / "work", numbers)
            found = [str(counts.outcomes[outcome]) for outcome in OUTCOMES]
            cells = [name, str(arguments.count), *found, str(counts.memory >> 20), about]
            row = f"| {' | '.join(cells)} |"
            print(row, flush=True)
            for defect, (first, count) in counts.defects.items():
                bad.append(name)
                print(f"  {count} x {defect}\n    --reader {name!r} --first {first} --count 1", flush=True)
            totals.update(counts.outcomes)
    if arguments.reader is None:
        files = arguments.count * len(CASES)
        record(SECTION, f"{len(CASES)} readers", {"files": files, **{kind: totals[kind] for kind in OUTCOMES}})
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
