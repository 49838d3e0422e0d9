"""Stage data of `recipes/swbd`: Switchboard, Fisher and a test set as Kaldi data directories, prepared as those are.

As in Kaldi's egs/swbd/s5c, segments, words and lexicon are those of the Mississippi State release for Switchboard, and
of the LDC for Fisher. A speaker is a side of a call. lhotse's recipes read the same discs, but give both sides of a
Switchboard call one speaker, and Hub5'00 other segments than NIST's.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asr_am import disk
from asr_am.data.download import download, unpack
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from local.kaldi import prepare as kaldi
from local.swbd.discs import DICTIONARY, DISCS, MS98, SWBD, Calls, Found, check_calls, find_discs, transcript_files
from local.swbd.hub5 import OFFICIAL, clean_stm, count_references, report_counts, write_test
from local.swbd.text import Dictionary, fisher_segments, fisher_words, ms98_segments, ms98_words

logger = logging.getLogger(__name__)

URL = "https://www.openslr.org/resources/5/switchboard_word_alignments.tar.gz"
REMEDY = f"get {URL} or isip.piconepress.com's copy, unpack it, and pass its folder with --transcripts"
MAX_BYTES = 500_000_000
MIN_DEV_CALLS, MAX_DEV_SHARE = 2, 0.25

Words = Callable[[str], list[str]]
Segments = Iterable[tuple[str, int, float, float, str]]  # file and line, channel, begin, end, text


@dataclass
class Utterances:
    """Lines of the files of a Kaldi data directory, and the words of each utterance."""

    lines: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in ("segments", "text", "utt2spk")})
    audio: dict[str, Path] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of speech, by call

    def add(self, call: str, channel: int, begin: float, end: float, words: list[str]) -> None:
        speaker = f"{call}-{'AB'[channel]}"
        name = f"{speaker}_{round(100 * begin):06d}-{round(100 * end):06d}"
        self.lines["segments"].append(f"{name} {call} {begin:.2f} {end:.2f} {channel}")
        self.lines["text"].append(f"{name} {' '.join(words)}")
        self.lines["utt2spk"].append(f"{name} {speaker}")

    def write(self, folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in self.lines.items():
            write_lines(folder / name, sorted(lines))
        used = {line.split()[1] for line in self.lines["segments"]}
        write_lines(folder / "wav.scp", [f"{call} {self.audio[call].resolve()}" for call in sorted(used)])
        return str(folder)


def prepare(
    out: Path, *, transcripts: str | None, lexicon: str | None, test: str, dev_hours: float, max_repeats: int,
    check_counts: bool, url: str = URL, jobs: int = 1, **options: object,
) -> None:  # fmt: skip
    """Writes the data directory `out`.

    Args:
        out: output directory. Downloads go to `download` beside it.
        transcripts: folder of the Mississippi State release. None: look on the disc, else download it.
        lexicon: pronunciations instead of the release's, with words as `local/swbd/text.py` writes them.
        test: hub5 or rt03.
        dev_hours: speech of the Switchboard calls that are held out.
        max_repeats: most training utterances with the same words.
        check_counts: refuse a test set that has not the official number of segments.
        url: where the Mississippi State release is downloaded from.
        jobs: worker processes.
        options: folders of the discs, see `local.swbd.discs.DISCS`, and those of `local.kaldi.prepare.Options`.

    Raises:
        InputError: discs or files are missing or damaged. All that are missing are named.
    """
    if test not in OFFICIAL:
        raise InputError(f"corpus.prepare.test={test}: must be {' or '.join(OFFICIAL)}")
    folders = {disc.option: options.pop(disc.option, None) for disc in DISCS}
    found = find_discs(folders, transcripts, test)  # type: ignore[arg-type]
    stm = clean_stm(found.test.stm)
    counts = count_references(stm, found.test.glm, test)
    report_counts(counts, test, check=check_counts)
    ms98 = found.transcripts or _download(out.parent / "download", url)
    calls = check_calls(Calls(found.swbd_audio, transcript_files(ms98)), str(SWBD))
    dictionary = Dictionary(ms98 / DICTIONARY)
    train, dev, sentences = _training(found, calls, dictionary, dev_hours, max_repeats)
    made = out / "kaldi"
    made.mkdir(parents=True, exist_ok=True)
    write_lines(made / "sentences.txt", sentences)
    directories = {
        "train": train.write(made / "train"),
        "dev": dev.write(made / "dev"),
        "test": str(write_test(made / "test", found.test, stm)),
    }
    lexicon = lexicon or str(dictionary.write(made))
    text = str(made / "sentences.txt")
    kaldi.prepare(out, jobs=jobs, **directories, lexicon=lexicon, text=text, **options)
    kept = count_references(_lines(out / "test/ref.stm"), out / "en.glm", test)
    if kept != counts:
        raise InputError(
            f"{out / 'test'}: {kept} segments and words, not {counts}: utterances were left out, see above"
        )


def stamp(transcripts: str | None, **options: object) -> str:
    """Returns a digest of name, size and time of all files on the discs, "" if a folder is missing."""
    digest = hashlib.sha256()
    for folder in [options.get(disc.option) for disc in DISCS] + [transcripts]:
        for path in sorted(Path(str(folder)).rglob("*")) if folder else []:
            found = path.stat()
            digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _download(folder: Path, url: str) -> Path:
    """Returns the folder of the Mississippi State release."""
    target = folder / MS98
    if not (target / DICTIONARY).is_file():
        archive = folder / url.rsplit("/", 1)[-1]
        download(url, archive, REMEDY, max_bytes=MAX_BYTES)
        try:
            unpack(archive, folder, REMEDY)
        finally:
            disk.remove(archive)
    return target


def _training(
    found: Found, switchboard: Calls, dictionary: Dictionary, dev_hours: float, max_repeats: int
) -> tuple[Utterances, Utterances, list[str]]:
    """Returns train, dev, and the sentences of the language model, which has none of dev."""

    def ms98(text: str) -> list[str]:
        return ms98_words(text.split(), dictionary.acronyms)

    switchboard_segments = list(_segments(switchboard, ms98_segments, ms98))
    held = hold_out_calls(_seconds_by_call(switchboard_segments), dev_hours * 3600)
    train, dev = Utterances(audio=dict(switchboard.audio)), Utterances(audio=switchboard.audio)
    repeats: Counter[str] = Counter()
    sentences: list[str] = []
    for call, channel, begin, end, words, _ in switchboard_segments:
        if call in held:
            dev.add(call, channel, begin, end, words)
        else:
            _add_once_more(train, repeats, max_repeats, call, channel, begin, end, words)
            sentences.append(" ".join(words))
    for calls in found.fisher:
        train.audio.update(calls.audio)
        for call, channel, begin, end, words, certain in _segments(calls, fisher_segments, fisher_words):
            sentences.append(" ".join(words))
            if certain and call in calls.audio:
                _add_once_more(train, repeats, max_repeats, call, channel, begin, end, words)
    dropped = sum(count - max_repeats for count in repeats.values() if count > max_repeats)
    logger.info("%d training utterances have words that %d others have too: left out", dropped, max_repeats)
    logger.info("dev is %d calls held out of Switchboard: %s", len(held), " ".join(sorted(held)))
    return train, dev, sentences


def _segments(
    calls: Calls, read: Callable[[list[Path]], Segments], words_of: Words
) -> Iterator[tuple[str, int, float, float, list[str], bool]]:
    """Yields call, channel, begin, end, words of each segment, and whether the transcriber was certain of them."""
    for call, paths in calls.texts.items():
        for where, channel, begin, end, text in read(paths):
            words = words_of(text)
            if words and begin >= end:
                raise InputError(f"{where}: the segment ends at {end}, before it begins; get a complete copy")
            if words:
                yield call, channel, begin, end, words, "((" not in text


def _seconds_by_call(segments: Iterable[tuple[str, int, float, float, list[str], bool]]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for call, _, begin, end, _, _ in segments:
        seconds[call] += end - begin  # type: ignore[assignment]
    return dict(seconds)


def hold_out_calls(seconds: Mapping[str, float], wanted: float) -> set[str]:
    """Returns calls with about `wanted` seconds of speech, in the order of the hashes of their names.

    At least two, at most a quarter of the speech. Speakers of Switchboard took part in several calls, so dev has some
    speakers of train, as in Kaldi's recipe.
    """
    total = sum(seconds.values())
    wanted = min(wanted, MAX_DEV_SHARE * total)
    held: set[str] = set()
    for call in sorted(seconds, key=lambda call: hashlib.sha256(call.encode()).digest()):
        if len(held) >= MIN_DEV_CALLS and sum(seconds[name] for name in held) >= wanted:
            break
        held.add(call)
    if len(held) == len(seconds):
        raise InputError(f"{SWBD}: {len(seconds)} calls are too few to hold out {MIN_DEV_CALLS} as dev")
    return held


def _add_once_more(
    train: Utterances, repeats: Counter[str], limit: int, call: str, channel: int, begin: float, end: float,
    words: list[str],
) -> None:  # fmt: skip
    """Adds an utterance to `train` unless `limit` others have the same words, as `uh-huh` would have by thousands."""
    text = " ".join(words)
    repeats[text] += 1
    if repeats[text] <= limit:
        train.add(call, channel, begin, end, words)
