"""A NIST test set (Hub5'00 or RT-03) as a Kaldi data directory: PEM or STM segments, cleaned STM, GLM, official counts.

The steps are those of Kaldi's egs/swbd/s5c: segments get 0.1 s of context where there is room, segments that scoring
ignores are not recognised, and errors of the STM that upset NIST's programs are corrected.
"""

from __future__ import annotations

import logging
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.errors import InputError
from asr_am.score.scoring import Reference
from local.swbd.discs import TestSet

logger = logging.getLogger(__name__)

REMEDY = "get a complete copy of the release"
CONTEXT = 0.1  # seconds on either side of a segment
IGNORED = "ignore_time_segment_in_scoring"
CHANNELS = {"1": "A", "2": "B"}  # of RT-03
SUBSETS = {"hub5": {"swb": "sw_", "ch": "en_"}, "rt03": {"swb": "sw_", "fsh": "fsh_"}}
# Segments and words that sclite counts, from RESULTS of Kaldi's egs/swbd/s5c and egs/fisher_swbd/s5.
OFFICIAL = {
    "hub5": {"all": (4459, 42989), "swb": (1831, 21395), "ch": (2628, 21594)},
    "rt03": {"all": (8420, 76157)},
}

Side = tuple[str, str]  # file and channel
Span = tuple[float, float]  # seconds


def clean_stm(paths: Iterable[Path]) -> list[str]:
    """Returns the lines of the references, with channels A and B, as NIST's programs can read them."""
    lines = []
    for path in paths:
        for number, line in numbered_lines(path):
            if "inter_segment_gap" in line:
                continue
            line = re.sub(r"<[BE]_ASIDE>", "", line.replace("((", "("), flags=re.IGNORECASE)
            if line.startswith(";;") or not line.strip():
                lines.append(line.rstrip())
                continue
            fields = line.split()
            if len(fields) < 5:
                raise InputError(f"{path}:{number}: not `file channel speaker begin end <labels> words`; {REMEDY}")
            try:
                begin, end = float(fields[3]), float(fields[4])
            except ValueError as error:
                raise InputError(f"{path}:{number}: {error}, as a time in seconds; {REMEDY}") from error
            if not 0 <= begin <= end < math.inf:
                raise InputError(f"{path}:{number}: from {begin:g} to {end:g} s is no segment; {REMEDY}")
            lines.append(" ".join([fields[0], CHANNELS.get(fields[1], fields[1]), *fields[2:]]))
    return lines


def count_references(lines: Iterable[str], glm: Path, test: str) -> dict[str, tuple[int, int]]:
    """Returns segments and words of the whole set and its subsets, as sclite counts them for an empty hypothesis."""
    with tempfile.TemporaryDirectory() as folder:
        stm, ctm = Path(folder) / "ref.stm", Path(folder) / "empty.ctm"
        write_lines(stm, lines)
        ctm.touch()
        score = Reference(stm, glm, SUBSETS[test]).score(ctm)
    counts = {name: score.subset(name) for name in ("all", *SUBSETS[test])}
    return {name: (count.sentences, count.words) for name, count in counts.items()}


def report_counts(found: Mapping[str, tuple[int, int]], test: str, *, check: bool) -> None:
    """Logs the counts beside the official ones.

    Args:
        found: segments and words by subset.
        test: name of the test set.
        check: refuse another number of segments.

    Raises:
        InputError: the number of segments is not the official one.
    """
    for name, (segments, words) in found.items():
        official = OFFICIAL[test].get(name)
        beside = f"official {official[0]} and {official[1]}" if official else "no official count"
        logger.info("%s %s: %d segments, %d words (%s)", test, name, segments, words, beside)
    for name, (segments, words) in OFFICIAL[test].items():
        if check and found[name][0] != segments:
            raise InputError(
                f"{test}: {found[name][0]} segments instead of {segments} in {name!r}, so error rates would not be "
                "those of the field; get the official STM, or add corpus.prepare.check_counts=false"
            )
        if check and found[name][1] != words:
            logger.warning("%s: %d words instead of %d in %r: look at STM and GLM", test, found[name][1], words, name)


def write_test(folder: Path, test_set: TestSet, lines: list[str]) -> Path:
    """Writes the Kaldi data directory `folder`.

    Args:
        folder: the directory.
        test_set: files of the set.
        lines: its cleaned STM.

    Raises:
        InputError: audio or a segment is missing.
    """
    references = _references(lines)
    spans = _pem(test_set.pem) if test_set.pem else {side: list(texts) for side, texts in references.items()}
    tables: dict[str, list[str]] = {name: [] for name in ("wav.scp", "segments", "text", "utt2spk")}
    used = set()
    for (file, channel), texts in sorted(references.items()):
        for begin, end, first, last in _with_context(sorted(spans.get((file, channel), []))):
            inside = {span: text for span, text in texts.items() if span[0] < last and span[1] > first}
            if inside and all(IGNORED in text for text in inside.values()):
                continue
            speaker = f"{file}-{channel}"
            name = f"{speaker}_{round(100 * first):06d}-{round(100 * last):06d}"
            words = " ".join(word for text in inside.values() for word in _plain_words(text))
            tables["segments"].append(f"{name} {file} {begin:.3f} {end:.3f} {'AB'.index(channel)}")
            tables["text"].append(f"{name} {words or '<unk>'}")
            tables["utt2spk"].append(f"{name} {speaker}")
            used |= {(file, channel, span) for span in inside}
        lacking = [span for span, text in texts.items() if IGNORED not in text and (file, channel, span) not in used]
        if lacking:
            raise InputError(f"{test_set.pem}: no segment for {file} {channel} {lacking[0]} of the STM; {REMEDY}")
        if file.lower() not in test_set.audio:
            raise InputError(f"{file}.sph: missing beside {next(iter(test_set.audio.values()))}; {REMEDY}")
        tables["wav.scp"].append(f"{file} {test_set.audio[file.lower()].resolve()}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tables.items():
        write_lines(folder / name, sorted(set(content)))
    write_lines(folder / "stm", lines)
    write_lines(folder / "glm", [line for _, line in numbered_lines(test_set.glm)])
    return folder


def _references(lines: Iterable[str]) -> dict[Side, dict[Span, str]]:
    """Returns the text of each segment of the STM in lower case."""
    found: dict[Side, dict[Span, str]] = defaultdict(dict)
    for line in lines:
        if line and not line.startswith(";;"):
            file, channel, _, begin, end, *rest = line.split(maxsplit=5)
            text = re.sub(r"^<[^>]*>", "", "".join(rest).lower())
            found[file, channel.upper()][float(begin), float(end)] = text.strip()
    return dict(found)


def _pem(path: Path) -> dict[Side, list[Span]]:
    found: dict[Side, set[Span]] = defaultdict(set)
    for number, line in numbered_lines(path):
        if line.strip() and not line.startswith(";;"):
            try:
                file, channel, _, begin, end = line.split()[:5]
                found[file, channel.upper()].add((float(begin), float(end)))
            except ValueError as error:
                raise InputError(f"{path}:{number}: not `file channel speaker begin end`; {REMEDY}") from error
    return {side: list(spans) for side, spans in found.items()}


def _with_context(spans: list[Span]) -> list[tuple[float, float, float, float]]:
    """Returns (begin with context, end with context, begin, end): half of the gap to a neighbour at most."""
    found = []
    for number, (begin, end) in enumerate(spans):
        before = begin - spans[number - 1][1] if number else 2 * begin
        after = spans[number + 1][0] - end if number + 1 < len(spans) else 2 * CONTEXT
        pads = [min(CONTEXT, max(0.0, gap / 2)) for gap in (before, after)]
        found.append((begin - pads[0], end + pads[1], begin, end))
    return found


def _plain_words(text: str) -> list[str]:
    """Returns the words of a reference: of alternatives { a / b } the first, nothing of what need not be said."""
    text = re.sub(r"\{([^/}]*)[^}]*\}", r"\1", text)
    return [word for word in re.sub(r"\([^)]*\)", " ", text).split() if word != "@"]
