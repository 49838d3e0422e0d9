"""LibriSpeech's folders as data directory: names, speakers, subsets, downloads and what is missing."""

from __future__ import annotations

import http.server
import tarfile
import threading
from pathlib import Path

import pytest
import soundfile

from asr_am.data.manifests import read_recordings, read_supervisions
from asr_am.errors import InputError
from local.librispeech.prepare import prepare, stamp
from tests.support.kaldi_corpus import LEXICON, noise

ARPA = "\\data\\\nngram 1=6\n\\1-grams:\n-99 <s>\n-1 </s>\n-1 YES\n-1 NO\n-1 ONE\n-1 TWO\n\\end\\\n"
OPTIONS = {"sampling_rate": 16000, "url": "http://127.0.0.1:9"}  # nothing listens on port 9
SETS = {"train": ["train-clean-5"], "dev": [], "test": ["dev-clean-2"]}


def write_part(root: Path, part: str, speakers: list[str]) -> None:
    for speaker in speakers:
        chapter = root / part / speaker / "7"
        chapter.mkdir(parents=True)
        lines = []
        for number, words in enumerate(["YES NO", "ONE TWO", "NO"]):
            name = f"{speaker}-7-{number:04d}"
            soundfile.write(chapter / f"{name}.flac", noise(number + int(speaker)), 16000)
            lines.append(f"{name} {words}\n")
        (chapter / f"{speaker}-7.trans.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus") / "LibriSpeech"
    write_part(root, "train-clean-5", [str(speaker) for speaker in range(100, 112)])
    write_part(root, "dev-clean-2", ["31", "32"])
    rows = [f"{speaker}  | F | train-clean-5 | 8.02 | Someone\n" for speaker in range(100, 112)]
    (root / "SPEAKERS.TXT").write_text(
        ";ID |SEX| SUBSET |MINUTES| NAME\n" + "".join(rows) + "31 | M | dev-clean-2 | 8 | A\n"
    )
    (root.parent / "lexicon.txt").write_text(LEXICON)
    (root.parent / "lm.arpa").write_text(ARPA)
    return root.parent


def language(corpus: Path) -> dict[str, str]:
    return {"lexicon": str(corpus / "lexicon.txt"), "arpa": str(corpus / "lm.arpa")}


@pytest.mark.parametrize("below", ["", "LibriSpeech"])
def test_parts_become_sets(corpus: Path, tmp_path: Path, below: str) -> None:
    prepare(tmp_path / "data", data_dir=corpus / below, **SETS, **language(corpus), **OPTIONS)
    sets = {name: read_supervisions(tmp_path / "data", name) for name in ("train", "dev", "test")}
    assert {segment.speaker for segment in sets["test"]} == {"31", "32"}
    assert sorted(segment.text for segment in sets["test"]) == ["NO", "NO", "ONE TWO", "ONE TWO", "YES NO", "YES NO"]
    assert {segment.gender for segment in sets["test"] if segment.speaker == "31"} == {"M"}
    assert all(segment.recording_id.startswith("dev-clean-2_") for segment in sets["test"])
    speakers = [{segment.speaker for segment in sets[name]} for name in ("train", "dev")]
    assert len(speakers[1]) >= 2 and not speakers[0] & speakers[1] and len(speakers[0] | speakers[1]) == 12
    source = next(iter(read_recordings(tmp_path / "data", "test"))).sources[0]
    assert Path(source.source).is_relative_to(corpus / "LibriSpeech")  # the audio stays in place


def test_the_same_folder_can_be_prepared_again(corpus: Path, tmp_path: Path) -> None:
    given = SETS | language(corpus) | OPTIONS
    with pytest.raises(InputError, match=r"none\.txt"):
        prepare(tmp_path / "data", data_dir=corpus, **given | {"lexicon": str(tmp_path / "none.txt")})
    prepare(tmp_path / "data", data_dir=corpus, **given)
    assert len(list(read_supervisions(tmp_path / "data", "test"))) == 6


def test_parts_are_downloaded(corpus: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    for part in ("train-clean-5", "dev-clean-2"):
        (site / "31").mkdir(parents=True, exist_ok=True)
        with tarfile.open(site / "31" / f"{part}.tar.gz", "w:gz") as tar:
            tar.add(corpus / "LibriSpeech" / part, f"LibriSpeech/{part}")
    with served(site) as url:
        prepare(tmp_path / "exp/data", data_dir=None, **SETS, **language(corpus), **OPTIONS | {"url": url})
        assert len(list(read_supervisions(tmp_path / "exp/data", "test"))) == 6
        with pytest.raises(InputError, match=r"librispeech-lexicon.txt: cannot be downloaded .*--lexicon and --arpa"):
            prepare(
                tmp_path / "exp/again", data_dir=None, **SETS, **language(corpus) | {"lexicon": None},
                **OPTIONS | {"url": url},
            )  # fmt: skip


def test_an_archive_writes_nothing_outside_its_folder(corpus: Path, tmp_path: Path) -> None:
    site, outside = tmp_path / "site/31", tmp_path / "outside"
    site.mkdir(parents=True)
    outside.mkdir()
    link = tarfile.TarInfo("LibriSpeech/dev-clean-2/31")
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    for part in ("train-clean-5", "dev-clean-2"):
        with tarfile.open(site / f"{part}.tar.gz", "w:gz") as tar:
            if part == "dev-clean-2":
                tar.addfile(link)
            tar.add(corpus / "LibriSpeech" / part, f"LibriSpeech/{part}")
    refused = r"dev-clean-2.tar.gz: its member LibriSpeech/dev-clean-2/31 is refused"
    with served(site.parent) as url, pytest.raises(InputError, match=refused):
        prepare(tmp_path / "exp/data", data_dir=None, **SETS, **language(corpus), **OPTIONS | {"url": url})
    assert not list(outside.iterdir())


def test_a_damaged_archive_is_downloaded_again(corpus: Path, tmp_path: Path) -> None:
    site = tmp_path / "site/31"
    site.mkdir(parents=True)
    for part in ("train-clean-5", "dev-clean-2"):
        with tarfile.open(site / f"{part}.tar.gz", "w:gz") as tar:
            tar.add(corpus / "LibriSpeech" / part, f"LibriSpeech/{part}")
    whole = (site / "train-clean-5.tar.gz").read_bytes()
    with served(site.parent) as url:
        for data in (b"no archive", whole[: len(whole) // 2]):
            (site / "train-clean-5.tar.gz").write_bytes(data)
            with pytest.raises(InputError, match=r"cannot be unpacked .*The archive is removed"):
                prepare(tmp_path / "exp/data", data_dir=None, **SETS, **language(corpus), **OPTIONS | {"url": url})
        (site / "train-clean-5.tar.gz").write_bytes(whole)
        prepare(tmp_path / "exp/data", data_dir=None, **SETS, **language(corpus), **OPTIONS | {"url": url})
    assert len(list(read_supervisions(tmp_path / "exp/data", "test"))) == 6


class served:
    """Serves a folder over HTTP on this host."""

    def __init__(self, folder: Path) -> None:
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: object, **options: object) -> None:
                super().__init__(*arguments, directory=str(folder), **options)  # type: ignore[arg-type]

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_what_is_missing_is_named(corpus: Path, tmp_path: Path) -> None:
    def refused(message: str, **changes: object) -> None:
        options = {"data_dir": corpus} | SETS | language(corpus) | OPTIONS | changes
        with pytest.raises(InputError, match=message):
            prepare(tmp_path / "data", **options)  # type: ignore[arg-type]

    refused(r"LibriSpeech: lacks test-clean; download it from .*--data-dir", test=["dev-clean-2", "test-clean"])
    refused("holds none of", data_dir=tmp_path)
    refused("'dev-cleam' is no part of LibriSpeech", test=["dev-cleam"])
    refused("train-clean-5 is also in train", test=["train-clean-5"])
    refused("corpus.prepare.test: names no part", test=[])
    refused("cannot be downloaded", data_dir=None)


def test_a_transcript_without_audio(corpus: Path, tmp_path: Path) -> None:
    write_part(tmp_path, "dev-clean-2", ["31"])
    write_part(tmp_path, "train-clean-5", ["41", "42"])
    (tmp_path / "dev-clean-2/31/7/31-7-0001.flac").unlink()
    (tmp_path / "dev-clean-2/31/7/._31-7.trans.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"31-7.trans.txt:2: 31-7-0001.flac is missing"):
        prepare(tmp_path / "data", data_dir=tmp_path, **SETS, **language(corpus), **OPTIONS)
    (tmp_path / "dev-clean-2/31/7/31-7.trans.txt").write_text("31-7-0000 YES\n\n31/7 NO\n")
    with pytest.raises(InputError, match=r"31-7.trans.txt:3: 31/7 is no name of an utterance"):
        prepare(tmp_path / "other", data_dir=tmp_path, **SETS, **language(corpus), **OPTIONS)


def test_the_stamp_follows_the_audio(tmp_path: Path) -> None:
    write_part(tmp_path, "dev-clean-2", ["31"])
    sets = {"train": [], "dev": [], "test": ["dev-clean-2"]}
    before = stamp(str(tmp_path), **sets)
    assert before and before == stamp(str(tmp_path), **sets, lexicon="x")
    (tmp_path / "dev-clean-2/31/7/31-7-0001.flac").write_bytes(b"other")
    assert stamp(str(tmp_path), **sets) != before
    assert stamp(None, **sets) == stamp(str(tmp_path / "nowhere"), **sets) == ""
