"""Shows what was recognised in an utterance and why: `python -m asr_am.show UTTERANCE ...`

Prints speaker, times, reference and hypothesis with their errors, the best paths of the lattice with their costs, and
the forced alignment. Writes a picture of the features, the aligned phones and the hypothesised words with their
posteriors to exp/<corpus>/show/<utterance>.png.

`python -m asr_am.show --alignments` writes the alignments of every GMM system as CTM files, per word and per phone, to
exp/<corpus>/show/alignments/<system>/<set>.{words,phones}.ctm, and as Praat's TextGrid files to <set>/ beside them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.options import RESERVED
from asr_am.score.cli import exit_code

if TYPE_CHECKING:
    import numpy as np

    from asr_am.decode.ctm import CtmWord
    from asr_am.decode.inspection import Inspection

WIDTH = 110  # characters of a line
GAP = "***"  # as in sclite's alignments


def find_corpus(given: Path | None) -> Path:
    """Returns exp/<corpus>: the given folder, or the only corpus in it (without one, in exp/).

    Raises:
        InputError: there is none, or several to choose from.
    """
    folder = given or Path("exp")
    if (folder / "data").is_dir():
        return folder
    found = sorted(path.parent for path in folder.glob("*/data") if path.is_dir())
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none; run a recipe first"
        raise InputError(f"{folder}: choose one corpus with --exp exp/<corpus>; there are {names}")
    return found[0]


def find_run(root: Path, name: str | None) -> Path:
    """Returns the decoding run `name`, by default the one with the lowest WER on dev. Raises InputError without one."""
    found = (path.parent for path in (root / "decode").glob("*/system.json"))
    runs = sorted(run for run in found if not RESERVED.search(run.name))
    names = [run.name for run in runs]
    if name is not None:
        if name not in names:
            raise InputError(f"--system {name}: not a decoding run of {root}; there are {', '.join(names) or 'none'}")
        return root / "decode" / name
    if not runs:
        raise InputError(f"{root / 'decode'}: holds no finished decoding run; run stage 7 (decode)")

    def dev_wer(run: Path) -> float:
        score = root / "score" / run.name / "wer.json"
        if not score.is_file():
            return float("inf")
        return float(read_record(score, remedy="run stage 9 (score) again")["dev_wer"])

    return min(runs, key=dev_wer)


def compare(reference: Sequence[str], hypothesis: Sequence[str]) -> list[tuple[str, str]]:
    """Aligns words with the fewest errors. Returns pairs (reference, hypothesis) with GAP where one has no word."""
    import kaldialign

    return [(str(a), str(b)) for a, b in kaldialign.align(list(reference), list(hypothesis), GAP)]


def error_of(pair: tuple[str, str]) -> str:
    """Returns S, D or I for an error, "" for a correct word."""
    if pair[0] == pair[1]:
        return ""
    return "I" if pair[0] == GAP else "D" if pair[1] == GAP else "S"


def comparison_lines(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yields reference, hypothesis and errors below each other, in lines of about WIDTH characters, and the counts."""
    rows: list[list[str]] = [[], [], []]
    length = 0
    for pair in pairs:
        cells = [*pair, error_of(pair)]
        width = max(map(len, cells))
        if length and length + width + 1 > WIDTH - 12:
            yield from _joined(rows)
            rows, length = [[], [], []], 0
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell.ljust(width))
        length += width + 1
    yield from _joined(rows)
    kinds = [error_of(pair) for pair in pairs]
    wrong, words = sum(map(bool, kinds)), sum(pair[0] != GAP for pair in pairs)
    names = (("S", "substituted"), ("D", "deleted"), ("I", "inserted"))
    counts = ", ".join(f"{kinds.count(kind)} {name}" for kind, name in names)
    yield f"            {wrong} errors in {words} words ({counts}), without the rules of a GLM"


def _joined(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for name, row in zip(("reference", "hypothesis", "errors"), rows, strict=True):
        yield f"{name:12}{' '.join(row)}".rstrip()


def report(found: Inspection, paths: int) -> Iterator[str]:
    """Yields the lines about an utterance."""
    from asr_am.data.stm import channel_letter

    segment, scale = found.segment, found.system.lm_scale
    yield f"{'utterance':12}{segment.id} (set {found.subset})"
    yield f"{'speaker':12}{segment.speaker}"
    yield (
        f"{'recording':12}{segment.recording_id}, channel {channel_letter(segment)}, {segment.start:.2f} to "
        f"{segment.end:.2f} s ({segment.duration:.2f} s)"
    )
    window = f", window {found.system.window}" if found.system.model is not None else ""
    yield f"{'system':12}{found.run.name}: LM weight {scale.lm:g}, insertion penalty {scale.insertion:g}{window}"
    yield ""
    yield from comparison_lines(compare(found.reference, [word.word for word in found.words]))
    yield ""
    yield from _path_lines(found, paths)
    yield ""
    yield "hypothesis: begin and end in seconds from the start of the utterance, posterior"
    yield from (f"  {_times(word)}  {word.confidence:.2f}  {word.word}" for word in found.words)
    yield ""
    by = "by stage align" if found.is_aligned else f"now, with the scores of {found.run.name}"
    if found.labels_T is None:
        yield f"forced alignment ({by}): no path for the reference"
        return
    yield f"forced alignment ({by}): each word with its phones and their beginnings"
    yield from _alignment_lines(found.aligned_words, found.aligned_phones)


def _times(word: CtmWord) -> str:
    from asr_am.decode.ctm import FRAME_SHIFT

    return f"{word.start * FRAME_SHIFT:6.2f} {(word.start + word.frames) * FRAME_SHIFT:6.2f}"


def _path_lines(found: Inspection, paths: int) -> Iterator[str]:
    sentences = found.best_paths(paths)
    if not sentences:
        yield "lattice: empty, no path survived the search"
        return
    yield "best paths of the lattice: cost = graph + acoustic / LM weight + insertion penalties"
    yield f"{'':>4} {'cost':>10} {'graph':>9} {'acoustic':>11}  words"
    best = found.cost(sentences[0])
    for number, sentence in enumerate(sentences, start=1):
        cost = found.cost(sentence)
        shown = f"{cost:.2f}" if number == 1 else f"+{cost - best:.2f}"
        words = " ".join(found.lang.word_names[word] for word in sentence.words)
        yield f"{number:4} {shown:>10} {sentence.graph:9.2f} {sentence.acoustic:11.2f}  {words}"


def _alignment_lines(words: Sequence[CtmWord], phones: Sequence[CtmWord]) -> Iterator[str]:
    """Yields a line per word with its phones, and a line for each phone between words."""
    from asr_am.decode.ctm import FRAME_SHIFT, CtmWord

    begins = {word.start: word for word in words if word.frames}
    position = 0
    while position < len(phones):
        word = begins.get(phones[position].start, CtmWord(*phones[position][:2], "", 1.0))
        inside = [phone for phone in phones[position:] if phone.start < word.start + word.frames]
        names = " ".join(f"{phone.word} {phone.start * FRAME_SHIFT:.2f}" for phone in inside)
        yield f"  {_times(word)}  {word.word:16}  {names}"
        position += max(1, len(inside))


def features_of(found: Inspection) -> dict[str, np.ndarray]:
    """Returns the features to draw, [T, D] by name: log-mel energies (else what there is) and fMLLR."""
    from asr_am.features.adapted import open_features
    from asr_am.features.reader import FeatureReader

    folder, subset, utterance = found.system.features_dir, found.subset, found.segment.id
    names = {"logmel": "log-mel band", "lfbe64": "log-mel band", "mfcc": "MFCC"}
    shown = {}
    kind = next((kind for kind in names if (folder / kind).is_dir()), None)
    if kind is not None:
        shown[names[kind]] = FeatureReader(folder, kind, subset).raw(utterance)
    if (folder / "fmllr" / f"{subset}_trans.scp").is_file():
        shown["fMLLR dimension"] = open_features(folder, "fmllr", subset)[utterance]
    return shown


def draw(found: Inspection, path: Path) -> None:
    """Writes the picture of an utterance."""
    from asr_am.report.utterance_plot import plot_utterance

    hypothesis = [word.word for word in found.words]
    correct = [pair[0] == pair[1] for pair in compare(found.reference, hypothesis) if pair[1] != GAP]
    path.parent.mkdir(parents=True, exist_ok=True)
    plot_utterance(
        path, f"{found.segment.id} ({found.segment.speaker}), {found.run.name}", features_of(found),
        found.aligned_phones, found.aligned_words, list(zip(found.words, correct, strict=True)),
    )  # fmt: skip


def show(root: Path, run: Path, utterances: Sequence[str], paths: int) -> None:
    """Prints and draws utterances. Raises InputError if one is unknown or a file is missing."""
    from asr_am.data.textfile import file_name
    from asr_am.decode.inspection import inspect

    for number, utterance in enumerate(utterances):
        found = inspect(run, root / "data", utterance)
        if number:
            print("\n" + "-" * WIDTH)
        picture = root / "show" / f"{file_name(utterance)}.png"
        draw(found, picture)  # first: the reader may close the pipe after some lines
        for line in report(found, paths):
            print(line)
        print(f"\npicture: {picture}", flush=True)


def write_alignments(root: Path, system: str | None) -> None:
    """Writes the alignments of one or all GMM systems as CTM and TextGrid files. Prints their names."""
    from asr_am.decode.aligned import write_alignment_ctms
    from asr_am.lang.lang_dir import Lang

    names = sorted(path.parent.name for path in (root / "align").glob("*/ali") if path.is_dir())
    if not names:
        raise InputError(f"{root / 'align'}: holds no alignments; run stage 3 (align)")
    if system is not None and system not in names:
        raise InputError(f"--system {system}: no such system in {root / 'align'}; there are {', '.join(names)}")
    lang = Lang.load(root / "lang")
    for name in names if system is None else [system]:
        out = root / "show" / "alignments" / name
        for path in write_alignment_ctms(root / "data", root / "align" / name, lang, out):
            print(path, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status, 1 after a mistake."""
    parser = argparse.ArgumentParser(prog="python -m asr_am.show", description="Show what was recognised, and why.")
    parser.add_argument("utterances", nargs="*", metavar="UTTERANCE", help="utterance ids, of any set")
    parser.add_argument("--exp", type=Path, metavar="DIR", help="exp/<corpus> (default: the only corpus in exp)")
    parser.add_argument("--system", help="decoding run in exp/<corpus>/decode (default: the best on dev)")
    parser.add_argument("--paths", type=int, default=5, help="number of paths of the lattice (default: 5)")
    parser.add_argument(
        "--alignments", action="store_true",
        help="write the alignments of the GMM systems, or of --system, as CTM and TextGrid files",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.alignments == bool(options.utterances):
        parser.error("give utterance ids, or --alignments")
    if options.paths < 1:
        parser.error("--paths must be at least 1")

    def work() -> None:
        root = find_corpus(options.exp)
        if options.alignments:
            write_alignments(root, options.system)
        else:
            show(root, find_run(root, options.system), options.utterances, options.paths)

    return exit_code("error", work)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    sys.exit(main())
