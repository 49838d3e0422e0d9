"""Scores computed by NIST's own programs (SCTK), from Debian's package `sctk` or found on PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path

from asr_am.errors import InputError
from asr_am.score.files import lower, parse_stm, read_lines, read_stm
from asr_am.score.scoring import Counts, Score, SegmentScore, SubsetRules

PROGRAMS = ("sclite", "csrfilt.sh", "hubscr.pl", "rfilter1")
DEBIAN = Path("/usr/lib/sctk/bin")
TIMEOUT_S = 3600

_FIELDS = re.compile(
    r"id: \((?P<speaker>.*)-\d+\)\n(?:Labels: (?P<label>.*)\n)?File: (?P<file>.*)\nChannel: (?P<channel>.*)\n"
    r"Scores: \(#C #S #D #I\) (?P<counts>[\d ]+)\n"
)


def find_sctk() -> Path | None:
    """Returns the directory of the NIST programs, or None if they are not installed."""
    found = shutil.which("sclite")
    candidates = [Path(found).resolve().parent] if found else []
    if wrapper := shutil.which("sctk"):
        answer = subprocess.run([wrapper, "path"], capture_output=True, text=True, timeout=60, check=False)
        candidates += [Path(entry) for entry in answer.stdout.strip().split(":") if entry]
    for directory in [*candidates, DEBIAN]:
        if all((directory / program).is_file() for program in PROGRAMS):
            return directory
    return None


def score_files_sctk(
    stm: Path, ctm: Path, glm: Path | None = None, subsets: Mapping[str, str] | None = None, *,
    case_sensitive: bool = False,
) -> Score:  # fmt: skip
    """Scores like `asr_am.score.score_files` with hubscr's sort, csrfilt and sclite.

    Segments are ordered by speaker and have no alignments.

    Raises:
        InputError: the programs are missing or reject the files.
    """
    directory = find_sctk()
    if directory is None:
        raise InputError("NIST's sclite is not installed; install Debian's package sctk, or score without --sctk")
    comments, lines = read_stm(stm)
    read_lines(ctm)
    with tempfile.TemporaryDirectory(prefix="sctk-") as name:
        work = Path(name)
        reference = _prepare(directory, stm, "stm", "ref", glm, work)
        hypothesis = _prepare(directory, ctm, "ctm", "hyp", glm, work)
        options = ["-F", "-D", "-f", "0", "-o", "pra", "-O", str(work), "-n", "out"]
        options += ["-s"] if case_sensitive else []
        _run(directory, ["sclite", "-r", str(reference), "stm", "-h", str(hypothesis), "ctm", *options], work)
        report = (work / "out.pra").read_text(encoding="utf-8", errors="backslashreplace")
    segments = [_segment(match) for match in _FIELDS.finditer(report)]
    rules = SubsetRules.of([parse_stm(line) for line in lines], comments, subsets)
    return Score(segments, rules.split(segments), case_sensitive=case_sensitive)


def _prepare(directory: Path, source: Path, kind: str, purpose: str, glm: Path | None, work: Path) -> Path:
    """Sorts and filters one file as hubscr.pl does, and returns the result."""
    complete, result = work / f"{purpose}.complete.{kind}", work / f"{purpose}.{kind}"
    text = _plain_lines(source)
    complete.write_bytes(text.removesuffix(b"\n") + b"\n")  # sorting would join an unterminated last line to another
    _run(directory, ["perl", str(directory / "hubscr.pl"), f"sort{kind.upper()}"], work, complete, result)
    if glm:
        result, unfiltered = work / f"{purpose}.filtered.{kind}", result
        rules = work / "rules.glm"  # csrfilt.sh fails on a path with a blank
        rules.write_bytes(_plain_lines(glm))
        command = ["csrfilt.sh", "-i", kind, "-t", purpose, "-dh", str(rules)]
        if _run(directory, command, work, unfiltered, result):
            raise InputError(f"{glm}: csrfilt reports an error in the rules; score without --sctk to see which")
    return result


def _plain_lines(path: Path) -> bytes:
    """Returns a file without what sclite would keep: a byte order mark in the first name, \\r in the last words."""
    return path.read_bytes().removeprefix(BOM_UTF8).replace(b"\r\n", b"\n")


def _run(directory: Path, command: list[str], work: Path, stdin: Path | None = None, stdout: Path | None = None) -> str:
    """Runs one program in `work` and returns its stderr without warnings of the shell."""
    environment = {**os.environ, "PATH": f"{directory}:{os.environ.get('PATH', '')}", "LC_ALL": "C"}
    with open(stdin or os.devnull, "rb") as source, open(stdout or work / "log", "wb") as sink:
        try:
            done = subprocess.run(
                command, stdin=source, stdout=sink, stderr=subprocess.PIPE, cwd=work, env=environment,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(f"{command[0]} did not finish within {TIMEOUT_S} s; score without --sctk") from None
    stderr = done.stderr.decode("utf-8", errors="backslashreplace")
    stderr = "\n".join(line for line in stderr.splitlines() if "egrep" not in line)
    if done.returncode:
        raise InputError(f"{' '.join(command[:2])} failed with exit code {done.returncode}: {stderr.strip()[-300:]}")
    return stderr


def _segment(match: re.Match[str]) -> SegmentScore:
    correct, substitutions, deletions, insertions = map(int, match["counts"].split())
    wrong = int(substitutions + deletions + insertions > 0)
    counts = Counts(1, correct, substitutions, deletions, insertions, wrong)
    file, channel, speaker = (lower(match[name]) for name in ("file", "channel", "speaker"))  # `sclite -s` keeps case
    return SegmentScore(file, channel, speaker, lower(match["label"] or ""), counts)
