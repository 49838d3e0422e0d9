"""What asr_am.show prints and draws about an utterance agrees with the files of the stages."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from asr_am import show
from asr_am.data.manifests import read_supervisions
from asr_am.decode.ctm import FRAME_SHIFT
from asr_am.decode.decode_set import decode_sets
from asr_am.decode.inspection import inspect
from asr_am.features.reader import FeatureReader
from asr_am.hmm.alignments import write_alignments
from asr_am.hmm.frames import FrameStore
from tests.support.decoding_corpus import OPTIONS, write_system

RUN = "mono_lm"
DEV, TRAIN = "devspk0-dev0-1", "trainspk1-train1-2"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns exp/<corpus> with a decoded system that has aligned the training set."""
    root = tmp_path_factory.mktemp("exp") / "noise"
    system = write_system(root)
    (root / "align").rename(root / "mono")
    (root / "align").mkdir()
    (root / "mono").rename(root / "align/mono")
    system = replace(system, align_dir=root / "align/mono")
    (root / "decode" / RUN).mkdir(parents=True)
    decode_sets(system, root / "data", root / "decode" / RUN, OPTIONS)
    return root


@pytest.fixture(scope="module")
def aligned(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy in which stage align has left the alignments of the training set."""
    copy = tmp_path_factory.mktemp("aligned") / "noise"
    shutil.copytree(root, copy)
    reader = FeatureReader(copy / "features", "mfcc", "train")
    frames = FrameStore.write(copy / "frames", reader.utterances, reader.__getitem__, "frames")
    labels = [inspect(copy / "decode" / RUN, copy / "data", name).labels_T for name in frames.utterances]
    write_alignments(copy / "align/mono/ali", "train", frames, np.concatenate(labels).astype(np.int32))  # type: ignore[arg-type]
    shutil.rmtree(copy / "frames")
    return copy


def printed(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert show.main(["--exp", str(root), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_an_utterance_is_printed_and_drawn(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(root, capsys, DEV, "--paths", "3")
    (segment,) = [segment for segment in read_supervisions(root / "data", "dev") if segment.id == DEV]
    text = "\n".join(lines)
    assert f"speaker     {segment.speaker}" in lines and "channel B, 1.00 to 1.90 s (0.90 s)" in text
    scale = json.loads((root / "decode" / RUN / "decode.json").read_text())["chosen"]
    assert f"LM weight {scale['lm']:g}, insertion penalty {scale['insertion']:g}" in text
    ctm = root / "decode" / RUN / f"ctm/dev_{scale['lm']:g}_{scale['insertion']:g}.ctm"
    chosen = [line.split()[2:] for line in ctm.read_text().splitlines() if line.split()[:2] == ["dev0", "B"]]
    begin = lines.index(next(line for line in lines if line.startswith("hypothesis: begin"))) + 1
    shown = [line.split() for line in lines[begin : lines.index("", begin)]]
    assert [word[3] for word in shown] == [word[2] for word in chosen] != []
    for (first, last, posterior, _), (start, length, _, confidence) in zip(shown, chosen, strict=True):
        assert float(first) + segment.start == pytest.approx(float(start), abs=0.006)
        assert float(last) - float(first) == pytest.approx(float(length), abs=0.006) and posterior == confidence
    hypothesis = next(line for line in lines if line.startswith("hypothesis  "))
    assert [word for word in hypothesis.split()[1:] if word != show.GAP] == [word[3] for word in shown]
    paths = [line.split() for line in lines if line[:4].strip().isdecimal()]
    assert [path[0] for path in paths] == ["1", "2", "3"] and paths[0][4:] == [word[3] for word in shown]
    costs = [float(path[1].lstrip("+")) for path in paths[1:]]
    assert costs == sorted(costs) and min(costs) >= 0.0
    weight, penalty = scale["lm"], scale["insertion"]
    total = [float(path[2]) + float(path[3]) / weight + penalty * len(path[4:]) for path in paths]
    assert [value - total[0] for value in total[1:]] == pytest.approx(costs, abs=0.02)
    assert (root / "show" / f"{DEV}.png").read_bytes().startswith(b"\x89PNG") and lines[-1].endswith(f"{DEV}.png")


def test_errors_are_marked_below_the_words() -> None:
    pairs = show.compare(["ONE", "TWO", "THREE", "FOUR"], ["ONE", "THREE", "FIVE", "SIX"])
    assert [show.error_of(pair) for pair in pairs] in (["", "D", "", "S", "I"], ["", "D", "", "I", "S"])
    reference, hypothesis, errors, counts = show.comparison_lines(pairs)
    assert reference.index("TWO") == hypothesis.index(show.GAP) == errors.index("D")
    assert "3 errors in 4 words (1 substituted, 1 deleted, 1 inserted)" in counts
    many = list(show.comparison_lines(show.compare(["WORD"] * 100, ["WORD"] * 99)))
    assert len(many) > 10 and max(map(len, many)) <= show.WIDTH
    assert " ".join(many).split().count("WORD") == 199


def test_an_utterance_that_is_not_decoded_by_the_stages_is_decoded_now(
    aligned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(aligned, capsys, TRAIN)
    text = "\n".join(lines)
    assert "(set train)" in text and "forced alignment (by stage align)" in text
    kept = inspect(aligned / "decode" / RUN, aligned / "data", DEV)
    now = inspect(aligned / "decode" / RUN, aligned / "data", DEV)
    archive = (aligned / "decode" / RUN / "lattices/dev.ark").rename(aligned / "away.ark")
    decoded_now = now.words
    archive.rename(aligned / "decode" / RUN / "lattices/dev.ark")
    assert kept.words == decoded_now != []


def test_alignments_become_ctm_and_textgrid_files(aligned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [Path(line) for line in printed(aligned, capsys, "--alignments")]
    folder = aligned / "show/alignments/mono"
    assert files == [folder / "train.words.ctm", folder / "train.phones.ctm", folder / "train"]
    words, phones = ([line.split() for line in path.read_text().splitlines()] for path in files[:2])
    segments = read_supervisions(aligned / "data", "train")
    assert len(words) == sum(len((segment.text or "").split()) for segment in segments)
    for segment in segments:
        side = [segment.recording_id, "AB"[segment.channel]]
        inside = {
            name: [row for row in rows if row[:2] == side and segment.start <= float(row[2]) < segment.end]
            for name, rows in (("words", words), ("phones", phones))
        }
        assert [row[4] for row in inside["words"]] == (segment.text or "").split()
        lengths = [float(row[3]) for row in inside["phones"]]
        assert sum(lengths) == pytest.approx(88 * FRAME_SHIFT) and min(lengths) >= 0.01
        begins = {row[2] for row in inside["phones"]}
        assert all(row[2] in begins for row in inside["words"])
        grid = (folder / "train" / f"{'-'.join(side)}.TextGrid").read_text()
        tiers = dict(zip(("words", "phones"), re.findall(r"(?s)name = .*?(?=item|\Z)", grid), strict=True))
        for name, tier in tiers.items():
            spans = re.findall(r'xmin = ([\d.]+)\n +xmax = ([\d.]+)\n +text = "(.*)"', tier)
            assert spans[0][0] == "0.000000" and all(a[1] == b[0] for a, b in pairwise(spans))  # no gaps
            begun = [(pytest.approx(float(begin), abs=0.006), label) for begin, _, label in spans if label]
            rows = [row for row in (words if name == "words" else phones) if row[:2] == side]
            assert [(float(row[2]), row[4]) for row in rows] == begun


def test_words_outside_the_lexicon_are_aligned_and_keep_their_names(root: Path) -> None:
    found = inspect(root / "decode" / RUN, root / "data", DEV)
    unknown = replace(found, segment=replace(found.segment, text="YES ELEVEN NO"))
    assert [word.word for word in unknown.aligned_words] == ["YES", "ELEVEN", "NO"]
    assert all(word.frames >= 3 for word in unknown.aligned_words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["devspk0-dev0-9"], "the nearest are devspk0-dev0-"),
        (["test1"], "the nearest are testspk1-test1-0 testspk1-test1-1 testspk1-test1-2"),
        ([DEV, "--system", "tri_lm"], f"not a decoding run of .*there are {RUN}"),
        (["--alignments", "--system", "tri"], "there are mono"),
    ],
)
def test_unknown_names_are_answered_with_known_ones(
    aligned: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert show.main(["--exp", str(aligned), *arguments]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_the_only_corpus_and_the_best_run_on_dev_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wer in (("mono_a", 30.0), ("tri_a", 10.0), ("tri_b", 20.0), ("new_a", None), ("tri_a.outdated", 5.0)):
        (tmp_path / "exp/one/decode" / name).mkdir(parents=True)
        (tmp_path / "exp/one/decode" / name / "system.json").touch()
        if wer is not None:
            (tmp_path / "exp/one/score" / name).mkdir(parents=True)
            (tmp_path / "exp/one/score" / name / "wer.json").write_text(json.dumps({"dev_wer": wer}))
    (tmp_path / "exp/one/data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert show.find_corpus(None) == show.find_corpus(Path("exp/one")) == Path("exp/one")
    assert show.find_run(Path("exp/one"), None).name == "tri_a"
    (tmp_path / "exp/two/data").mkdir(parents=True)
    with pytest.raises(show.InputError, match=r"choose one corpus with --exp .* exp/one, exp/two"):
        show.find_corpus(None)
