"""Rescoring of a decoding run on a small corpus by a recurrent LM with random weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.decode.ctm import CtmWord, ctm_name
from asr_am.decode.decode_set import decode_sets
from asr_am.decode.dev_choice import DevChoice, read_reference
from asr_am.decode.lattice import LmScale
from asr_am.decode.lattice_rescore import LatticeOptions
from asr_am.decode.lm_mixture import LmMixture
from asr_am.decode.lm_rescore import rescore
from asr_am.decode.nbest_rescore import Candidate, confidences, read_candidates, score_candidates
from asr_am.decode.search import SearchOptions
from asr_am.decode.shards import DecodeOptions
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.lang.arpa import read_arpa
from asr_am.lang.lang_dir import Lang, vocabulary
from asr_am.lang.units import make_units
from asr_am.models.lm_file import load_lm, save_lm
from asr_am.models.lstm_lm import LstmLm, LstmLmOptions
from tests.support.decoding_corpus import write_system

GRID = [LmScale(5.0), LmScale(10.0), LmScale(10.0, 0.5), LmScale(20.0, -0.5)]
MANY = 2000  # more sentences than any lattice has


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


def rescored_words(root: Path, weight: float, scale: LmScale, subset: str = "test") -> list[str]:
    """Returns the words of a set with the lowest costs under the mixture."""
    candidates = read_candidates(root / "run", subset, MANY, 1)
    words = []
    for group, scores in zip(candidates.values(), score_candidates(mixture(root, weight), candidates), strict=True):
        words += [word.word for word in group[scores.costs(scores.mixture_C, [scale])[:, 0].argmin()].timed]
    return sorted(words)


def ctm_words(path: Path) -> list[str]:
    return sorted(line.split()[4] for line in path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("scale", GRID, ids=str)
def test_the_ngram_alone_gives_the_words_of_the_decoder(root: Path, scale: LmScale) -> None:
    assert rescored_words(root, 0.0, scale, "dev") == ctm_words(root / "run/ctm" / ctm_name("dev", scale))


def test_the_recurrent_model_chooses_other_words(root: Path) -> None:
    assert any(rescored_words(root, 0.0, scale) != rescored_words(root, 1.0, scale) for scale in GRID)


def test_costs_are_those_written_out(root: Path) -> None:
    """Graph cost with the mixture's word probabilities in place of the n-gram's."""
    models = mixture(root, 0.3)
    candidates = read_candidates(root / "run", "dev", 5, 1)
    scored = score_candidates(models, candidates)
    group, scores = next(iter(candidates.values())), scored[0]
    for c, candidate in enumerate(group):
        lstm, ngram = models.logprobs([candidate.words])
        graph = candidate.graph
        for p, q in zip(np.exp(lstm[0]), np.exp(ngram[0]), strict=True):
            graph += math.log(q) - math.log(0.3 * p + 0.7 * q)
        expected = graph + candidate.acoustic / 12.0 + 0.5 * len(candidate.words)
        assert scores.costs(scores.mixture_C, [LmScale(12.0, 0.5)])[c, 0] == pytest.approx(expected, rel=1e-9)


def test_files_hold_the_best_sentences_with_their_times(root: Path, tmp_path: Path) -> None:
    rescore(root / "run", root / "data", root / "lm/lm.arpa", root / "lstm.pt", tmp_path, grid=GRID, how=MANY, jobs=1)
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
        assert found == rescored_words(root, report["weight"], scale, subset)
    lines = [line.split() for line in (tmp_path / "ctm" / ctm_name("test", choice.scale)).read_text().splitlines()]
    assert all(float(line[3]) > 0 and 0 < float(line[5]) <= 1 for line in lines)


@pytest.mark.parametrize("jobs", [1, 2])
def test_lattices_give_the_words_of_the_longest_lists(root: Path, tmp_path: Path, jobs: int) -> None:
    """With wide beams and whole histories, at the scale that lattices are rescored at."""
    scale = System.load(root / "run").lm_scale
    for name, how in (("lists", MANY), ("lattices", LatticeOptions(words=100, beam=100.0))):
        (tmp_path / name).mkdir()
        rescore(
            root / "run", root / "data", root / "lm/lm.arpa", root / "lstm.pt", tmp_path / name, grid=[scale],
            how=how, jobs=jobs,
        )  # fmt: skip
    for subset in ("dev", "test"):
        lists, lattices = (tmp_path / name / "ctm" / ctm_name(subset, scale) for name in ("lists", "lattices"))
        assert ctm_words(lattices) == ctm_words(lists) != ctm_words(root / "run/ctm" / ctm_name(subset, scale))


def test_confidence_is_the_share_that_has_the_word_there() -> None:
    def candidate(*timed: tuple[int, int, str]) -> Candidate:
        return Candidate([word for *_, word in timed], 0.0, 0.0, [CtmWord(*word, 1.0) for word in timed])

    group = [
        candidate((0, 10, "A"), (10, 10, "B")), candidate((0, 9, "A"), (9, 11, "C")), candidate((12, 8, "A")),
    ]  # fmt: skip
    assert confidences(group[0], group, [0.5, 0.3, 0.2]) == [CtmWord(0, 10, "A", 0.8), CtmWord(10, 10, "B", 0.5)]


def test_jobs_change_nothing(root: Path) -> None:
    assert read_candidates(root / "run", "dev", 5, 1) == read_candidates(root / "run", "dev", 5, 2)


def test_damaged_or_missing_lattices(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"system.json: no such file.*run stage 7 \(decode\)"):
        read_candidates(tmp_path, "dev", 5, 1)
    System.load(root / "run").save(tmp_path)
    with pytest.raises(InputError, match=r"dev.ark: cannot be read.*run stage 7 \(decode\) again"):
        read_candidates(tmp_path, "dev", 5, 1)
    (tmp_path / "lattices").mkdir()
    whole = (root / "run/lattices/dev.ark").read_bytes()
    for data, message in ((whole[:-7], "damaged at byte"), (b"", "has no lattices")):
        (tmp_path / "lattices/dev.ark").write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_candidates(tmp_path, "dev", 5, 1)


def test_missing_models_and_counts_out_of_range(root: Path, tmp_path: Path) -> None:
    def run(arpa: str, lm: str, count: int) -> None:
        rescore(
            root / "run", root / "data", root / arpa, root / lm, tmp_path, grid=GRID, how=count, jobs=1,
        )  # fmt: skip

    with pytest.raises(InputError, match=r"lm\.nbest=0"):
        run("lm/lm.arpa", "lstm.pt", 0)
    with pytest.raises(InputError, match=r"none.pt: not readable.*stage 8"):
        run("lm/lm.arpa", "none.pt", 5)
    with pytest.raises(InputError, match=r"none.arpa: no such file"):
        run("lm/none.arpa", "lstm.pt", 5)
