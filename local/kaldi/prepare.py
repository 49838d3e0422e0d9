"""Stage data of `recipes/kaldi`: turns Kaldi data directories, a lexicon and a text or LM into the recipe's data
directory.

Audio stays in place and is resampled when read. Audio in Kaldi archives is copied. Everything that was corrected or
left out is counted and logged as one table. See recipes/README.md and recipes/kaldi/run.sh.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from asr_am.data.issue_counter import IssueCounter, summary_table
from asr_am.data.kaldi_audio import AudioOptions
from asr_am.data.kaldi_dir import KaldiDir, read_kaldi_dir
from asr_am.data.manifests import write_set
from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.errors import InputError
from asr_am.lang.arpa import write_arpa
from asr_am.lang.transcripts import TOO_MANY
from asr_am.options import build
from local.kaldi import g2p, trained_g2p
from local.kaldi.folder import spell, write_kaldi_dir
from local.kaldi.lexicon import APART, Lexicon, read_lexicon
from local.kaldi.lm import beyond, read_given_arpa, read_text, without_words
from local.kaldi.manifests import manifest_files, write_from_manifests
from local.kaldi.overlap import separate_overlaps
from local.kaldi.references import write_references
from local.kaldi.scorable import RULES, check_names, check_rules, check_scoring, count_markup
from local.kaldi.sets import CorpusSet, check_apart, count_shared_audio, drop_too_short, left_out, read_set
from local.kaldi.split import hold_out, separate_speakers
from local.kaldi.words import OUTSIDE, Normaliser, clean, is_mark, most_frequent

logger = logging.getLogger(__name__)

RATES = (8000, 16000)
GIVEN_ARPA = "given.arpa"
# Ways to pronounce words that the lexicon lacks. With `letters`, each letter of a word is a phone.
ESPEAK, TRAINED, LETTERS = "espeak", trained_g2p.PACKAGE, "letters"


@dataclass(frozen=True)
class Options:
    """Options of the preparation, described in conf/corpus/kaldi.yaml."""

    train: str | None
    test: str | None
    lexicon: str | None
    sampling_rate: int
    folder: str | None = None
    dev: str | None = None
    text: str | None = None
    arpa: str | None = None
    audio_root: str | None = None
    allow_pipes: bool = False
    g2p: str | None = None
    g2p_voice: str = "en-US"
    max_bad_audio: float = 0.05
    max_words: int = 200_000
    unify_words: bool = False

    def check(self) -> None:
        """Raises InputError for an option that is missing or out of range."""
        if self.folder and (self.train or self.test or self.dev):
            raise InputError("--folder: all sets are taken from it; leave out --train, --dev and --test")
        without = f", or without one --g2p {ESPEAK} (sounds of espeak-ng) or --g2p {LETTERS} (words by their letters)"
        for name in ("train", "test", "lexicon"):
            if not getattr(self, name) and not (self.folder or (name == "lexicon" and self.g2p in (ESPEAK, LETTERS))):
                remedy = f"give recipes/kaldi/run.sh --{name}{without if name == 'lexicon' else ''}"
                raise InputError(f"corpus.prepare.{name}: missing; {remedy}")
        if self.sampling_rate not in RATES:
            raise InputError(f"--sampling-rate: {self.sampling_rate} is not one of {RATES}; choose one")
        if self.text and self.arpa:
            raise InputError("--text and --arpa: give one of them, a text to estimate an LM on or an LM")
        if self.g2p not in (None, ESPEAK, TRAINED, LETTERS):
            raise InputError(f"--g2p: {self.g2p} is unknown; choose {ESPEAK}, {TRAINED} or {LETTERS}")
        if self.g2p == TRAINED and not self.lexicon:
            raise InputError(f"--g2p {TRAINED}: learns from a lexicon; give --lexicon{without}")


def prepare(out: Path, *, jobs: int = 1, **options: object) -> None:
    """Writes the data directory `out`.

    Args:
        out: output directory.
        jobs: worker processes.
        options: see `Options`.

    Raises:
        InputError: the data cannot be corrected automatically.
    """
    chosen = build(Options, options, "corpus.prepare")
    chosen.check()
    out.mkdir(parents=True, exist_ok=True)
    issues_by_set = {name: IssueCounter() for name in ("train", "dev", "test", "lm", "lexicon")}
    if chosen.folder:
        source = write_kaldi_dir(Path(chosen.folder), out / "source", issues_by_set["train"])
        chosen = replace(chosen, train=str(source), g2p=chosen.g2p or (None if chosen.lexicon else LETTERS))
    chosen = _from_manifests(chosen, out / "source", issues_by_set)
    lexicon = Lexicon()
    if chosen.lexicon:
        lexicon = read_lexicon(Path(chosen.lexicon), issues_by_set["lexicon"], unify=chosen.unify_words)
    sets, unknown = read_sets(chosen, lexicon, out, issues_by_set, jobs)
    lost = {subset: left_out(issues_by_set[subset]) for subset in sets}
    sentences = _sentences(chosen, lexicon, sets, unknown, issues_by_set)
    if chosen.g2p == LETTERS:
        _spell(chosen, lexicon, sets["train"], sentences, issues_by_set)
    elif chosen.g2p:
        _pronounce(chosen, lexicon, unknown, issues_by_set)
    if not chosen.lexicon:
        unknown = _lacking(lexicon, sets, issues_by_set)
        _count_cases(lexicon, issues_by_set["lexicon"])
    _check_unknown(lexicon, sets["train"])
    for subset, corpus in sets.items():
        write_set(out, subset, corpus.used_recordings, corpus.utterances)
        if subset != "train":
            write_references(out / subset, corpus, _own_stm(chosen, subset), lexicon, issues_by_set[subset])
    _write_language(out, chosen, lexicon, sets["train"], sentences, issues_by_set)  # shortens the lexicon
    if (rules := _rules(chosen)) is not None:
        write_lines(out / RULES, [clean(line) for _, line in numbered_lines(rules)])
        logger.info("scoring rules: %s", rules)
    for subset in ("dev", "test"):
        own = _own_stm(chosen, subset) or sets[subset].folder / "text"
        check_scoring(out, subset, own, lexicon.entries)
    count_markup(lexicon.entries, issues_by_set["lexicon"])
    description = {
        "hours": sets["train"].seconds / 3600,
        "sampling_rate": chosen.sampling_rate,
        "utterances": {subset: len(corpus.utterances) for subset, corpus in sets.items()},
        "left_out": {subset: counts for subset, counts in lost.items() if counts},
    }
    write_lines(out / "corpus.json", [json.dumps(description)])
    _report(lexicon, unknown, issues_by_set)


def _from_manifests(options: Options, out: Path, issues_by_set: dict[str, IssueCounter]) -> Options:
    """Returns the options with a Kaldi data directory in place of each set that is given as lhotse manifests."""
    root = _audio_root(options)
    for subset in ("train", "dev", "test"):
        given = getattr(options, subset)
        if given and (files := manifest_files(Path(given))):
            folder = write_from_manifests(files, out / subset, issues_by_set[subset], root)
            options = replace(options, **{subset: str(folder)})  # type: ignore[arg-type]
    return options


def _audio_root(options: Options) -> Path | None:
    return Path(options.audio_root).resolve() if options.audio_root else None


def read_sets(
    options: Options, lexicon: Lexicon, out: Path, issues_by_set: dict[str, IssueCounter], jobs: int
) -> tuple[dict[str, CorpusSet], dict[str, Counter[str]]]:
    """Returns the sets train, dev and test with disjoint speakers, and the words of each that the lexicon lacks."""
    sets: dict[str, CorpusSet] = {}
    unknown: dict[str, Counter[str]] = {}
    root = _audio_root(options)
    for subset, source in _sources(options, issues_by_set).items():
        normalise = _normaliser(options, lexicon)
        audio = AudioOptions(root, options.allow_pipes, out / "wav" / subset)
        sets[subset] = read_set(
            source, subset, normalise, audio, issues_by_set[subset], max_bad_audio=options.max_bad_audio, jobs=jobs
        )
        unknown[subset] = normalise.unknown
        _note_rates(sets[subset], options.sampling_rate, issues_by_set[subset])
    shortest = {word: min(map(len, variants)) for word, variants in lexicon.entries.items()}
    for subset in sets.keys() & {"train", "dev"}:
        drop_too_short(sets[subset], shortest, issues_by_set[subset])
    for subset in ("test", "dev"):
        if subset not in sets:
            sets["train"], sets[subset], how = hold_out(sets["train"])
            logger.info("%s is held out of train: %s", subset, how)
    sets = {subset: sets[subset] for subset in ("train", "dev", "test")}
    for subset, names in separate_speakers(sets).items():
        what = f"speakers of an earlier set too: called NAME-{subset} here"
        issues_by_set[subset].add(what, " ".join(names[:5]), len(names))
    count_shared_audio(sets, issues_by_set)
    for subset in ("dev", "test"):
        if _own_stm(options, subset) is None:
            sets[subset] = separate_overlaps(sets[subset], issues_by_set[subset])
    return sets, unknown


def _sources(options: Options, issues_by_set: dict[str, IssueCounter]) -> dict[str, KaldiDir]:
    """Opens the user's directories and runs all checks that need no audio."""
    folders = {subset: getattr(options, subset) for subset in ("train", "dev", "test")}
    sources = {
        subset: read_kaldi_dir(Path(folder), issues_by_set[subset]) for subset, folder in folders.items() if folder
    }
    check_apart(sources)
    for subset, source in sources.items():
        if subset != "train" or options.dev is None:  # part of train may become dev, which is scored
            check_names(source)
    if (rules := _rules(options)) is not None:
        check_rules(rules)
    return sources


def _own_stm(options: Options, subset: str) -> Path | None:
    """Returns the stm in the user's directory of a set. A held-out dev set has none."""
    folder = getattr(options, subset)
    path = Path(folder) / "stm" if folder else None
    return path if path and path.exists() else None


def _normaliser(options: Options, lexicon: Lexicon) -> Normaliser:
    return Normaliser(lexicon.vocabulary, lexicon.silence, lexicon.unknown, unify=options.unify_words)


def _note_rates(corpus: CorpusSet, rate: int, issues: IssueCounter) -> None:
    for recording in corpus.used_recordings:
        own = recording.sampling_rate
        if own < rate:
            what = f"recordings at {own} Hz: the band above {own // 2} Hz is empty at {rate} Hz"
            issues.add(what, recording.id)
        elif own > rate:
            issues.add(f"recordings at {own} Hz: resampled to {rate} Hz when read", recording.id)


def _sentences(
    options: Options,
    lexicon: Lexicon,
    sets: dict[str, CorpusSet],
    unknown: dict[str, Counter[str]],
    issues_by_set: dict[str, IssueCounter],
) -> list[str]:
    """Returns the text of the LM, without a held-out dev set, because LM weights are tuned on it."""
    if options.arpa is not None and options.dev is None:
        logger.warning(
            "%s: if it was estimated on the training transcripts it knows the dev sentences, which are held out of "
            "train, and the LM weight comes out too large; better give a dev set (--dev or corpus.prepare.dev)",
            options.arpa,
        )
    if options.text is None:
        return [utterance.text or "" for utterance in sets["train"].utterances]
    normalise = _normaliser(options, lexicon)
    sentences = read_text(Path(options.text), normalise, issues_by_set["lm"])
    unknown["lm"] = normalise.unknown
    if options.dev is None:
        sentences = _without_held_out(sentences, sets["dev"], lexicon, issues_by_set["lm"])
        if not sentences:
            raise InputError(f"{options.text}: contains only sentences held out as dev; give more text, or --dev")
    return sentences


def _without_held_out(sentences: list[str], dev: CorpusSet, lexicon: Lexicon, issues: IssueCounter) -> list[str]:
    """Removes one copy of each dev sentence from the text. Noises are ignored in the comparison."""
    held = Counter(lexicon.scored(utterance.text or "") for utterance in dev.utterances)
    kept = []
    for sentence in sentences:
        key = lexicon.scored(sentence)
        if held[key]:
            held[key] -= 1
            issues.add("sentences of the LM text that are held out as dev: taken out", sentence)
        else:
            kept.append(sentence)
    return kept


def _pronounce(
    options: Options, lexicon: Lexicon, unknown: dict[str, Counter[str]], issues_by_set: dict[str, IssueCounter]
) -> None:
    """Adds pronunciations of unknown words in training and LM text only. The words of the test set are not used."""
    words = sorted(unknown["train"].keys() | unknown.get("lm", Counter()).keys())
    made: dict[str, g2p.Phones] = {}
    if words and options.g2p == ESPEAK:
        made = g2p.pronounce(words, lexicon, options.g2p_voice)
    elif words:
        made = trained_g2p.pronounce(words, lexicon)
    for word, phones in made.items():
        lexicon.entries[word] = [phones]
        for subset in ("train", "lm"):
            if count := unknown.get(subset, Counter()).pop(word, 0):
                issues_by_set[subset].add(f"of them pronounced by {options.g2p}", f"{word} {' '.join(phones)}", count)


def _spell(
    options: Options, lexicon: Lexicon, train: CorpusSet, sentences: list[str], issues_by_set: dict[str, IssueCounter]
) -> None:
    """Adds words of training and LM text that the lexicon lacks, with their letters as phones."""
    texts = [utterance.text or "" for utterance in train.utterances] + (sentences if options.text else [])
    for word, count in sorted(Counter(word for text in texts for word in text.split()).items()):
        if word not in lexicon.vocabulary and not is_mark(word) and (phones := spell(word)):
            lexicon.entries[word] = [phones]
            issues_by_set["train"].add("words spelt by their letters", word, count)


def _lacking(
    lexicon: Lexicon, sets: dict[str, CorpusSet], issues_by_set: dict[str, IssueCounter]
) -> dict[str, Counter[str]]:
    """Returns and counts the words of each set that a lexicon made of train lacks."""
    lacking = {}
    for subset, corpus in sets.items():
        lacking[subset] = Counter[str]()
        for utterance in corpus.utterances:
            for word in (utterance.text or "").split():
                if word not in lexicon.vocabulary:
                    issues_by_set[subset].add(OUTSIDE, f"{utterance.id}: {word}")
                    lacking[subset][word] += 1
    return lacking


def _count_cases(lexicon: Lexicon, issues: IssueCounter) -> None:
    """Counts the words that differ only in case, of a lexicon made of train."""
    cases: dict[str, list[str]] = defaultdict(list)
    for word in sorted(lexicon.entries):
        cases[word.casefold()].append(word)
    for words in cases.values():
        if len(words) > 1:
            issues.add(APART, " ".join(words), len(words))


def _check_unknown(lexicon: Lexicon, train: CorpusSet) -> None:
    counts = Counter(word for utterance in train.utterances for word in (utterance.text or "").split())
    lacking = Counter({word: count for word, count in counts.items() if word not in lexicon.vocabulary})
    if lacking.total() > TOO_MANY * counts.total():
        raise InputError(
            f"{train.folder / 'text'}: {lacking.total()} of {counts.total()} words are not in the lexicon "
            f"({most_frequent(lacking)}); check that the lexicon belongs to this corpus, "
            f"add pronunciations, or try --g2p {ESPEAK}, {TRAINED} or {LETTERS}"
        )


def _write_language(
    out: Path,
    options: Options,
    lexicon: Lexicon,
    train: CorpusSet,
    sentences: list[str],
    issues_by_set: dict[str, IssueCounter],
) -> None:
    """Writes lexicon.txt, nonspeech.txt, and the text and the given LM in lm/."""
    transcripts = Counter(word for utterance in train.utterances for word in (utterance.text or "").split())
    others = [Counter(word for sentence in sentences for word in sentence.split())] if options.text else []
    arpa = None
    if options.arpa is not None:
        arpa = read_given_arpa(Path(options.arpa), lexicon.vocabulary, transcripts, issues_by_set["lm"])
        others.append(Counter({word: round(1e9 * 10**logprob) + 1 for (word,), logprob in arpa.logprobs[0].items()}))
    dropped = beyond(lexicon.entries, transcripts, others, options.max_words)
    if dropped:
        what = f"words that neither transcripts nor LM have, or beyond {options.max_words}: left out"
        issues_by_set["lexicon"].add(what, min(dropped), len(dropped))
        lexicon.entries = {word: variants for word, variants in lexicon.entries.items() if word not in dropped}
    lexicon.write(out)
    (out / "lm").mkdir(exist_ok=True)
    write_lines(out / "lm" / "train.txt", sentences)
    if arpa is not None:
        write_arpa(without_words(arpa, dropped), out / "lm" / GIVEN_ARPA)


def _rules(options: Options) -> Path | None:
    """Returns the GLM of the test set, or of dev."""
    paths = [Path(folder) / "glm" for folder in (options.test, options.dev) if folder]
    return next((path for path in paths if path.exists()), None)


def _report(lexicon: Lexicon, unknown: dict[str, Counter[str]], issues_by_set: dict[str, IssueCounter]) -> None:
    """Logs what was corrected or left out, and the most frequent unknown words of each set."""
    if table := summary_table(issues_by_set):
        logger.info("what was corrected or left out:\n%s", table)
    for subset, words in unknown.items():
        lacking = Counter({word: count for word, count in words.items() if word not in lexicon.vocabulary})
        if lacking:
            logger.info(
                "%s: %d words (%d different ones) outside the lexicon: %s",
                subset, lacking.total(), len(lacking), most_frequent(lacking),
            )  # fmt: skip
