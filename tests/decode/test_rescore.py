"""Rescoring of a decoding run on a small corpus by a recurrent LM with random weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr_am.decode.ctm import ctm_name
from asr_am.decode.decode_set import decode_sets
from asr_am.decode.dev_choice import DevChoice, read_reference
from asr_am.decode.lattice import LmScale
from asr_am.decode.lattice_rescore import LatticeOptions
from asr_am.decode.lm_mixture import LmMixture, fit_weight
from asr_am.decode.lm_rescore import rescore, rescore_lattices
from asr_am.decode.search import SearchOptions
from asr_am.decode.shards import DecodeOptions
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.lang.arpa import perplexity, read_arpa, write_arpa
from asr_am.lang.lang_dir import Lang, vocabulary
from asr_am.lang.ngram import estimate
from asr_am.lang.transcripts import read_transcripts
from asr_am.lang.units import make_units
from asr_am.models.lm_file import load_lm, save_lm
from asr_am.models.lstm_lm import LstmLm, LstmLmOptions
from tests.support.decoding_corpus import write_system
from tests.support.nbest_reference import rescored_words

GRID = [LmScale(5.0), LmScale(10.0), LmScale(10.0, 0.5), LmScale(20.0, -0.5)]
WIDE = LatticeOptions(words=100, beam=100.0)  # whole histories


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a corpus with a decoding run in run/ and a recurrent LM in lstm.pt."""
    folder = tmp_path_factory.mktemp("corpus")
    system = write_system(folder)
    (folder / "run").mkdir()
    options = DecodeOptions(SearchOptions(beam=10.0, lattice_beam=2.0), tuple(GRID), nbest=3)
    decode_sets(system, folder / "data", folder / "run", options)
    words = vocabulary(Lang.load(folder / "lang").words)
    units = make_units("word", words, Counter(words), 0)
    torch.manual_seed(1)
    lm = LstmLm(LstmLmOptions(embedding=8, cells=16, projection=8), len(units))
    torch.nn.init.normal_(lm.output.weight, std=4.0)
    save_lm(folder / "lstm.pt", lm, units, {})
    return folder


def mixture(root: Path, weight: float) -> LmMixture:
    lm, units, _ = load_lm(root / "lstm.pt")
    return LmMixture(read_arpa(root / "lm/lm.arpa"), lm, units, weight)


def ctm_words(path: Path) -> list[str]:
    return sorted(line.split()[4] for line in path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("scale", GRID, ids=str)
def test_the_ngram_alone_gives_the_words_of_the_decoder(root: Path, scale: LmScale) -> None:
    assert rescored_words(root / "run", "dev", mixture(root, 0.0), scale) == ctm_words(
        root / "run/ctm" / ctm_name("dev", scale)
    )


def test_the_recurrent_model_chooses_other_words(root: Path) -> None:
    words = [
        [rescored_words(root / "run", "test", mixture(root, weight), scale) for scale in GRID] for weight in (0, 1)
    ]
    assert words[0] != words[1]


def test_files_hold_the_best_sentences_with_their_times(root: Path, tmp_path: Path) -> None:
    rescore(root / "run", root / "data", root / "lm/lm.arpa", root / "lstm.pt", tmp_path, grid=GRID, how=WIDE, jobs=1)
    report, choice = json.loads((tmp_path / "rescore.json").read_text()), DevChoice.load(tmp_path)
    assert [path.name for path in (tmp_path / "ctm").glob("test*")] == [ctm_name("test", choice.scale)]
    for subset in ("dev", "test"):
        assert report[subset]["perplexity"]["mixture"] <= max(report[subset]["perplexity"].values())
    assert report["dev"]["perplexity"]["mixture"] <= min(report["dev"]["perplexity"].values()) * 1.0001
    reference = read_reference(root / "data", "dev")
    errors = [reference.score(tmp_path / "ctm" / ctm_name("dev", scale)).total.errors for scale in GRID]
    assert choice.errors == min(errors) == report["dev"]["errors"]
    for subset, scale in (*(("dev", scale) for scale in GRID), ("test", choice.scale)):
        found = ctm_words(tmp_path / "ctm" / ctm_name(subset, scale))
        assert found == rescored_words(root / "run", subset, mixture(root, report["weight"]), scale)
    lines = [line.split() for line in (tmp_path / "ctm" / ctm_name("test", choice.scale)).read_text().splitlines()]
    assert all(float(line[3]) > 0 and 0 < float(line[5]) <= 1 for line in lines)


def test_dev_may_have_another_ngram_than_test(root: Path, tmp_path: Path) -> None:
    write_arpa(estimate([["YES"], ["NO", "NO"]], {"YES", "NO", "ONE", "TWO"}, 1), tmp_path / "dev.arpa")
    perplexities = []
    for number, dev_arpa in enumerate((None, tmp_path / "dev.arpa")):
        out = tmp_path / str(number)
        out.mkdir()
        rescore(
            root / "run", root / "data", root / "lm/lm.arpa", root / "lstm.pt", out, grid=GRID, how=WIDE, jobs=1,
            dev_arpa=dev_arpa,
        )  # fmt: skip
        report = json.loads((out / "rescore.json").read_text())
        perplexities.append({subset: report[subset]["perplexity"] for subset in ("dev", "test")})
    same, other = perplexities
    assert same["test"]["ngram"] == other["test"]["ngram"] and same["dev"]["ngram"] != other["dev"]["ngram"]
    assert same["dev"]["lstm"] == other["dev"]["lstm"]


def test_words_that_the_ngram_lacks_do_not_count(root: Path) -> None:
    arpa = estimate([["YES"], ["NO", "NO"]], {"YES", "NO"}, 1)  # without ONE and TWO
    mixtures = {subset: replace(mixture(root, 0.5), arpa=arpa) for subset in ("dev", "test")}
    fitted, found = fit_weight(mixtures, root / "data", ("YES", "NO", "ONE", "TWO"))
    for subset in ("dev", "test"):
        sentences = [words for _, words in read_transcripts(root / "data", subset)]
        assert found[subset].ngram == pytest.approx(perplexity(arpa, sentences).perplexity)
    assert fitted["dev"].weight == fitted["test"].weight


def test_jobs_change_nothing(root: Path) -> None:
    one, two = (rescore_lattices(root / "run", "dev", mixture(root, 0.5), GRID, WIDE, jobs) for jobs in (1, 2))
    assert one == two


def test_damaged_or_missing_lattices(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"system.json: no such file.*run stage 7 \(decode\)"):
        rescore_lattices(tmp_path, "dev", mixture(root, 0.5), GRID, WIDE, 1)
    System.load(root / "run").save(tmp_path)
    with pytest.raises(InputError, match=r"dev.ark: cannot be read.*run stage 7 \(decode\) again"):
        rescore_lattices(tmp_path, "dev", mixture(root, 0.5), GRID, WIDE, 1)
    (tmp_path / "lattices").mkdir()
    whole = (root / "run/lattices/dev.ark").read_bytes()
    for data, message in ((whole[:-7], "damaged at byte"), (b"", "has no lattices")):
        (tmp_path / "lattices/dev.ark").write_bytes(data)
        with pytest.raises(InputError, match=message):
            rescore_lattices(tmp_path, "dev", mixture(root, 0.5), GRID, WIDE, 1)


def test_missing_models(root: Path, tmp_path: Path) -> None:
    def run(arpa: str, lm: str) -> None:
        rescore(
            root / "run", root / "data", root / arpa, root / lm, tmp_path, grid=GRID, how=WIDE, jobs=1,
        )  # fmt: skip

    with pytest.raises(InputError, match=r"none.pt: not readable.*stage 8"):
        run("lm/lm.arpa", "none.pt")
    with pytest.raises(InputError, match=r"none.arpa: no such file"):
        run("lm/none.arpa", "lstm.pt")
