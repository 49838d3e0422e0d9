"""Tests the generated corpus: the same to the bit from a seed, consistent, and accepted by NIST's programs."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_am.data.manifests import SETS, read_recordings, read_supervisions
from asr_am.data.validate import validate_data_dir
from asr_am.errors import InputError
from asr_am.score.sctk import find_sctk
from local.minicts import espeak, prepare
from local.minicts.conditions import EN, SW
from local.minicts.glm import contractions, glm
from local.minicts.text import FILLERS, Grammar, Style, Token, grammar, reference, spontaneous, transcript

pytest.importorskip("espeakng_loader", reason="the optional extra minicts is not installed")

TINY = {"hours": 0.01, "speakers": 4, "seed": 3, "test_words": 100}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("minicts")
    prepare.prepare(out, **TINY, jobs=1)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the contents of every file, unpacked because gzip headers have a time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    read = {path: gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in files}
    return {str(path.relative_to(folder)): data for path, data in read.items()}


def test_same_bits_from_a_seed_whatever_the_number_of_processes(corpus: Path, tmp_path: Path) -> None:
    prepare.prepare(tmp_path / "again", **TINY, jobs=3)
    assert contents(tmp_path / "again") == contents(corpus)


def test_another_seed_is_another_corpus(corpus: Path, tmp_path: Path) -> None:
    prepare.prepare(tmp_path / "other", **{**TINY, "seed": 4}, jobs=2)
    first, other = contents(corpus), contents(tmp_path / "other")
    assert first.keys() == other.keys()
    assert not any(first[name] == other[name] for name in first if name.endswith((".wav", "ref.stm", "lm/train.txt")))


def test_passes_the_checks_of_the_data_stage(corpus: Path) -> None:
    validate_data_dir(corpus)


def test_speakers_of_the_sets_are_disjoint(corpus: Path) -> None:
    speakers = [{segment.speaker for segment in read_supervisions(corpus, subset)} for subset in SETS]
    assert [len(names) for names in speakers] == [4, 2, 4]
    assert len(set().union(*speakers)) == sum(len(names) for names in speakers)
    for segment in read_supervisions(corpus, "train"):
        assert segment.id.startswith(f"{segment.speaker}-")


def test_en_has_accents_and_voices_that_training_has_not() -> None:
    calls = prepare.plan(1.0, 40, 0, 5000)
    heard = {(speaker.accent, speaker.variant) for call in calls if call.subset == "train" for speaker in call.speakers}
    unseen = {(speaker.accent, speaker.variant) for call in calls if call.condition == EN for speaker in call.speakers}
    assert not heard & unseen
    assert set(EN.accents) - set(SW.accents) <= {accent for accent, _ in unseen}


def test_training_speakers_call_about_equally_often() -> None:
    calls = [call for call in prepare.plan(1.0, 7, 0, 1500) if call.subset == "train"]
    assert all(a.id != b.id for a, b in (call.speakers for call in calls))
    turns = [sum(speaker.id in {s.id for s in call.speakers} for call in calls) for speaker in calls[0].speakers]
    assert max(turns) - min(turns) <= 1


def test_utterances_are_short_and_never_overlap_on_a_channel(corpus: Path) -> None:
    for subset in SETS:
        by_channel: dict[tuple[str, object], list] = {}
        for segment in read_supervisions(corpus, subset):
            assert 0.3 <= segment.duration <= 15
            by_channel.setdefault((segment.recording_id, segment.channel), []).append(segment)
        for segments in by_channel.values():
            ordered = sorted(segments, key=lambda segment: segment.start)
            assert all(before.end <= after.start for before, after in pairwise(ordered))


def stm_records(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(";;")]


@pytest.mark.parametrize("subset", ["dev", "test"])
def test_stm_says_what_the_supervisions_say(corpus: Path, subset: str) -> None:
    segments = {(s.recording_id, "AB"[s.channel], f"{s.start:.3f}"): s for s in read_supervisions(corpus, subset)}
    records = stm_records(corpus / subset / "ref.stm")
    assert len(records) == len(segments)
    for recording, channel, speaker, begin, end, label, *words in records:
        segment = segments[recording, channel, begin]
        assert (speaker, end) == (segment.speaker, f"{segment.end:.3f}")
        assert speaker == f"{recording}_{channel}"
        condition = recording[:2]
        assert label == f"<O,{condition},{segment.gender},{condition}-{segment.gender}>"
        spoken = ["(%HESITATION)" if word in FILLERS else word for word in segment.text.split() if word[0] != "["]
        assert ["<unk>" if word.endswith("-") else word for word in words] == spoken
    sides = (corpus / subset / "reco2file_and_channel").read_text().split("\n")[:-1]
    assert sides == sorted({f"{r}-{c} {r} {c}" for r, c, *_ in records})


def test_test_set_has_both_conditions(corpus: Path) -> None:
    assert {record[0][:3] for record in stm_records(corpus / "test" / "ref.stm")} == {"sw_", "en_"}


def test_lexicon_covers_everything_said(corpus: Path) -> None:
    pairs = [line.split(maxsplit=1) for line in (corpus / "lexicon.txt").read_text().splitlines()]
    known = {word for word, _ in pairs} | {"<unk>"}
    known |= {line.split()[0] for line in (corpus / "nonspeech.txt").read_text().splitlines()}
    spoken = {word for subset in SETS for segment in read_supervisions(corpus, subset) for word in segment.text.split()}
    spoken |= set((corpus / "lm" / "train.txt").read_text().split())
    assert spoken <= known
    phones = {phone for _, pronunciation in pairs for phone in pronunciation.split()}
    assert len(phones) <= 45 and all(phone.isascii() and phone.isupper() for phone in phones)
    assert len(pairs) == len({tuple(pair) for pair in pairs})
    variants = {phones for word, phones in pairs if word == "HOT"}
    assert variants == {"HH AA T", "HH AO T"}  # American, British


def test_audio_is_telephone_speech(corpus: Path) -> None:
    for subset in SETS:
        segments = list(read_supervisions(corpus, subset))
        for recording in read_recordings(corpus, subset):
            assert soundfile.info(recording.sources[0].source).subtype == "ULAW"
            assert (recording.sampling_rate, recording.channel_ids) == (8000, [0, 1])
            audio_2T = recording.load_audio()
            for channel, samples in enumerate(audio_2T):
                assert 0.02 < np.abs(samples).max() < 0.95
                inside = np.zeros(len(samples), bool)
                for s in segments:
                    if (s.recording_id, s.channel) == (recording.id, channel):
                        inside[int(s.start * 8000) : int(s.end * 8000)] = True
                assert samples[inside].std() > 1.2 * samples[~inside].std()
                spectrum = np.abs(np.fft.rfft(samples)) ** 2
                below, above = int(len(spectrum) * 100 / 4000), int(len(spectrum) * 3800 / 4000)
                assert spectrum[:below].sum() + spectrum[above:].sum() < 0.1 * spectrum.sum()


def spoken_out(words: list[str]) -> list[str]:
    """Returns a perfect hypothesis: no hesitations or fragments, contractions expanded, another spelling of UM-HUM."""
    long = {short: expansions[0] for short, expansions in contractions().items()} | {"UM-HUM": "UH-HUH"}
    spoken = [long.get(word, word) for word in words if word != "(%HESITATION)" and not word.endswith("-")]
    return " ".join(spoken).split()


def test_nist_programs_accept_reference_and_rules(corpus: Path, tmp_path: Path) -> None:
    programs = find_sctk()
    if programs is None:
        pytest.skip("NIST sctk is not installed (Debian: apt install sctk)")
    for name in ("test/ref.stm", "en.glm"):
        shutil.copy(corpus / name, tmp_path)
    records = stm_records(tmp_path / "ref.stm")
    lines = []
    for recording, channel, _, begin, end, _, *words in records:
        spoken = spoken_out(words)
        step = (float(end) - float(begin)) / max(len(spoken), 1)
        lines += [f"{recording} {channel} {float(begin) + n * step:.3f} {step:.3f} {w}\n" for n, w in enumerate(spoken)]
    (tmp_path / "hyp.ctm").write_text("".join(lines))
    hubscr = ["hubscr.pl", "-p", str(programs), "-l", "english", "-g", "en.glm", "-h", "hub5", "-r", "ref.stm"]
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*hubscr, "hyp.ctm"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "hyp.ctm.filt.raw").read_text().splitlines()
    total = next(line for line in table if "| Sum " in line).split()
    sentences, _, _, substitutions, deletions, insertions = [int(field) for field in total if field.isdigit()][:6]
    assert sentences == len(records)
    assert (substitutions, insertions) == (0, 0)  # alternations, hesitations and spellings are equal after the rules
    assert deletions == sum(word.endswith("-") for record in records for word in record[6:])


def test_rules_keep_to_the_limits_of_csrfilt() -> None:
    lines = glm().splitlines()
    assert lines[0].startswith(";;")
    assert max(map(len, lines)) <= 130
    assert sum("=>" in line for line in lines) < 1000
    assert all(word in contractions() for word in grammar().vocabulary() if word.endswith(("N'T", "'RE", "'VE", "'M")))


def test_style_makes_speech_spontaneous() -> None:
    words = ["WELL", "I", "THINK", "THE", "WEATHER", "WAS", "TERRIBLE"]
    rng = np.random.default_rng(0)
    calm = spontaneous(words, Style(filler=0, repeat=0, fragment=0, vocal_noise=0), rng)
    assert [token.word for token in calm] == words
    every = spontaneous(words, Style(filler=1, repeat=0.5, fragment=1, vocal_noise=1), rng)
    assert Token("WEA-", cut_from="WEATHER") in every
    spoken = transcript(every)
    assert spoken.count("<unk>") == sum(bool(token.cut_from) for token in every) > 0
    assert "I I" in spoken and ("[LAUGHTER]" in spoken or "[NOISE]" in spoken)
    written = reference(every)
    assert "WEA-" in written and "(%HESITATION)" in written and "[" not in written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[common]\nsentence: $what\n[weather]\nsun: hot\n", "lacks the rules"),
        ("[common]\nno colon here\n", ":2: neither"),
        ("[common]\nsentence: a | | b\n", ":2: an alternative is empty"),
    ],
)
def test_broken_grammar_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "grammar.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        Grammar(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hours": 0}, "corpus.hours"),
        ({"hours": float("nan")}, "corpus.hours"),
        ({"speakers": 1}, "corpus.speakers"),
        ({"hours": "1h"}, "corpus.hours"),
        ({"speakers": 2.5}, "corpus.speakers"),
        ({"seed": -1}, "corpus.seed"),
        ({"test_words": 5}, "corpus.test_words"),
        ({"version": 999}, "corpus.version"),
    ],
)
def test_values_out_of_range_are_named(tmp_path: Path, changed: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare.prepare(tmp_path / "out", **{**TINY, **changed}, jobs=1)
    assert not (tmp_path / "out").exists()


def test_missing_espeak_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(InputError, match=r"pip install '\.\[minicts\]'"):
        prepare.prepare(tmp_path / "out", **TINY, jobs=1)


def test_espeak_starts_afresh_each_time() -> None:
    spoken = []
    for _ in range(2):
        with espeak.Espeak(seed=5) as voice:
            voice.set_voice("en-US", "f3")
            spoken.append(voice.speak("hello there", words_per_minute=170, pitch=50, pitch_range=50))
    assert len(spoken[0]) > espeak.RATE // 4
    assert np.array_equal(*spoken)


def test_unknown_voice_is_named() -> None:
    with espeak.Espeak(seed=0) as voice, pytest.raises(InputError, match="gmw/en-XX"):
        voice.set_voice("en-XX")
