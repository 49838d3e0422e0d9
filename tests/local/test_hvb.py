"""recipes/hvb on generated speech in the corpus' layout: to word error rates, splits, times, and what is missing."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from asr_am.data.manifests import read_supervisions
from asr_am.errors import InputError
from local.hvb.calls import Segment, Side, read_sides, split_speakers, usable
from local.hvb.cut import choose_start
from local.hvb.prepare import prepare, stamp
from tests.local.test_librispeech import served
from tests.local.test_swbd import TINY
from tests.support.configurations import run_stages
from tests.support.hvb_audio import write_audio

PHONES = {
    "hello": "HH AH L OW", "bank": "B AE NG K", "card": "K AA R D", "my": "M AY", "lost": "L AO S T",
    "please": "P L IY Z", "help": "HH EH L P", "you": "Y UW", "thanks": "TH AE NG K S", "bye": "B AY",
}  # fmt: skip
OPTIONS = {"lexicon": None, "split": "hash", "start": "auto", "sampling_rate": 8000}
ODD_WORDS = {2: ["[noise]"], 4: ["[unintelligible]", "[kids]"], 5: ["<unk>"], 7: ["hel~"]}  # at the end of a turn
UNSCORABLE = ("[noise]", "", "[kids]", "<unk>", "[unintelligible]")  # whole segments
DELAY = 2050  # milliseconds from the begin of an agent's recording to that of the conversation


def write_call(root: Path, number: int, agent: int, caller: int, turns: int = 8) -> None:
    """Writes a call whose agent's recording begins DELAY before the conversation, with odd segments of real ones."""
    rng, rows, now = np.random.default_rng(number), [], 0
    for index in range(turns):
        words = list(rng.choice(list(PHONES), rng.integers(4, 6)))
        duration = 90 * sum(len(PHONES[word].split()) for word in words)
        text = " ".join([*words, *ODD_WORDS.get(index, [])])
        rows.append(_row("agent" if index % 2 == 0 else "caller", now, duration, text))
        now += duration + 1000
    for index, text in enumerate(UNSCORABLE):
        rows.append(_row("caller", now - 900 + 100 * index, 90, text))
    about = {"agent": {"speaker_id": agent}, "caller": {"speaker_id": caller}, "sid": f"{number:016x}"}
    for name, content in (("transcript", rows), ("metadata", about)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / f"{number:016x}.json").write_text(json.dumps(content, indent=4))


def _row(role: str, start: int, duration: int, text: str) -> dict[str, object]:
    offset = start + (DELAY if role == "agent" else 0)
    return {
        "channel_index": 2 if role == "agent" else 1, "duration_ms": duration, "human_transcript": text,
        "offset_ms": offset, "speaker_role": role, "start_ms": start, "transcript": "hi",
    }  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hvb")
    for number in range(14):
        write_call(folder / "repo/data", number, agent=number % 7, caller=(number + 1 + number // 7) % 7)
    write_audio(folder / "repo/data", PHONES)
    (folder / "lexicon.txt").write_text("".join(f"{word.upper()} {phones}\n" for word, phones in PHONES.items()))
    return folder


def test_the_corpus_ends_in_word_error_rates(corpus: Path, tmp_path: Path) -> None:
    tiny = [option for option in TINY if not option.startswith("corpus")]
    lexicon = f"corpus.prepare.lexicon={corpus / 'lexicon.txt'}"
    given = ["corpus=hvb", f"data_dir={corpus / 'repo'}", f"exp={tmp_path}", lexicon, *tiny, "systems=[tri]"]
    run_stages(*given, stages=("data", "lang", "features", "align", "decode", "score"))
    found = json.loads((tmp_path / "hvb/score/tri_kn3/wer.json").read_text())
    assert found["agent"]["words"] + found["caller"]["words"] == found["all"]["words"] > 40
    assert found["all"]["wer"] < 60
    sets = {name: list(read_supervisions(tmp_path / "hvb/data", name)) for name in ("train", "dev", "test")}
    speakers = [{segment.speaker for segment in segments} for segments in sets.values()]
    assert all(speakers) and sum(map(len, speakers)) == len(set().union(*speakers)) == 7
    whole = {text for text in UNSCORABLE if text}
    assert whole == {segment.text for segment in sets["train"]} & {*UNSCORABLE}
    assert not {segment.text for name in ("dev", "test") for segment in sets[name]} & {*UNSCORABLE}
    reference = (tmp_path / "hvb/data/test/ref.stm").read_text().lower()
    assert "[" not in reference
    assert "<unk>\n" in reference and " hel-\n" in reference


def test_segments_begin_where_the_audio_is_louder(corpus: Path, tmp_path: Path) -> None:
    sides = read_sides(corpus / "repo/data")
    assert choose_start(sides) == "offset_ms"
    swapped = [
        Side(s.name, s.speaker, s.audio, tuple(
            Segment({"offset_ms": x.starts["start_ms"], "start_ms": x.starts["offset_ms"]}, x.duration, x.words)
            for x in s.segments
        )) for s in sides
    ]  # fmt: skip
    assert choose_start(swapped) == "start_ms"
    assert choose_start([side for side in sides if side.name.startswith("caller")]) == "offset_ms"
    half = [side for side in sides if side.name.startswith("agent")]
    with pytest.raises(InputError, match=r"neither at offset_ms nor at start_ms .*corpus.prepare.start"):
        choose_start([*half[:7], *(side for side in swapped if side.name in {s.name for s in half[7:]})])


def test_published_splits() -> None:
    words = ("one", "two", "three", "four")
    segments = tuple(Segment({"offset_ms": 0, "start_ms": 0}, duration, words) for duration in [99] + 11 * [100])
    sides = [Side(f"agent_{n}", n, Path("x.wav"), segments[: 11 if n == 7 else 12]) for n in range(1, 41)]
    assert {side.speaker for side in usable(sides, "creators")} == set(range(1, 41))
    assert {side.speaker for side in usable(sides, "espnet")} == set(range(1, 41)) - {7}  # ten of 0.1 s or more
    creators = split_speakers(usable(sides, "creators"), "creators")
    assert creators["test"] == {8, 15, 29, 39}  # of numpy's RandomState(42)
    espnet = split_speakers(usable(sides, "espnet"), "espnet")
    assert espnet["test"] == {10, 16, 22, 23, 25}  # of random.seed(42)
    assert not usable([Side("agent_1", 1, Path("x.wav"), (Segment({}, 500, words[:3]),) * 20)], "creators")
    own = split_speakers(sides, "hash")
    assert {name: len(members) for name, members in own.items()} == {"test": 4, "dev": 4, "train": 32}
    assert own["test"] <= split_speakers(sides[:20], "hash")["test"] | {*range(21, 41)}
    with pytest.raises(InputError, match="2 speakers leave none for dev"):
        split_speakers(sides[:2], "espnet")


def test_the_corpus_is_downloaded(corpus: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(corpus / "lexicon.txt", site)
    with tarfile.open(site / "HEAD.tar.gz", "w:gz") as tar:
        tar.add(corpus / "repo", "gridspace-stanford-harper-valley-master")
    with served(site) as url:
        given = OPTIONS | {"url": f"{url}/HEAD.tar.gz", "lexicon_url": f"{url}/lexicon.txt"}
        prepare(tmp_path / "exp/data", data_dir=None, **given)
        assert len(list(read_supervisions(tmp_path / "exp/data", "test"))) > 5
        with pytest.raises(InputError, match=r"cannot be downloaded .*--data-dir"):
            prepare(tmp_path / "other/data", data_dir=None, **given | {"url": f"{url}/none"})
        with pytest.raises(InputError, match=r"cannot be downloaded .*--lexicon"):
            prepare(tmp_path / "third/data", data_dir=corpus / "repo", **given | {"lexicon_url": f"{url}/none"})


def test_the_same_folder_can_be_prepared_again(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "none.txt").touch()
    given = OPTIONS | {"data_dir": corpus / "repo", "start": "offset_ms"}
    with pytest.raises(InputError, match=r"lexicon\.txt"):
        prepare(tmp_path / "data", **given | {"lexicon": str(tmp_path / "none.txt")})
    prepare(tmp_path / "data", **given | {"lexicon": str(corpus / "lexicon.txt")})
    assert len(list(read_supervisions(tmp_path / "data", "test"))) > 5


def test_what_is_missing_is_one_line(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "repo", tmp_path / "repo")
    call = f"{3:016x}"

    def refused(message: str, **changes: object) -> None:
        given = OPTIONS | {"data_dir": tmp_path / "repo", "lexicon": str(corpus / "lexicon.txt")} | changes
        with pytest.raises(InputError, match=message) as caught:
            prepare(tmp_path / "data", **given)
        assert "\n" not in str(caught.value)

    refused("split=random: must be one of hash, creators, espnet", split="random")
    refused("start=now: must be one of auto", start="now")
    refused("lacks audio/agent, audio/caller, metadata, transcript", data_dir=tmp_path)
    transcript = tmp_path / "repo/data/transcript" / f"{call}.json"
    transcript.with_name(f"._{transcript.name}").write_bytes(b"\xff")
    said = transcript.read_text()
    transcript.write_text(said.replace('"[kids]"', "null"))
    refused("not a transcript of this corpus")
    transcript.write_text(said)
    audio = tmp_path / "repo/data/audio/agent" / f"{call}.wav"
    audio.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    refused("is a pointer of git-lfs")
    audio.unlink()
    refused(f"{call}.wav: cannot be read")
    (tmp_path / "repo/data/metadata" / f"{call}.json").write_text("{}")
    refused("not a transcript of this corpus with its metadata")
    (tmp_path / "repo/data/metadata" / f"{call}.json").write_text("{")
    refused("cannot be read as JSON")


def test_the_stamp_follows_the_files(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "repo", tmp_path / "repo")
    before = stamp(str(tmp_path / "repo"))
    assert before and stamp(None) == stamp("/nowhere") == ""
    next((tmp_path / "repo/data/metadata").iterdir()).write_text("{}")
    assert stamp(str(tmp_path / "repo")) != before
