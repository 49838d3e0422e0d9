"""Tests stage data of recipes/kaldi on small directories of real files: every form of audio and every error."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
from scipy.signal import correlate

from asr_am.data.audio import read_utterances
from asr_am.data.manifests import read_recordings, read_supervisions
from asr_am.data.validate import validate_data_dir
from asr_am.decode.ctm import CtmWord, write_ctm
from asr_am.errors import InputError
from asr_am.score.scoring import score_files
from local.kaldi.lexicon import APART
from local.kaldi.prepare import prepare
from tests.support.kaldi_corpus import LEXICON, RATE, WORDS, edit, noise, write_kaldi_dir

needs_espeak = pytest.mark.skipif(importlib.util.find_spec("espeakng_loader") is None, reason="no espeakng-loader")


@dataclass
class Corpus:
    root: Path

    @property
    def train(self) -> Path:
        return self.root / "train"

    @property
    def test(self) -> Path:
        return self.root / "test"

    @property
    def out(self) -> Path:
        return self.root / "data"

    def prepare(self, **options: object) -> str:
        """Runs the preparation and its checks, and returns the corpus' log."""
        given = {"train": self.train, "test": self.test, "lexicon": self.root / "lexicon.txt"} | options
        given = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        prepare(self.out, **({"sampling_rate": RATE} | given))
        validate_data_dir(self.out, allow_commands=bool(options.get("allow_pipes")))
        return (self.root / "log").read_text()

    def texts(self, subset: str) -> dict[str, str]:
        return {u.id: u.text for u in read_supervisions(self.out, subset)}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kaldi")
    write_kaldi_dir(root / "train", "a", speakers=10)
    write_kaldi_dir(root / "test", "b")
    (root / "lexicon.txt").write_text(LEXICON)
    return root


@pytest.fixture
def corpus(pristine: Path, tmp_path: Path) -> Corpus:
    """A copy that may be damaged. Paths in wav.scp are relative to the directory."""
    for name in ("train", "test"):
        shutil.copytree(pristine / name, tmp_path / name)
        path = tmp_path / name / "wav.scp"
        path.write_text(path.read_text().replace(f"{pristine / name}/", ""))
    shutil.copy(pristine / "lexicon.txt", tmp_path)
    handler = logging.FileHandler(tmp_path / "log")
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield Corpus(tmp_path)
    root.removeHandler(handler)
    handler.close()


def other_names(corpus: Corpus, folder: Path) -> Path:
    """Makes a dev set with the audio of another set under new names."""
    shutil.copytree(folder, corpus.root / "dev")
    for name in ("text", "utt2spk", "wav.scp"):
        path = corpus.root / "dev" / name
        path.write_text("".join(f"dev-{line}\n" for line in path.read_text().splitlines()))
    return corpus.root / "dev"


def row(log: str, what: str) -> list[str]:
    """Returns the cells of the summary's row that begins with `what`."""
    (line,) = [line for line in log.splitlines() if line.startswith(what)]
    return line.removeprefix(what).split()


@pytest.mark.parametrize("kind", ["flac", "sph", "ark", "mp3"])
def test_every_form_of_audio_gives_the_samples_of_the_wav_file(corpus: Corpus, kind: str) -> None:
    shutil.rmtree(corpus.test)
    write_kaldi_dir(corpus.test, "b", kind=kind)
    corpus.prepare()
    recording = next(iter(read_recordings(corpus.out, "test")))
    ((_, samples_N),) = read_utterances(recording, [next(iter(read_supervisions(corpus.out, "test")))])
    if kind == "mp3":  # mp3 adds a delay
        peak = correlate(samples_N, noise(0).astype(np.float32)).max()
        assert peak > 0.7 * np.linalg.norm(samples_N) * np.linalg.norm(noise(0).astype(np.float32))
    else:
        np.testing.assert_array_equal(samples_N, noise(0))
    assert (corpus.out / "wav").exists() == (kind == "ark"), "audio is copied out of archives only"


def test_dev_is_held_out_by_speaker_always_the_same(corpus: Corpus) -> None:
    log = corpus.prepare()
    held = {u.speaker for u in read_supervisions(corpus.out, "dev")}
    assert len(held) == 2 and f"2 of 10 training speakers (20.0% of the speech): {' '.join(sorted(held))}" in log
    assert not held & {u.speaker for u in read_supervisions(corpus.out, "train")}
    assert (corpus.out / "lm/train.txt").read_text().count("\n") == 24  # without dev
    for name in ("text", "utt2spk", "wav.scp"):  # the order of the lines does not matter
        lines = (corpus.train / name).read_text().splitlines()[::-1]
        (corpus.train / name).write_text("\r\n".join(lines) + "\r\n")
    corpus.prepare()
    assert {u.speaker for u in read_supervisions(corpus.out, "dev")} == held
    assert json.loads((corpus.out / "corpus.json").read_text())["hours"] == pytest.approx(24 / 3600)


@pytest.mark.parametrize("speaker", ["{0}", "amy"])
def test_without_enough_speakers_utterances_are_held_out(corpus: Corpus, speaker: str) -> None:
    names = [line.split()[0] for line in (corpus.train / "utt2spk").read_text().splitlines()]
    (corpus.train / "utt2spk").write_text("".join(f"{name} {speaker.format(name)}\n" for name in names))
    assert "training utterances, since" in corpus.prepare()
    assert len(corpus.texts("dev")) == 3 and len(corpus.texts("train")) == 27
    assert {u.speaker for u in read_supervisions(corpus.out, "dev")}.isdisjoint(
        {u.speaker for u in read_supervisions(corpus.out, "train")}
    )


def append(name: str, line: str) -> Callable[[Corpus], object]:
    def change(corpus: Corpus) -> None:
        path = corpus.train / name
        path.write_text(path.read_text() + line)

    return change


def replace(name: str, old: str, new: str) -> Callable[[Corpus], object]:
    return lambda corpus: edit(corpus.train / name, old, new)


def audio(change: Callable[[Path], object]) -> Callable[[Corpus], object]:
    return lambda corpus: change(corpus.train / "a0-0.wav")


SEGMENTS = "".join(f"a{i}-{j} a{i}-{j} 0 1\n" for i in range(10) for j in range(3))


def segments(old: str, new: str) -> Callable[[Corpus], object]:
    return lambda corpus: (corpus.train / "segments").write_text(SEGMENTS.replace(old, new))


MENDED = [
    (append("text", "a0-0 YES YES\n"), "a line twice", 30),
    (append("text", "a0-0\tYES  YES \n"), "a line twice", 30),
    (replace("text", "a0-0 YES YES", "a0-0"), "transcript without words", 29),
    (replace("text", "a0-0 YES YES", "a0-0 !SIL ..."), "transcript without words", 29),
    (replace("text", "a0-0 YES YES", "a0-0 Yes, yes!"), "words with punctuation", 30),
    (replace("text", "a0-0 YES YES", "a0-0 yes yes"), "words in another case", 30),
    (replace("text", "a0-0 YES YES", "a0-0 \u201cYES\u201d YES \u2013"), "punctuation by itself", 30),
    (replace("text", "a0-0 YES YES", "a0-0 MA\u00d1ANA YES"), "words outside the lexicon", 30),
    (append("text", "zoe-1 YES\n"), "transcript without audio", 30),
    (replace("text", "a0-0 YES YES\n", ""), "utterance without a transcript", 29),
    (replace("utt2spk", "a0-0 a0\n", ""), "utterance without a speaker", 29),
    (append("utt2spk", "zoe-1 zoe\n"), "speaker of an utterance without audio", 30),
    (audio(Path.unlink), "missing audio", 29),
    (audio(lambda path: path.write_bytes(b"")), "audio that cannot be read", 29),
    (audio(lambda path: path.write_bytes(path.read_bytes()[:44])), "audio without samples", 29),
    (audio(lambda path: soundfile.write(path, np.zeros(RATE), RATE)), "digital silence", 29),
    (audio(lambda path: soundfile.write(path, noise(0, 0.02), RATE)), "shorter than its phones", 29),
    (replace("wav.scp", "a0-0.wav", "sph2pipe -f wav -p -c 1 a0-0.wav |"), "", 30),
    (replace("wav.scp", "a0-0.wav", "a0-0.wav:12"), "audio that cannot be read", 29),
    (segments("a0-0 0 1", "a0-0 0 1.4"), "segment ends up to", 30),
    (segments("a0-0 0 1", "a0-0 0 1.6"), "segment outside", 29),
    (segments("a0-0 0 1", "a0-0 1 0.5"), "segment outside", 29),
    (segments("a0-0 0 1", "a0-0 0.5 0.5"), "segment ends before", 29),
    (segments("a0-0 a0-0 0 1\n", ""), "recording without a line in segments: not used", 29),
    (segments("a0-0 a0-0", "a0-0 nowhere"), "recording that wav.scp lacks", 29),
]


@pytest.mark.parametrize(("damage", "what", "kept"), MENDED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_kaldi_user_expects_to_be_mended_is_mended_and_counted(
    corpus: Corpus, damage: Callable[[Corpus], object], what: str, kept: int
) -> None:
    damage(corpus)
    log = corpus.prepare()
    assert not what or any(line.startswith(what) for line in log.splitlines()), log
    assert len(corpus.texts("train") | corpus.texts("dev")) == kept


def audio_of_many(content: bytes) -> Callable[[Corpus], object]:
    return lambda corpus: [path.write_bytes(content) for path in corpus.train.glob("a0-?.wav")]


def in_test(name: str, old: str, new: str) -> Callable[[Corpus], object]:
    """Replaces text in every line of a file of the test set."""

    def change(corpus: Corpus) -> None:
        path = corpus.test / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def all_of(*changes: Callable[[Corpus], object]) -> Callable[[Corpus], object]:
    return lambda corpus: [change(corpus) for change in changes]


def recording(old: str, new: str) -> Callable[[Corpus], object]:
    """Renames a recording of the test set and its utterance."""
    return all_of(*(in_test(name, f"{old} ", f"{new} ") for name in ("wav.scp", "text", "utt2spk")))


def rules(text: str) -> Callable[[Corpus], object]:
    return lambda corpus: (corpus.test / "glm").write_text(text)


def lexicon(line: str) -> Callable[[Corpus], object]:
    return lambda corpus: (corpus.root / "lexicon.txt").write_text(LEXICON + line)


BRACE = lexicon("{LEFT-BRACE L EH F T\n")


def spoken_markup(word: str) -> Callable[[Corpus], object]:
    return all_of(lexicon(f"{word} AH\n"), in_test("text", "b0-0 YES", f"b0-0 {word}"))


def references(lines: str) -> Callable[[Corpus], object]:
    return lambda corpus: (corpus.test / "stm").write_text(lines)


REFERENCES = "".join(f"b{i}-{j} A x 0 1 YES\n" for i in range(4) for j in range(3))
NOT_SCORABLE = [
    (recording("b0-0", "b{0}"), r"test/wav.scp:1: recording b\{0\}: names in NIST's"),
    (recording("b0-0", "<b0>"), r"test/wav.scp:1: recording <b0>: names in NIST's"),
    (recording("b0-0", ";b0"), r"test/wav.scp:1: recording ;b0: names in NIST's"),
    (in_test("utt2spk", " b0", " <b0>"), r"test/utt2spk: speaker <b0>: names in NIST's"),
    (recording("b0-1", "B0-0"), "test/wav.scp:1: recordings B0-0 and b0-0 differ only in case"),
    (all_of(BRACE, in_test("text", "b0-0 YES", "b0-0 {LEFT-BRACE")), r"test/text: utterance b0-0: \{LEFT-BRACE is no"),
    (spoken_markup("(OF)"), r"test/text: utterance b0-0: \(OF\) is not a word in NIST's references, where"),
    (spoken_markup("A;B"), r"test/text: utterance b0-0: A;B is not a word"),
    (spoken_markup("A\\B"), r"test/text: utterance b0-0: A\\B is not a word"),
    (spoken_markup("WELL*"), r"test/text: utterance b0-0: WELL\* is not a word"),
    (references(REFERENCES + "b0-0 A x 0 1 YES\n"), "test/stm:13: a second reference for the time of .*test/stm:1,"),
    (references(REFERENCES + "b0-0 A x 1 0 YES\n"), "test/stm:13: ends at 0 s, before it begins at 1 s"),
    (all_of(lexicon("(LEFT L EH\n"), rules(";;\nA => B\n")), r"the word \(LEFT of the lexicon under glm: parenth"),
    (lexicon("<ALT_END> L EH\n"), r"the word <ALT_END> of the lexicon: <ALT...> markup"),
    (rules(";; rules\n[YES] => {[NO] / [ONE]}\n"), r"rules \(glm\) have made this of .*/text, so correct them"),
    (rules(";; rules\n[YES\n"), r"test/glm:2: no '=>' in rule"),
    (
        references(REFERENCES.replace("YES", "{ YES")),
        r"ref.stm:1: .* has no closing brace.*; correct it in .*test/stm",
    ),
    (
        lambda corpus: (corpus.test / "segments").write_text("b0-0 b0-0 0 1 0\nb0-1 b0-1 0 1 2\n"),
        "test/segments:2: utterance b0-1 is on channel 2, but",
    ),
]


@pytest.mark.parametrize(("damage", "message"), NOT_SCORABLE, ids=[message for _, message in NOT_SCORABLE])
def test_what_the_scorer_would_refuse_is_refused_before_training(
    corpus: Corpus, damage: Callable[[Corpus], object], message: str
) -> None:
    damage(corpus)
    with pytest.raises(InputError, match=message):
        corpus.prepare()


def test_names_and_channels_of_what_is_not_scored_need_not_fit(corpus: Corpus) -> None:
    (corpus.train / "segments").write_text(SEGMENTS.replace("a0-0 a0-0 0 1", "a0-0 a0-0 0 1 7"))
    with pytest.raises(InputError, match="train/segments:1: utterance a0-0 is on channel 7"):  # it may be held out
        corpus.prepare()
    path = corpus.test / "wav.scp"
    path.write_text(path.read_text() + "B0-0 b0-0.wav\n{x} b0-0.wav\n")  # without a transcript
    corpus.prepare(dev=other_names(corpus, corpus.test))
    assert "a0-0" in corpus.texts("train")


def test_a_word_with_a_brace_may_be_trained_on(corpus: Corpus) -> None:
    BRACE(corpus)
    edit(corpus.train / "text", "a0-0 YES", "a0-0 {LEFT-BRACE")
    assert "words that are markup in NIST's files" in corpus.prepare(dev=other_names(corpus, corpus.test))
    assert corpus.texts("train")["a0-0"] == "{LEFT-BRACE YES"


def test_only_what_was_said_is_scored(corpus: Corpus) -> None:
    """The unknown word counts, as do words in brackets with phones of speech. Noises and marks do not."""
    (corpus.root / "lexicon.txt").write_text(LEXICON + "<UH> AH\n[LAUGHTER] laugh\n[COUGH] SPN\n<ER> SPN\n<ER> ER\n")
    edit(corpus.test / "text", "b0-0 YES YES", "b0-0 <UNK> YES <uh> [LAUGHTER] [COUGH] <ER> [noise] <hm> Zoe")
    corpus.prepare()
    first = (corpus.out / "test/ref.stm").read_text().splitlines()[0]
    assert first.split(maxsplit=6)[6] == "<unk> YES <UH> [LAUGHTER] <ER> ZOE"
    said = {"b0-0": [CtmWord(30 * n, 20, w, 1.0) for n, w in enumerate(["YES", "<UH>"])]}
    write_ctm(corpus.root / "some.ctm", {u.id: u for u in read_supervisions(corpus.out, "test")}, said)
    total = score_files(corpus.out / "test/ref.stm", corpus.root / "some.ctm").segments[0].counts
    assert (total.correct, total.deletions, total.substitutions) == (2, 4, 0)


REFUSED = [
    (append("text", "a0-0 NO\n"), r"text:31: a0-0 has another value in .*text:1"),
    (append("wav.scp", "zoe\n"), r"wav.scp:31: no file for recording zoe"),
    (replace("wav.scp", "a0-0.wav", "cat x | sox - |"), r"wav.scp:1: .*--allow-pipes"),
    (append("utt2spk", "zoe a b\n"), r"utt2spk:31: not `utterance speaker`"),
    (lambda corpus: (corpus.train / "utt2spk").unlink(), "utt2spk: no such file; .*awk"),
    (
        lambda corpus: (
            (corpus.train / "utt2spk").unlink(),
            (corpus.train / "spk2utt").write_text("a a0-0 a0-1\nb a0-1\n"),
        ),
        "spk2utt:2: a0-1 also has speaker a",
    ),
    (lambda corpus: (corpus.train / "text").write_bytes(b"a0-0 CAF\xe9\n"), "text:1: not UTF-8"),
    (lambda corpus: (corpus.train / "text").write_text("\n"), "text: is empty"),
    (lambda corpus: (corpus.test / "text").unlink(), "text: no such file; .*asr_am.transcribe"),
    (segments("a0-0 0 1", "a0-0 zero 1"), r"segments:1: every line is"),
    (lambda corpus: [p.unlink() for p in corpus.train.glob("a0-?.wav")], "3 of 30 utterances have no usable audio"),
    (audio_of_many(b"RIFF"), "3 of 30 utterances have no usable audio(?!.*--audio-root)"),
    (lambda corpus: (corpus.train / "text").write_text("a0-0 YES\n"), "only 1 of 30 utterances"),
    (lambda corpus: (corpus.root / "lexicon.txt").write_text("YES Y\n"), "31 of 48 words are not in the lexicon"),
    (lambda corpus: (corpus.root / "lexicon.txt").write_text("YES Y\nNO\n"), "lexicon.txt:2: 'NO' has no phones"),
    (lambda corpus: (corpus.train / "spk2gender").write_text("a0 x\n"), "spk2gender:1: the gender is"),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_nobody_can_mend_is_named_with_its_line(
    corpus: Corpus, damage: Callable[[Corpus], object], message: str
) -> None:
    damage(corpus)
    with pytest.raises(InputError, match=message):
        corpus.prepare()


def test_speakers_of_train_in_test_get_a_name_of_their_own(corpus: Corpus) -> None:
    edit(corpus.test / "utt2spk", "b0-0 b0", "b0-0 a0")
    log = corpus.prepare()
    assert row(log, "speakers of an earlier set too: called NAME-test here")[0] == "1"
    assert {u.speaker for u in read_supervisions(corpus.out, "test")} == {"a0-test", "b0", "b1", "b2", "b3"}


def test_one_utterance_in_train_and_test_is_refused(corpus: Corpus) -> None:
    (corpus.train / "a0-0.wav").unlink()  # is never read
    with pytest.raises(InputError, match=r"train/text:1: utterance a0-0 is in .*train too \(30 are\).*copy_data_dir"):
        corpus.prepare(test=corpus.train, dev=corpus.test, max_bad_audio=0)


def test_pipes_are_run_when_allowed_and_plain_ones_read_without(corpus: Corpus) -> None:
    wav = corpus.train / "a0-0.wav"
    edit(corpus.train / "wav.scp", "a0-0.wav", f"cat {wav} |")
    corpus.prepare()
    edit(corpus.train / "wav.scp", f"cat {wav} |", f"head -c 1000000 {wav} |")
    edit(corpus.train / "wav.scp", "a0-1.wav", "false |")
    log = corpus.prepare(allow_pipes=True)
    assert row(log, "command that gives no audio: left out")[0] == "1"
    commands = [
        source.source
        for subset in ("train", "dev")
        for r in read_recordings(corpus.out, subset, allow_commands=True)
        for source in r.sources
        if source.type == "command"
    ]
    assert commands == [f"head -c 1000000 {wav}"]
    edit(corpus.train / "wav.scp", "false |", "a0-1.wav")
    edit(corpus.train / "wav.scp", f"head -c 1000000 {wav} |", "head -c 1000000 a0-0.wav |")
    with pytest.raises(InputError, match=r"command that gives no audio: .*a0-0\.wav.*; if paths are relative, give"):
        corpus.prepare(allow_pipes=True, max_bad_audio=0.0)


def test_sides_of_a_call(corpus: Corpus) -> None:
    """The first of two channels is used unless reco2file_and_channel or segments name one. An stm follows the names."""
    both = np.stack([noise(1), noise(2)], axis=1)
    soundfile.write(corpus.test / "call.wav", both, RATE)
    for name in ("b0-0", "b0-1", "b0-2"):
        edit(corpus.test / "wav.scp", f"{name}.wav", "call.wav")
    (corpus.test / "reco2file_and_channel").write_text("b0-1 call A\nb0-2 call B\n")
    log = corpus.prepare()
    assert row(log, "recording of several channels: the first is used, as Kaldi does")[0] == "1"
    recordings = {r.id: r for r in read_recordings(corpus.out, "test")}
    for utterance in read_supervisions(corpus.out, "test"):
        if utterance.id in ("b0-0", "b0-1", "b0-2"):
            ((_, samples_N),) = read_utterances(recordings[utterance.id], [utterance])
            np.testing.assert_array_equal(samples_N, noise(2 if utterance.id == "b0-2" else 1))
    others = [line.split()[0] for line in (corpus.test / "text").read_text().splitlines()[3:]]
    lines = [
        "call B x 0 1 <o,f> (NO) YES",
        "b0-0 A x 0 1 YES",
        "call A x 0 1 NO",
        *(f"{name} 1 x 0 1 NO" for name in others),
    ]
    (corpus.test / "stm").write_text(";; LABEL\n ** of NIST\n" + "\n".join(lines) + "\n")
    corpus.prepare()
    written = (corpus.out / "test/ref.stm").read_text().splitlines()
    assert written[:2] == [";; LABEL", " ** of NIST"]
    assert written[2:5] == ["b0-0 A x 0 1 YES", "b0-1 A x 0 1 NO", "b0-2 B x 0 1 <o,f> (NO) YES"]
    (corpus.test / "stm").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(InputError, match="no reference for utterance b0-2"):
        corpus.prepare()
    (corpus.test / "stm").write_text("\n".join(lines).upper() + "\n")
    with pytest.raises(InputError, match=r"references have no utterance.* names of recordings come from"):
        corpus.prepare()


def overlapping_turns(folder: Path, turns: int = 20) -> np.ndarray:
    """Makes a test set of one recording with turns of 4 s that overlap by a second, and returns its samples."""
    samples_N = noise(7, 3 * turns + 1)
    soundfile.write(folder / "call.wav", samples_N, RATE)
    (folder / "wav.scp").write_text("call call.wav\n")
    (folder / "segments").write_text("".join(f"t{n:02} call {3 * n} {3 * n + 4}\n" for n in range(turns)))
    words = [" ".join(WORDS[(n // 4**place) % 4] for place in range(4)) for n in range(turns)]
    (folder / "text").write_text("".join(f"t{n:02} {text}\n" for n, text in enumerate(words)))
    (folder / "utt2spk").write_text("".join(f"t{n:02} {'xy'[n % 2]}\n" for n in range(turns)))
    return samples_N


def test_utterances_that_overlap_on_a_channel_are_scored_each_against_its_own_words(corpus: Corpus) -> None:
    samples_N = overlapping_turns(corpus.test)
    log = corpus.prepare()
    assert row(log, "utterances that overlap an earlier one on their channel: scored apart")[0] == "10"
    recordings = {r.id: r for r in read_recordings(corpus.out, "test")}
    assert set(recordings) == {"call", "call-overlap1"}  # the prefix is kept for corpus.subsets
    utterances = {u.id: u for u in read_supervisions(corpus.out, "test")}
    for n, utterance in enumerate(utterances.values()):
        ((_, read_N),) = read_utterances(recordings[utterance.recording_id], [utterance])
        np.testing.assert_array_equal(read_N, samples_N[3 * n * RATE : (3 * n + 4) * RATE])
    perfect = {
        name: [CtmWord(10 + 90 * place, 80, word, 1.0) for place, word in enumerate((utterance.text or "").split())]
        for name, utterance in utterances.items()
    }
    write_ctm(corpus.root / "perfect.ctm", utterances, perfect)
    total = score_files(corpus.out / "test/ref.stm", corpus.root / "perfect.ctm").total
    assert (total.sentences, total.words, total.errors) == (20, 80, 0)


def test_overlaps_are_left_to_an_stm_of_the_users_own(corpus: Corpus) -> None:
    overlapping_turns(corpus.test)
    (corpus.test / "stm").write_text("".join(f"call A x {3 * n} {3 * n + 3} NO\n" for n in range(20)))
    assert "scored apart" not in corpus.prepare()
    assert {u.recording_id for u in read_supervisions(corpus.out, "test")} == {"call"}


def test_lost_utterances_are_told_in_corpus_json(corpus: Corpus) -> None:
    edit(corpus.test / "text", "b0-0 YES YES", "b0-0 !SIL")
    (corpus.test / "b1-1.wav").unlink()
    corpus.prepare(max_bad_audio=0.1)
    record = json.loads((corpus.out / "corpus.json").read_text())
    assert record["utterances"] == {"train": 24, "dev": 6, "test": 10}
    assert record["left_out"] == {"test": {"transcript without words": 1, "missing audio": 1}}


def test_paths_from_another_machine_need_the_root(corpus: Corpus) -> None:
    (corpus.root / "audio").mkdir()
    for path in corpus.train.glob("*.wav"):
        path.rename(corpus.root / "audio" / path.name)
    with pytest.raises(InputError, match=r"30 of 30 utterances have no usable audio.*--audio-root"):
        corpus.prepare()
    for path in corpus.test.glob("*.wav"):
        path.rename(corpus.root / "audio" / path.name)
    corpus.prepare(audio_root=corpus.root / "audio")


def test_text_and_arpa(corpus: Corpus) -> None:
    text, arpa = corpus.root / "sentences", corpus.root / "lm.arpa"
    text.write_text("yes yes no\nONE, two one\n\nTHREE one\n")
    corpus.prepare(text=text)
    assert (corpus.out / "lm/train.txt").read_text() == "YES YES NO\nONE TWO ONE\nTHREE ONE\n"
    words = ["<s>", "</s>", "<unk>", "yes", "no", "one", "two", "three"]
    arpa.write_text(
        f"\\data\\\nngram 1={len(words)}\n\n\\1-grams:\n" + "".join(f"-1 {w}\n" for w in words) + "\n\\end\\\n"
    )
    log = corpus.prepare(arpa=arpa)
    assert row(log, "words of the LM outside the lexicon: left out")[0] == "1"
    assert "\tYES\n" in (corpus.out / "lm/given.arpa").read_text()
    arpa.write_text(arpa.read_text().replace("ngram 1=", "ngram 1=99999999"))
    with pytest.raises(InputError, match="prune it first"):
        corpus.prepare(arpa=arpa)
    text.write_text("".join(f"utt{n} YES NO\n" for n in range(12)))
    with pytest.raises(InputError, match="utterance ids"):
        corpus.prepare(text=text)
    text.write_text("quite other words\n")
    with pytest.raises(InputError, match="3 of 3 words are not in the lexicon"):
        corpus.prepare(text=text)


def test_the_lm_does_not_learn_sentences_held_out_as_dev(corpus: Corpus) -> None:
    """One copy of each is removed, because further ones were spoken by others."""
    names = [line.split()[0] for line in (corpus.train / "text").read_text().splitlines()]
    spoken = [" ".join(WORDS[(n // 4**place) % 4] for place in range(3)) for n in range(len(names))]  # all different
    (corpus.train / "text").write_text("".join(f"{name} {said}\n" for name, said in zip(names, spoken, strict=True)))
    text = corpus.root / "sentences"
    text.write_text("\n".join([*spoken, "TWO TWO", spoken[0], *spoken]).lower() + "\n")
    log = corpus.prepare(text=text)
    held = sorted(corpus.texts("dev").values())
    assert len(held) == 6 and row(log, "sentences of the LM text that are held out as dev: taken out")[0] == "6"
    assert sorted([*(corpus.out / "lm/train.txt").read_text().splitlines(), *held]) == sorted(
        [*spoken, "TWO TWO", spoken[0], *spoken]
    )
    text.write_text("\n".join(held) + "\n")
    with pytest.raises(InputError, match="sentences: contains only sentences held out as dev"):
        corpus.prepare(text=text)
    corpus.prepare(text=text, dev=other_names(corpus, corpus.train))  # a given dev set is not removed from the text
    assert len((corpus.out / "lm/train.txt").read_text().splitlines()) == 6


def test_words_are_spelt_alike_everywhere(corpus: Corpus) -> None:
    """Lexicon, ARPA, STM and GLM agree, whatever apostrophe, case and Unicode form each has."""
    (corpus.root / "lexicon.txt").write_text(LEXICON + "DON’T D OW N T\nCAFÉ K AE F EY\n")
    words = ["<s>", "</s>", "<unk>", "yes", "no", "one", "two", "don’t", "café"]
    arpa = corpus.root / "lm.arpa"
    arpa.write_text(
        f"\\data\\\nngram 1={len(words)}\n\n\\1-grams:\n" + "".join(f"-1 {w}\n" for w in words) + "\n\\end\\\n"
    )
    names = [line.split()[0] for line in (corpus.test / "text").read_text().splitlines()]
    first, *others = [f"{name} A x 0 1" for name in names]
    said = "<o,f> (don´t) { café / don’t  @ } zoë​ (%hesitation)"
    (corpus.test / "stm").write_text(f"{first} {said}\n" + "".join(f"{line} NO\n" for line in others))
    (corpus.test / "glm").write_text(";; rules\nDON’T => DO NOT / [ ] __ [ ]\n")
    log = corpus.prepare(arpa=arpa)
    assert "words of the LM outside the lexicon" not in log and "better give a dev set (--dev or" in log
    unigrams = {line.split("\t")[1] for line in (corpus.out / "lm/given.arpa").read_text().splitlines() if "\t" in line}
    assert unigrams == {"<s>", "</s>", "<unk>", "YES", "NO", "ONE", "TWO", "DON'T", "CAFÉ"}
    written = (corpus.out / "test/ref.stm").read_text().splitlines()
    assert written[:2] == [
        f"{first} <o,f> (DON'T) {{ CAFÉ / DON'T @ }} zoë (%hesitation)", f"{others[0]} NO",
    ]  # fmt: skip
    assert row(log, "references in another spelling: as in the lexicon")[0] == "1"
    assert (corpus.out / "en.glm").read_text() == ";; rules\nDON'T => DO NOT / [ ] __ [ ]\n"


def test_a_large_lexicon_is_limited_without_looking_at_the_test_set(corpus: Corpus) -> None:
    edit(corpus.root / "lexicon.txt", "NO N OW\n", "NO N OW\nRARE R EH R\nNEVER N EH V ER\n")
    text = corpus.root / "sentences"
    text.write_text("RARE YES\n")
    edit(corpus.test / "text", "YES", "NEVER")
    corpus.prepare(text=text, max_words=5)
    words = {line.split()[0] for line in (corpus.out / "lexicon.txt").read_text().splitlines()}
    assert words == {"YES", "NO", "ONE", "TWO", "RARE"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": None}, "--train"),
        ({"sampling_rate": 11025}, "11025 is not one of"),
        ({"g2p": "magic"}, "--g2p"),
        ({"text": "a", "arpa": "b"}, "give one of them"),
        ({"lexicon": None}, r"--lexicon, or without one --g2p espeak .* or --g2p letters"),
        ({"lexicon": None, "g2p": "phonetisaurus"}, r"--lexicon, or without one --g2p espeak .* or --g2p letters"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "data", **({"train": "x", "test": "x", "lexicon": "x", "sampling_rate": RATE} | options))


@pytest.mark.parametrize("g2p", ["letters", pytest.param("espeak", marks=needs_espeak)])
def test_without_a_lexicon_words_are_pronounced_by_espeak_or_their_letters(corpus: Corpus, g2p: str) -> None:
    (corpus.root / "text").write_text("yes two\nnever\n", encoding="utf-8")
    out = corpus.root / "data"
    options = {"train": str(corpus.train), "test": str(corpus.test), "sampling_rate": RATE}
    prepare(out, **options, lexicon=None, g2p=g2p, text=str(corpus.root / "text"))
    lines = [line.split() for line in (out / "lexicon.txt").read_text("utf-8").splitlines()]
    lexicon = {word: phones for word, *phones in lines}
    assert lexicon.keys() == {*WORDS, "yes", "two", "never"}
    assert lexicon["TWO"] == lexicon["two"] == {"letters": list("two"), "espeak": ["t", "u\u02d0"]}[g2p]


def test_audio_in_two_sets_is_counted(corpus: Corpus) -> None:
    for number, path in enumerate(sorted(corpus.test.glob("*.wav"))):
        soundfile.write(path, noise(1000 + number), RATE)
    assert "audio of an earlier set, too" not in corpus.prepare()
    shutil.copy(corpus.train / "a0-0.wav", corpus.test / "b0-0.wav")
    edit(corpus.test / "wav.scp", "b0-1.wav", str(corpus.train / "a0-1.wav"))
    shutil.rmtree(corpus.out)
    assert row(corpus.prepare(), "audio of an earlier set, too: error rates come out too low")[0] == "2"


def test_without_a_lexicon_only_what_stays_unknown_is_called_so(corpus: Corpus) -> None:
    edit(corpus.train / "text", "YES", "yes")
    edit(corpus.test / "text", "YES", "NEVER")
    log = corpus.prepare(lexicon=None, g2p="letters")
    assert row(log, "words outside the lexicon: the unknown word")[0] == "1" and "\ntrain: " not in log
    assert row(log, APART) == ["2", "YES", "yes"]
