"""recipes/swbd on small copies of the LDC's discs: to word error rates, and what is missing."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from asr_am.data.manifests import read_recordings, read_supervisions
from asr_am.errors import InputError
from local.swbd.discs import DISCS
from local.swbd.hub5 import clean_stm, count_references, report_counts
from local.swbd.prepare import hold_out_calls, prepare, stamp
from local.swbd.text import Dictionary, fisher_segments, fisher_words, ms98_segments, ms98_words
from tests.local.test_librispeech import served
from tests.support.configurations import run_stages
from tests.support.ldc_discs import SPOKEN, write_discs

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "transcripts": None, "lexicon": None, "test": "hub5", "dev_hours": 0.004, "max_repeats": 300, "check_counts": False,
    "sampling_rate": 8000,
}  # fmt: skip
TINY = [
    "corpus=swbd", "align=triphone", "features=logmel", "nj=1", "logger=none", "train.threads=1", "train.workers=0",
    "corpus.prepare.check_counts=false", "corpus.prepare.dev_hours=0.004", "align.mono.iterations=6",
    "align.tri.iterations=3", "align.tri.realign=[2]", "align.tri.increase_until=2", "align.tri.leaves=100",
    "align.tri.gaussians=300", "model.layers=1", "model.cells=32", "model.dropout=0", "train.epochs=2",
    "schedule.warmup_batches=5", "schedule.base=0.01", "train.checkpoint_every=1000", "systems=[tri,nnet]",
    "decode.search.beam=8", "decode.search.lattice_beam=4", "decode.lm_weights=[8,12]",
    "decode.insertion_penalties=[0.0]", "decode.windows=['21/10']", "score.bootstrap=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def discs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_discs(tmp_path_factory.mktemp("discs"))


def folders(discs: Path) -> dict[str, str]:
    return {disc.option: str(discs / disc.option) for disc in DISCS}


@pytest.fixture(scope="module")
def exp(discs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exp")
    given = [f"corpus.prepare.{option}='{path}'" for option, path in folders(discs).items()]
    run_stages(f"exp={folder}", *TINY, *given)
    return folder / "swbd"


def test_discs_end_in_word_error_rates(exp: Path) -> None:
    for name in ("tri_fg", "blstm-local-b64-s1_fg"):
        found = json.loads((exp / "score" / name / "wer.json").read_text())
        assert found["swb"]["words"] + found["ch"]["words"] == found["all"]["words"] > 40
        assert found["all"]["wer"] < 60, f"{name} recognised next to nothing"


def test_sets_of_the_discs(exp: Path, discs: Path) -> None:
    sets = {name: list(read_supervisions(exp / "data", name)) for name in ("train", "dev", "test")}
    assert all(
        segment.speaker == f"{segment.recording_id}-{'AB'[segment.channel]}" for s in sets.values() for segment in s
    )
    calls = {name: {segment.recording_id for segment in segments} for name, segments in sets.items()}
    assert (
        len(calls["dev"]) == 2 and not calls["dev"] & calls["train"] and all(c.startswith("sw0") for c in calls["dev"])
    )
    assert {"fe_03_00001", "fe_03_00002", "fe_03_05852"} < calls["train"] and len(calls["train"]) == 11
    words = {word for segment in sets["train"] for word in segment.text.split()}
    assert words == (SPOKEN.keys() - {"TV"}) | {"t", "v", "[noise]"}
    assert sum(segment.recording_id.startswith("fe_03") for segment in sets["train"]) == 15  # 3 of 18 are uncertain
    lm = (exp / "data/lm/train.txt").read_text().splitlines()
    held = sum(len(list(sets[name])) for name in ("train", "dev"))
    assert len(lm) == held - len(sets["dev"]) + 3
    lexicon = set((exp / "data/lexicon.txt").read_text().splitlines())
    assert {"they dh eh", "they dh ey", "w d ah b ax l y uw", "f's eh f s", "v's v iy z"} <= lexicon
    assert "[laughter] LAU" in (exp / "data/nonspeech.txt").read_text()
    shortened = next(r for r in read_recordings(exp / "data", "train") if r.id == "fe_03_00001")
    plain = next(r for r in read_recordings(exp / "data", "test") if r.id == "sw_4390")
    assert Path(shortened.sources[0].source).is_relative_to(exp) and shortened.num_channels == 2
    assert Path(plain.sources[0].source).is_relative_to(discs) and plain.num_channels == 2


def test_the_reference_is_nists(exp: Path, discs: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = (exp / "data/test/ref.stm").read_text()
    assert "aside" not in reference.lower() and "((" not in reference and "(%HESITATION)" in reference
    counts = count_references(reference.splitlines(), exp / "data/en.glm", "hub5")
    assert counts["all"][0] == 24 and counts["swb"][0] == 16 and counts["ch"][0] == 8  # without those it ignores
    segments = list(read_supervisions(exp / "data", "test"))
    assert len(segments) == 24
    first = min((s for s in segments if s.speaker == "sw_4390-A"), key=lambda s: s.start)
    stm = next(line.split() for line in reference.splitlines() if line.startswith("sw_4390 A"))
    assert first.start == float(stm[3]) and first.end == pytest.approx(float(stm[4]) + 0.1)  # context
    with caplog.at_level(logging.INFO):
        report_counts(counts, "hub5", check=False)
    assert f"hub5 ch: 8 segments, {counts['ch'][1]} words (official 2628 and 21594)" in caplog.text
    with pytest.raises(InputError, match=r"24 segments instead of 4459 .*check_counts=false"):
        report_counts(counts, "hub5", check=True)


def test_rt03_is_another_test_set(discs: Path, tmp_path: Path) -> None:
    only = {name: folders(discs)[name] for name in ("swbd", "rt03")}
    prepare(tmp_path / "data", **{**OPTIONS, "test": "rt03"}, **only)
    found = list(read_supervisions(tmp_path / "data", "test"))
    assert len(found) == 12 and {segment.recording_id for segment in found} == {"sw_30000", "fsh_60262"}
    assert " A " in (tmp_path / "data/test/ref.stm").read_text()


def test_the_same_folder_can_be_prepared_again(discs: Path, tmp_path: Path) -> None:
    for _ in range(2):
        prepare(tmp_path / "data", **OPTIONS, **folders(discs))
    assert len(list(read_supervisions(tmp_path / "data", "test"))) > 0


@pytest.mark.parametrize("disc", DISCS, ids=lambda disc: disc.option)
def test_a_missing_disc_is_one_line(discs: Path, tmp_path: Path, disc: object) -> None:
    def refused(given: dict[str, object]) -> str:
        with pytest.raises(InputError) as caught:
            prepare(tmp_path / "data", **given)
        assert "\n" not in str(caught.value) and not (tmp_path / "data").exists()
        return str(caught.value)

    test = {"test": "rt03"} if disc.option == "rt03" else {}
    optional = disc.option.startswith("fisher")
    if disc.option.endswith("_speech"):
        prepare(tmp_path / "text only", **OPTIONS, **folders(discs) | {disc.option: None})
    else:
        message = refused(OPTIONS | folders(discs) | {disc.option: None} | test)
        assert f"{disc.number} (" in message and f"--{disc.option.replace('_', '-')} DIR) is missing" in message
    (tmp_path / "empty").mkdir()
    message = refused(OPTIONS | folders(discs) | {disc.option: str(tmp_path / "empty")} | test)
    assert disc.number in message and ("holds no" in message or "lacks" in message)
    assert optional or disc.number in refused(OPTIONS | folders(discs) | {disc.option: "/nowhere"} | test)


def test_everything_that_is_missing_is_named_at_once(discs: Path, tmp_path: Path) -> None:
    root = tmp_path / "discs"
    shutil.copytree(discs, root)
    (root / "eval2000/hub5e_00/english/hub5e_00.pem").unlink()
    (root / "eval2000_text/2000_hub5_eng_eval_tr/reference/en20000405_hub5.glm").unlink()
    (root / "fisher2_speech/fe_03_p2_sph1/audio/058/fe_03_05852.sph").unlink()
    (root / "swbd/transcriptions/swb_ms98_transcriptions/sw-ms98-dict.text").unlink()
    with pytest.raises(InputError) as caught:
        prepare(tmp_path / "data", **OPTIONS, **folders(root))
    for name in ("hub5e_00.pem", "en20000405_hub5.glm", "LDC2005S13", "sw-ms98-dict.text"):
        assert name in str(caught.value)
    (root / "swbd/transcriptions/swb_ms98_transcriptions/sw-ms98-dict.text").touch()
    shutil.copytree(discs, root, dirs_exist_ok=True)
    (root / "eval2000/hub5e_00/english/sw_4390.sph").unlink()
    with pytest.raises(InputError, match=r"sw_4390.sph: missing beside"):
        prepare(tmp_path / "data", **OPTIONS, **folders(root))


def test_the_transcripts_are_downloaded(discs: Path, tmp_path: Path) -> None:
    site, audio = tmp_path / "site", tmp_path / "swbd"
    shutil.copytree(discs / "swbd", audio, ignore=shutil.ignore_patterns("transcriptions"))
    site.mkdir()
    with tarfile.open(site / "ms98.tar.gz", "w:gz") as tar:
        tar.add(discs / "swbd/transcriptions/swb_ms98_transcriptions", "swb_ms98_transcriptions")
    given = OPTIONS | {name: folders(discs)[name] for name in ("eval2000", "eval2000_text")} | {"swbd": str(audio)}
    with served(site) as url:
        prepare(tmp_path / "exp/data", **given, url=f"{url}/ms98.tar.gz")
        with pytest.raises(InputError, match=r"cannot be downloaded .*--transcripts"):
            prepare(tmp_path / "other/data", **given, url=f"{url}/none.tar.gz")
    assert len(list(read_supervisions(tmp_path / "exp/data", "train"))) == 80


def test_words_are_those_of_the_field(tmp_path: Path) -> None:
    (tmp_path / "dict").write_text("# comment\n\nIBM ay b iy eh m\nIBMs ay b iy eh m z\nNASA n ae s ax\nI ay\n")
    acronyms = Dictionary(tmp_path / "dict").acronyms
    assert acronyms == {"IBM": ["i", "b", "m"], "IBMs": ["i", "b", "m's"]}

    def ms98(text: str) -> str:
        return " ".join(ms98_words(text.split(), acronyms))

    assert (
        ms98("[laughter-yeah] they_1 ab[solute]- -[an]y [it'n/isn't] {yuppiedom}") == "yeah they ab- -y it'n yuppiedom"
    )
    assert ms98("[silence] <b_aside> I IBM's NASA [laughter] [vocalized-noise] IBMs") == (
        "i ibm's nasa [laughter] [vocalized-noise] i b m's"
    )
    assert ms98("[lem[guini]-/linguini] ammu[n]it-") == "lem- ammu-it-"
    fisher = (
        "(( i think )) t._v. [breath] 'cause a._b._c.'s, 'em 'kay' <german (( ja )) > non-stop -- [mn] [laugh] *huh"
    )
    assert " ".join(fisher_words(fisher)) == (
        "i think t v [noise] cause a b c's -em kay non stop [vocalized-noise] [laughter] huh"
    )


def test_dev_is_held_out_by_call() -> None:
    calls = {f"sw0{number}": 300.0 for number in range(2000, 2100)}
    held = hold_out_calls(calls, 3000.0)
    assert len(held) == 10 and held < hold_out_calls(calls, 6000.0)
    assert len(hold_out_calls(calls, 1e9)) == 25
    with pytest.raises(InputError, match="too few to hold out"):
        hold_out_calls({"sw02001": 1.0, "sw02002": 1.0}, 1.0)


def test_the_stamp_follows_the_discs(discs: Path, tmp_path: Path) -> None:
    before = stamp(transcripts=None, **folders(discs))
    assert before == stamp(transcripts=None, **folders(discs), lexicon="x")
    assert before != stamp(transcripts=None, **{**folders(discs), "rt03": None})
    assert before != stamp(transcripts=str(discs), **folders(discs))


def test_run_sh_names_the_discs() -> None:
    run = [str(ROOT / "recipes/swbd/run.sh")]
    helped = subprocess.run([*run, "--help"], capture_output=True, text=True, timeout=60)
    assert helped.returncode == 0 and "--fisher2-text DIR" in helped.stdout and "LDC2007S10" in helped.stdout
    refused = subprocess.run([*run, "--swbd", "/nowhere"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "--swbd: '/nowhere' does not exist" in refused.stderr


def test_times_that_are_none_are_told(tmp_path: Path) -> None:
    path = tmp_path / "sw2001A-ms98-a-trans.text"
    path.write_text("sw2001A-ms98-a-0001 0 0.5 yes\nsw2001A-ms98-a-0002 nan inf no\n")
    with pytest.raises(InputError, match=r"trans\.text:2: not"):
        list(ms98_segments([path]))
    (tmp_path / "fe_03_00001.txt").write_text("1.2.3 4 A: yes\n")
    with pytest.raises(InputError, match=r"fe_03_00001\.txt:1: not"):
        list(fisher_segments([tmp_path / "fe_03_00001.txt"]))
    (tmp_path / "ref.stm").write_text("sw_1 A x 0 1 <O> yes\nsw_1 A x 2 y <O> no\n")
    with pytest.raises(InputError, match=r"ref\.stm:2: could not convert string to float: 'y', as a time"):
        clean_stm([tmp_path / "ref.stm"])
