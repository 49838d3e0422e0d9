"""Lattices rescored with a mixture of LMs, against costs of enumerated paths and of every prefix on its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asr_am.decode.lattice import Lattice, LmScale, beam_excess
from asr_am.decode.lattice_rescore import LatticeModels, LatticeOptions, rescore
from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa
from asr_am.lang.mixture import mixed
from asr_am.lang.ngram_automaton import NgramAutomaton
from asr_am.lang.units import Units
from asr_am.models.lm_scorer import word_logprobs
from asr_am.models.lm_states import LmStates
from asr_am.models.lstm_lm import LstmLm, LstmLmOptions
from tests.support.lattice_paths import NAMES, WORDS, cost_of, paths, random_lattice, random_lm, sentence_cost

SCALE = LmScale(10.0, 0.3)
WORD_UNITS = Units(["</s>", "<unk>", *"abcdef"], {word: (2 + i,) for i, word in enumerate("abcdef")})
PIECES = Units(["</s>", "<unk>", "x", "y", "z"], {"a": (2,), "b": (3, 4), "c": (2, 3, 4), "d": (3,), "e": (4, 4)})
WEIGHT = 0.6


def models(arpa: Arpa, units: Units, seed: int) -> LatticeModels:
    torch.manual_seed(seed)
    lstm = LstmLm(LstmLmOptions(embedding=6, layers=2, cells=8, projection=5), len(units)).eval()
    torch.nn.init.normal_(lstm.output.weight, std=3.0)
    return LatticeModels(NgramAutomaton.from_arpa(arpa, WORDS), arpa.order, lstm, units, WEIGHT, NAMES)


def expected_costs(lattice: Lattice, arpa: Arpa, made: LatticeModels) -> dict[tuple, float]:
    """Returns the least cost of each sequence of words and acoustic costs, with the mixture in place of the n-gram."""
    each = [cost_of(lattice, path, SCALE.lm) for path in paths(lattice)]
    sentences = sorted({words for (words, _), _ in each})
    lstm = word_logprobs(made.lstm, made.units, [[NAMES[word] for word in words] for words in sentences])
    change = {}
    for words, lstm_N in zip(sentences, lstm, strict=True):
        prefixes = [sentence_cost(arpa, list(words[:i]), end=False) for i in range(len(words) + 1)]
        total = sentence_cost(arpa, list(words))
        mixture = -mixed([lstm_N], [-np.diff([*prefixes, total])], WEIGHT)[0].sum()
        change[words] = mixture - total + SCALE.insertion * len(words)
    costs: dict[tuple, float] = {}
    for key, cost in each:
        costs[key] = min(cost + change[key[0]], costs.get(key, np.inf))
    return costs


def found_costs(lattice: Lattice) -> dict[tuple, float]:
    found: dict[tuple, float] = {}
    for path in paths(lattice):
        key, cost = cost_of(lattice, path, SCALE.lm)
        cost += SCALE.insertion * len(key[0])
        found[key] = min(cost, found.get(key, np.inf))
    return found


@pytest.mark.parametrize("units", [WORD_UNITS, PIECES], ids=["words", "pieces"])
@pytest.mark.parametrize("seed", range(4))
def test_every_path_gets_the_cost_of_the_mixture(seed: int, units: Units) -> None:
    rng = np.random.default_rng(seed)
    arpa = random_lm(3, rng)
    lattice, made = random_lattice(arpa, rng), models(arpa, units, seed)
    rescored = Lattice.from_arrays(rescore(lattice, made, SCALE, LatticeOptions(words=50, beam=1000.0)))
    expected, found = expected_costs(lattice, arpa, made), found_costs(rescored)
    assert found.keys() == expected.keys()
    assert [found[key] for key in found] == pytest.approx([expected[key] for key in found], abs=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_keeps_what_is_within_it(seed: int) -> None:
    """The estimates of what is added to the rest are no bounds, so paths at the edge may be lost, but never many."""
    rng = np.random.default_rng(seed)
    arpa = random_lm(2, rng)
    lattice, made = random_lattice(arpa, rng, num_states=11), models(arpa, WORD_UNITS, seed)
    narrow = Lattice.from_arrays(rescore(lattice, made, SCALE, LatticeOptions(words=50, beam=8.0)))
    expected, found = expected_costs(lattice, arpa, made), found_costs(narrow)
    best = min(expected.values())
    assert min(found.values()) == pytest.approx(best, abs=1e-3)
    assert beam_excess(narrow, SCALE).max() <= 8.0 and len(found) < len(expected)
    near = {key for key, cost in expected.items() if cost < best + 2.0}
    assert near <= found.keys()
    assert all(found[key] == pytest.approx(expected[key], abs=1e-3) for key in found)


def test_merged_histories_have_the_state_of_the_first() -> None:
    rng = np.random.default_rng(7)
    arpa = random_lm(2, rng)
    lattice, made = random_lattice(arpa, rng), models(arpa, WORD_UNITS, 7)
    whole, merged = (
        found_costs(Lattice.from_arrays(rescore(lattice, made, SCALE, LatticeOptions(words=words, beam=1000.0))))
        for words in (50, 1)
    )
    assert whole.keys() == merged.keys()
    differ = [key for key in whole if abs(whole[key] - merged[key]) > 1e-3]
    assert differ and all(key[0] for key in differ)


def test_the_ngram_alone_changes_nothing() -> None:
    rng = np.random.default_rng(8)
    arpa = random_lm(4, rng)
    lattice, made = random_lattice(arpa, rng), models(arpa, WORD_UNITS, 8)
    same = rescore(lattice, replace(made, weight=0.0), SCALE, LatticeOptions(words=1, beam=1000.0))
    expected, found = found_costs(lattice), found_costs(Lattice.from_arrays(same))
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("units", [WORD_UNITS, PIECES], ids=["words", "pieces"])
def test_states_give_the_probabilities_of_whole_sentences(units: Units) -> None:
    made = models(random_lm(2, np.random.default_rng(0)), units, 3)
    states = LmStates(made.lstm, units)
    sentences = [list("abcab"), list("ab"), list("abf"), [], list("ec" * 200)]
    for sentence, expected in zip(sentences, word_logprobs(made.lstm, units, sentences), strict=True):
        state, found = 0, []
        for word in sentence:
            found.append(states.logprobs([state], [word])[0])
            (state,) = states.extend([state], [word])
        found.append(states.logprobs([state], [None])[0])
        assert found == pytest.approx(expected, abs=1e-4)
    count = states.count
    assert states.extend([0, 0], ["a", "a"]) == states.extend([0, 0], ["a", "a"]) and states.count == count


@pytest.mark.parametrize("wrong", [{"words": 0}, {"beam": 0.0}])
def test_wrong_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"lm\.lattice: "):
        LatticeOptions(**wrong)  # type: ignore[arg-type]
