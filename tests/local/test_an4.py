"""Tests AN4's preparation on a small tree of the same form: big-endian raw files, lists, transcripts, dictionary."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_am.data.manifests import read_recordings, read_supervisions
from asr_am.data.validate import validate_data_dir
from asr_am.errors import InputError
from local.an4 import prepare as an4
from local.an4 import source
from local.an4.source import digest, find_source, read_source
from local.an4.text import read_lexicon

TRAIN = [(speaker, f"an{i}-{speaker}-b") for speaker in ("fash", *an4.DEV_SPEAKERS) for i in (1, 2)]
TEST = [("menk", "cen1-menk-b"), ("menk", "cen2-menk-b")]


def samples(seed: int) -> np.ndarray:
    """Returns half a second of smooth noise, int16 in native order."""
    noise = np.random.default_rng(seed).standard_normal(8000)
    return (2000 * np.convolve(noise, np.ones(8) / 8, mode="same")).astype(np.int16)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "source" / "an4"
    (root / "etc").mkdir(parents=True)
    for part, folder, members in (("train", "an4_clstk", TRAIN), ("test", "an4test_clstk", TEST)):
        files = [f"{folder}/{speaker}/{name}" for speaker, name in members]
        (root / "etc" / f"an4_{part}.fileids").write_text("\n".join(files) + "\n")
        words = "<s> go {} </s>" if part == "train" else "GO {}"
        lines = [f"{words.format('ON' * (i % 2))} ({name})" for i, (_, name) in enumerate(members)]
        (root / "etc" / f"an4_{part}.transcription").write_text("\n".join(lines) + "\n")
        for seed, file in enumerate(files):
            path = root / "wav" / f"{file}.raw"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(samples(seed).astype(">i2").tobytes())
    (root / "etc" / "an4.dic").write_text("GO     G OW\nGO(2)  G UW\nON     AA N\n")
    (root / "etc" / "an4.ug.lm").write_text("\\data\\\n")
    monkeypatch.setattr(an4, "TRAIN_UTTERANCES", len(TRAIN))
    monkeypatch.setattr(an4, "TEST_UTTERANCES", len(TEST))
    monkeypatch.setattr(an4, "TEST_WORDS", 3)
    return root


def pack(tree: Path, compression: str) -> Path:
    archive = tree.parent / f"an4_raw.bigendian.tar.{compression}"
    with tarfile.open(archive, f"w:{compression}") as tar:
        tar.add(tree, "an4")
    return archive


def snapshot(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.suffix != ".gz"}


def test_the_data_directory_is_complete_and_valid(tree: Path, tmp_path: Path) -> None:
    an4.prepare(tmp_path / "data", data_dir=tree, jobs=1)
    validate_data_dir(tmp_path / "data")
    speakers = {
        name: {s.speaker for s in read_supervisions(tmp_path / "data", name)} for name in ("train", "dev", "test")
    }
    assert speakers == {"train": {"fash"}, "dev": set(an4.DEV_SPEAKERS), "test": {"menk"}}
    first = next(iter(read_supervisions(tmp_path / "data", "train")))
    assert (first.id, first.recording_id, first.text, first.gender) == ("fash-an1-fash-b", "an1-fash-b", "GO", "F")
    recording = next(r for r in read_recordings(tmp_path / "data", "train") if r.id == "an1-fash-b")
    wav, rate = soundfile.read(recording.sources[0].source, dtype="int16")
    np.testing.assert_array_equal(wav, samples(0))
    assert rate == 16000
    assert (tmp_path / "data" / "test" / "ref.stm").read_text().splitlines() == [
        "cen1-menk-b A menk 0.000 0.500 <O,M> GO",
        "cen2-menk-b A menk 0.000 0.500 <O,M> GO ON",
    ]
    assert (tmp_path / "data" / "lexicon.txt").read_text() == "GO G OW\nGO G UW\nON AA N\n"
    assert (tmp_path / "data" / "lm" / "train.txt").read_text() == "GO\nGO ON\n", "dev is held out of the LM"


def test_every_form_of_the_source_gives_the_same(tree: Path, tmp_path: Path) -> None:
    outputs = []
    for number, form in enumerate([tree, tree.parent, pack(tree, "gz"), pack(tree, "xz")]):
        an4.prepare(tmp_path / str(number), data_dir=form)
        outputs.append(snapshot(tmp_path / str(number)))
    assert all(output == outputs[0] for output in outputs) and len(outputs[0]) > 20


def test_an_archive_is_found_in_its_folder(tree: Path) -> None:
    archive = pack(tree, "xz")
    tree.rename(tree.parent / "elsewhere")
    assert find_source(archive.parent) == archive


def change_file(name: str, change: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    """Returns a function that changes one file of the tree, or removes it if the change is None."""

    def apply(tree: Path) -> None:
        contents = change((tree / name).read_bytes())
        (tree / name).unlink()
        if contents is not None:
            (tree / name).write_bytes(contents)

    return apply


def without_first_line(contents: bytes) -> bytes:
    return contents.split(b"\n", 1)[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_file("wav/an4_clstk/fash/an1-fash-b.raw", lambda _: None), "an1-fash-b.raw: listed .* missing"),
        (change_file("wav/an4_clstk/fash/an1-fash-b.raw", lambda _: b""), "an1-fash-b.raw: 0 bytes"),
        (change_file("wav/an4_clstk/fash/an1-fash-b.raw", lambda raw: raw[:-1]), "not a whole number"),
        (change_file("etc/an4_train.transcription", without_first_line), "no transcript for 'an1-fash-b'"),
        (change_file("etc/an4_train.fileids", without_first_line), "does not list 'an1-fash-b'"),
        (change_file("etc/an4_train.fileids", lambda text: b"\nx\n" + text), "fileids:2: 'x'"),
        (change_file("etc/an4_test.transcription", lambda text: text + b"GO GO\n"), "transcription:3: 'GO GO'"),
        (change_file("etc/an4_test.transcription", lambda text: text + text), "transcription:3: a second transcript"),
        (change_file("etc/an4_test.transcription", lambda text: text.replace(b"GO", b"G\xd6")), "not UTF-8"),
        (change_file("etc/an4_test.transcription", lambda text: text.replace(b"ON", b"ON ON")), "4 test words"),
        (change_file("etc/an4.dic", lambda _: None), "an4.dic: missing"),
        (change_file("etc/an4.dic", lambda text: text + b"ALONE\n"), "an4.dic:4: 'ALONE' has no pronunciation"),
        (change_file("etc/an4.ug.lm", lambda _: None), "an4.ug.lm: missing"),
    ],
)
def test_a_damaged_corpus_is_refused(tree: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(tree)
    with pytest.raises(InputError, match=message):
        an4.prepare(tmp_path / "data", data_dir=tree)


def test_little_endian_samples_are_refused(tree: Path, tmp_path: Path) -> None:
    for path in tree.glob("wav/*/*/*.raw"):
        path.write_bytes(np.frombuffer(path.read_bytes(), ">i2").astype("<i2").tobytes())
    with pytest.raises(InputError, match="full-scale noise"):
        an4.prepare(tmp_path / "data", data_dir=tree)


@pytest.mark.parametrize("compression", ["gz", "xz"])
def test_cut_or_changed_archives_are_refused(tree: Path, tmp_path: Path, compression: str) -> None:
    archive = pack(tree, compression)
    complete, dice = archive.read_bytes(), random.Random(0)
    for trial in range(10):
        damaged = bytearray(complete[: dice.randrange(len(complete) - 600)])
        for _ in range(trial):
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        archive.write_bytes(damaged)
        with pytest.raises(InputError):
            an4.prepare(tmp_path / "data", data_dir=archive)


def test_an_archive_writes_nothing_outside(tree: Path, tmp_path: Path) -> None:
    archive = tree.parent / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(tree, "an4")
        for name in ("../../wav/evil/x/an9-x-b.raw", "/wav/evil/../../../../an9-x-b.raw", "wav/evil/../an9-x-b.raw"):
            member = tarfile.TarInfo(name)
            member.size = 16000
            tar.addfile(member, io.BytesIO(samples(0).astype(">i2").tobytes()))
    before = {path for path in tmp_path.rglob("*") if "data" not in path.parts}
    with pytest.raises(InputError, match="not a path of the corpus"):
        an4.prepare(tmp_path / "deep" / "er" / "data", data_dir=archive)
    written = {p for p in tmp_path.rglob("*") if p not in before and p.is_file()}
    assert all((tmp_path / "deep" / "er" / "data" / "wav") in path.parents for path in written)


@pytest.mark.parametrize("name", ["none", "empty"])
def test_a_folder_without_the_corpus_says_what_to_get(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"an4_raw.bigendian.tar.gz"):
        an4.prepare(tmp_path / "data", data_dir=tmp_path / name)


def test_without_a_folder_the_archive_is_downloaded(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(an4, "URL", pack(tree, "gz").as_uri())
    monkeypatch.setattr(an4, "DIGEST", digest_of(tree))
    an4.prepare(tmp_path / "data", data_dir=None)
    assert len(read_supervisions(tmp_path / "data", "test")) == 2
    assert not list((tmp_path / "data").glob("*.tar.*"))


def digest_of(tree: Path) -> str:
    return digest({name: hashlib.sha256(contents).hexdigest() for name, contents in read_source(tree)})


def test_a_download_of_other_contents_is_refused(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(an4, "DIGEST", digest_of(tree))
    raw = tree / "wav/an4_clstk/fash/an1-fash-b.raw"
    contents = bytearray(raw.read_bytes())
    contents[1001] ^= 1
    raw.write_bytes(contents)
    monkeypatch.setattr(an4, "URL", pack(tree, "gz").as_uri())
    with pytest.raises(InputError, match="not those of the official corpus"):
        an4.prepare(tmp_path / "data", data_dir=None)
    assert not list((tmp_path / "data").glob("*.tar.*"))


@pytest.mark.parametrize("name", ["an4/wav/a/b/zeros.raw", "padding"])
def test_an_archive_that_unpacks_without_end_is_refused(tree: Path, tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(source, "MAX_BYTES", 1_000_000)
    archive = tree.parent / "bomb.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 2_000_000
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(InputError, match="unpacks to more than 1000000 bytes"):
        an4.prepare(tmp_path / "data", data_dir=archive)


def test_a_damaged_download_is_not_kept(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = pack(tree, "gz")
    archive.write_bytes(archive.read_bytes()[:2000])
    monkeypatch.setattr(an4, "URL", archive.as_uri())
    with pytest.raises(InputError, match="damaged"):
        an4.prepare(tmp_path / "data", data_dir=None)
    assert not list((tmp_path / "data").glob("*.tar.*"))


def test_an_unreachable_site_says_what_to_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(an4, "URL", "http://127.0.0.1:9/an4.tar.gz")
    with pytest.raises(InputError, match="--data-dir"):
        an4.prepare(tmp_path / "data", data_dir=None)


def test_pronunciation_variants_lose_their_numbers() -> None:
    assert read_lexicon({"etc/an4.dic": b"B B IY\nA(2) EY\nA AH\nA(10) AA\n"}) == ["A AA", "A AH", "A EY", "B B IY"]
