"""Scores a CTM against an STM as NIST's sclite does: `python -m asr_am.score --stm REF.stm --ctm HYP.ctm`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asr_am.errors import InputError
from asr_am.score.cli import CommandLineParser, check_out, exit_code
from asr_am.score.files import STM_FIELDS, read_stm, show
from asr_am.score.output import write_alignments, write_json, write_table
from asr_am.score.scoring import ALL, Reference
from asr_am.score.sctk import score_files_sctk


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 1 after one line on stderr about bad input."""
    return exit_code("asr_am.score", lambda: _run(_parse(arguments)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = CommandLineParser(prog="python -m asr_am.score", description=__doc__)
    parser.add_argument(
        "--stm", type=Path, required=True, help="reference: file channel speaker begin end <labels> words"
    )
    parser.add_argument(
        "--ctm", type=Path, required=True, help="hypothesis: file channel begin duration word [confidence]"
    )
    parser.add_argument("--glm", type=Path, help="NIST global mapping rules, applied to both sides as csrfilt does")
    parser.add_argument("--json", type=Path, help="write the counts of the whole set and of each subset here")
    parser.add_argument(
        "--subset", action="append", metavar="NAME=PREFIX",
        help="files whose names begin with PREFIX (repeatable, default: swb=sw_ and ch=en_ if there are such files)",
    )  # fmt: skip
    parser.add_argument(
        "--case-sensitive", action="store_true", help="words that differ only in case are different, as with sclite -s"
    )
    parser.add_argument("--errors", type=Path, help="write the alignments and the most frequent errors here")
    parser.add_argument("--validate", action="store_true", help="fail on words that hubscr's validators reject")
    parser.add_argument(
        "--sctk", action=argparse.BooleanOptionalAction, default=False,
        help="count with NIST's installed programs (the numbers are the same)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> None:
    subsets = _subsets(options.subset) if options.subset else None
    for out in (options.json, options.errors):
        check_out(out, (options.stm, options.ctm, options.glm))
    if options.json and options.errors and options.json.resolve() == options.errors.resolve():
        raise InputError(f"--json and --errors are both {options.json}; give two files")
    reference = Reference(options.stm, options.glm, subsets, case_sensitive=options.case_sensitive)
    if options.validate and (words := reference.unexpected_words(options.ctm)):
        raise InputError(
            f"{words[0]}: NIST's validators reject this word ({len(words)} such); correct it or add a rule"
        )
    score = reference.score(options.ctm)
    if options.errors:
        write_alignments(score, options.errors)
    if options.sctk:
        score = score_files_sctk(options.stm, options.ctm, options.glm, subsets, case_sensitive=options.case_sensitive)
    if options.json:
        write_json(score, options.json)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    write_table(score, sys.stdout)
    if not options.case_sensitive and (pair := _differ_in_case(options.stm)):
        what = f"words that differ only in case, such as {' and '.join(pair)}, were taken for one, as sclite does"
        remedy = "" if options.glm else "; --case-sensitive keeps them apart"  # rules need words without case
        print(f"asr_am.score: {options.stm}: {what}{remedy}", file=sys.stderr)
    for second, first in _of_one_time(reference):
        print(f"asr_am.score: {second}: has the time of {first}; both count, as in sclite", file=sys.stderr)


def _of_one_time(reference: Reference) -> list[tuple[str, str]]:
    """Returns the places of each segment that has the times of an earlier one of its channel, and of that one."""
    first: dict[tuple[bytes, bytes, float, float], str] = {}
    found = []
    for segment in reference.segments:
        time = segment.file, segment.channel, segment.begin, segment.end
        if time in first:
            found.append((segment.where, first[time]))
        first.setdefault(time, segment.where)
    return found


def _differ_in_case(stm: Path) -> tuple[str, str] | None:
    """Returns two words of a reference that differ only in case, None if there are none."""
    folded: dict[bytes, bytes] = {}
    for line in read_stm(stm)[1]:
        for word in b"".join(line.text.split(None, len(STM_FIELDS))[len(STM_FIELDS) :]).split():
            other = folded.setdefault(word.lower(), word)
            if other != word and not word.startswith(b"<"):
                return show(other), show(word)
    return None


def _subsets(options: list[str]) -> dict[str, str]:
    subsets = {}
    for option in options:
        name, equals, prefix = option.partition("=")
        if not (name and equals and prefix) or name == ALL or name in subsets:
            raise InputError(f"--subset {option}: expected NAME=PREFIX, each NAME once and not '{ALL}'")
        subsets[name] = prefix
    return subsets


if __name__ == "__main__":
    sys.exit(main())
