"""lhotse manifests given to recipes/kaldi: every cut is used as lhotse plays it, refused or counted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import CutSet, MonoCut, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.augmentation import ReverbWithImpulseResponse
from lhotse.cut import Cut
from lhotse.utils import fastcopy

from asr_am.data import kaldi_audio
from asr_am.data.issue_counter import IssueCounter
from asr_am.errors import InputError
from local.kaldi.manifests import manifest_files, write_from_manifests
from tests.support.kaldi_corpus import RATE, noise


def recording(folder: Path, name: str, seconds: float = 2.0) -> Recording:
    path = folder / f"{name}.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, noise(len(name), seconds), RATE)
    return Recording.from_file(path, recording_id=name)


def spoken(of: Recording, name: str, text: str | None = "yes no", **changes: object) -> SupervisionSegment:
    fields = {"start": 0.0, "duration": of.duration, "channel": 0, "speaker": "amy"} | changes
    return SupervisionSegment(id=name, recording_id=of.id, text=text, **fields)


def cut_of(of: Recording, name: str, *segments: SupervisionSegment) -> MonoCut:
    return MonoCut(name, 0, of.duration, 0, recording=of, supervisions=list(segments))


def write_pair(folder: Path, recordings: list[Recording], segments: list[SupervisionSegment], name: str = "{}") -> None:
    RecordingSet.from_recordings(recordings).to_file(folder / f"{name.format('recordings')}.jsonl.gz")
    SupervisionSet.from_segments(segments).to_file(folder / f"{name.format('supervisions')}.jsonl.gz")


def converted(
    given: Path, root: Path | None = None
) -> tuple[dict[str, list[str]], dict[str, str], dict[str, tuple[str, ...]], dict[str, int]]:
    """Returns text, wav.scp, segments by id, and the counted issues."""
    issues = IssueCounter()
    out = write_from_manifests(manifest_files(given), given.parent / "out", issues, root)
    lines = {
        name: [line.split(" ") for line in (out / name).read_text(encoding="utf-8").split("\n")[:-1]]
        for name in ("text", "wav.scp", "segments")
    }
    text, audio, segments = ({line[0]: line[1:] for line in lines[name]} for name in lines)
    assert text.keys() == segments.keys()
    return (
        text,
        {name: path for name, (path,) in audio.items()},
        {n: tuple(s) for n, s in segments.items()},
        issues.counts,
    )


def from_cuts(folder: Path, *cuts: Cut) -> Path:
    CutSet.from_cuts(cuts).to_file(folder / "cuts.jsonl.gz")
    return folder / "cuts.jsonl.gz"


@pytest.mark.parametrize("separator", ["\n", "\r\n", "\t", "\v", "\f", "\u2028", "\u2029", "\x85", "\x1c", " \n "])
def test_separators_in_a_text_are_blanks(tmp_path: Path, separator: str) -> None:
    one = recording(tmp_path, "one")
    write_pair(tmp_path, [one], [spoken(one, "a", f"yes{separator}no"), spoken(one, "b", None)])
    text, _, _, issues = converted(tmp_path / "recordings.jsonl.gz")
    assert text == {"a": ["yes", "no"]}
    assert issues == {"supervision without a text: left out": 1}


def test_ids_that_repeat_are_made_unique_and_supervisions_shared_by_cuts_are_used_once(tmp_path: Path) -> None:
    one, two = recording(tmp_path, "one"), recording(tmp_path, "two")
    first, again, other = spoken(one, "0"), spoken(two, "0"), spoken(two, "only one", speaker="amy lee")
    given = from_cuts(tmp_path, cut_of(one, "a", first), cut_of(two, "b", again, other), cut_of(one, "c", first))
    text, audio, segments, issues = converted(given)
    assert list(text) == ["one-0", "only_one", "two-0"]
    assert {segments[name][0] for name in text} == {"one", "two"} == audio.keys()
    assert issues == {
        "supervision in several cuts: once is enough": 1,
        "supervision ids that are not unique: after the name of the recording": 2,
    }


def test_recordings_of_one_name_stay_two(tmp_path: Path) -> None:
    one, two = recording(tmp_path / "day1", "call"), recording(tmp_path / "day2", "call", 1.0)
    _, audio, segments, _ = converted(
        from_cuts(tmp_path, cut_of(one, "a", spoken(one, "a")), cut_of(two, "b", spoken(two, "b")))
    )
    assert audio == {"call": str(tmp_path / "day1/call.wav"), "call-2": str(tmp_path / "day2/call.wav")}
    assert (segments["a"][0], segments["b"][0]) == ("call", "call-2")


def test_what_is_not_one_plain_file_is_written_as_lhotse_plays_it(tmp_path: Path) -> None:
    one, two = recording(tmp_path, "one"), recording(tmp_path, "other")
    plain = cut_of(one, "plain", spoken(one, "a"))
    whole = [
        plain.mix(cut_of(two, "noise"), snr=10),
        plain.pad(duration=3.0),
        plain.append(cut_of(two, "second", spoken(two, "b"))),
        cut_of(one.perturb_speed(0.9), "slow", spoken(one.perturb_speed(0.9), "a")),
        plain.perturb_volume(0.5),
        plain.resample(8000),
    ]
    cuts = [cut if cut.id == "slow" else fastcopy(cut, id=f"cut{number}") for number, cut in enumerate(whole)]
    text, audio, segments, issues = converted(from_cuts(tmp_path, plain, *cuts))
    assert issues["cut that is not one file as it is: played by lhotse into a wav file"] == 6
    assert audio["one"] == str(tmp_path / "one.wav") and len(audio) == 7
    for cut in cuts:
        samples_N, rate = soundfile.read(audio[cut.id], dtype="float32")
        assert rate == cut.sampling_rate
        assert np.array_equal(samples_N, cut.load_audio()[0])
    assert segments["b"][1:] == ("2.0", "4.0", "0") and text["cut2-a"] == text["one-a"]
    assert len(text) == 8  # "a" of seven cuts, and "b"


def test_cuts_without_audio_or_beyond_it_are_counted(tmp_path: Path) -> None:
    one = recording(tmp_path, "one")
    window = cut_of(one, "window", spoken(one, "long")).truncate(offset=0.5, duration=1.0)
    slow = cut_of(one, "slow", spoken(one, "beyond", duration=3.0), spoken(one, "x")).perturb_volume(2.0)
    gone = cut_of(one, "gone", spoken(one, "lost"))
    gone = fastcopy(gone, recording=recording(tmp_path, "gone")).perturb_volume(0.5)
    (tmp_path / "gone.wav").unlink()
    text, audio, segments, issues = converted(from_cuts(tmp_path, window, slow, gone))
    assert segments["long"] == ("one", "0.0", "2.0", "0")
    assert text.keys() == {"long", slow.supervisions[1].id, gone.supervisions[0].id}
    assert issues["supervision that reaches beyond its cut: used whole, from its recording"] == 1
    assert issues["supervision that reaches beyond its cut, which is played: left out"] == 1
    assert issues["cut that lhotse cannot play: without audio"] == 1
    assert [Path(path).exists() for path in audio.values()].count(False) == 1  # which the preparation counts


def test_what_lhotse_would_run_fetch_or_make_up_is_refused(tmp_path: Path) -> None:
    one = recording(tmp_path, "one")
    proof = tmp_path / "proof"
    command = fastcopy(one, sources=[fastcopy(one.sources[0], type="command", source=f"touch {proof}; cat one.wav")])
    reverb = fastcopy(one, transforms=[ReverbWithImpulseResponse(rir=one.to_dict())])
    for audio, message in ((command, "of type 'command'"), (reverb, "ReverbWithImpulseResponse is not played here")):
        with pytest.raises(InputError, match=message):
            converted(from_cuts(tmp_path, cut_of(audio, "a", spoken(audio, "a"))))
        mixed = cut_of(one, "a", spoken(one, "a")).mix(cut_of(audio, "b"))
        with pytest.raises(InputError, match=message):
            converted(from_cuts(tmp_path, mixed))
    assert not proof.exists()


def test_relative_paths_begin_beside_the_manifest_where_the_user_stands_or_at_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kaldi_audio, "STARTED_IN", (tmp_path / "here",))
    folder = tmp_path / "data/manifests"
    folder.mkdir(parents=True)
    one = recording(tmp_path / "first", "one")
    relative = fastcopy(one, sources=[fastcopy(one.sources[0], source="audio/one.wav")])
    write_pair(folder, [relative], [spoken(one, "a")])
    places = [tmp_path / "here", tmp_path / "data", folder]
    for place in places:  # the later ones first
        soundfile.write(recording(place / "audio", "one").sources[0].source, noise(1), RATE)
        monkeypatch.setattr("local.kaldi.manifests.STARTED_IN", (tmp_path / "here",))
        _, audio, _, _ = converted(folder)
        assert audio == {"one": str(place / "audio/one.wav")}
    recording(tmp_path / "root/audio", "one")
    assert converted(folder, tmp_path / "root")[1] == {"one": str(tmp_path / "root/audio/one.wav")}


@pytest.mark.parametrize(
    "name", ["{}", "an4_{}_train", "{}_train", "libri-{}-dev", "corpus.{}.train", "librispeech_{}_dev-clean"]
)
def test_names_that_lhotse_gives_are_found(tmp_path: Path, name: str) -> None:
    one = recording(tmp_path, "one")
    write_pair(tmp_path, [one], [spoken(one, "a")], name)
    recordings, supervisions = (tmp_path / f"{name.format(kind)}.jsonl.gz" for kind in ("recordings", "supervisions"))
    for given in (tmp_path, recordings, supervisions):
        assert manifest_files(given) == [recordings, supervisions]
    supervisions.unlink()
    with pytest.raises(InputError, match=re.escape(f"{supervisions.name} is not beside it")):
        manifest_files(recordings)
    cuts = tmp_path / f"{name.format('cuts')}.jsonl.gz"
    from_cuts(tmp_path, cut_of(one, "a", spoken(one, "a"))).rename(cuts)
    assert manifest_files(tmp_path) == [cuts] == manifest_files(cuts)


def test_a_folder_with_several_sets_asks_for_one(tmp_path: Path) -> None:
    one = recording(tmp_path, "one")
    for part in ("train", "dev"):
        write_pair(tmp_path, [one], [spoken(one, "a")], "x_{}_" + part)
    with pytest.raises(InputError, match=r"has 2 manifests \(x_recordings_dev.jsonl.gz x_recordings_train.jsonl.gz\)"):
        manifest_files(tmp_path)
