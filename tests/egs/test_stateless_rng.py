from __future__ import annotations

import numpy as np

from asr_am.egs.stateless_rng import combine, seed_of, string_keys, uniform_NK


def test_draws_depend_on_the_key_alone() -> None:
    names = [f"utterance{i}" for i in range(50)]
    keys = combine(3, 7, string_keys(names))
    shuffled = combine(3, 7, string_keys(names[::-1]))
    assert (keys == shuffled[::-1]).all()
    assert (uniform_NK(keys, 4)[10] == uniform_NK(keys[10:11], 4)[0]).all()


def test_seed_epoch_and_utterance_all_matter() -> None:
    utterances = string_keys(["a", "b"])
    keys = np.concatenate([combine(seed, epoch, utterances) for seed in range(20) for epoch in range(20)])
    assert len(np.unique(keys)) == 800
    assert seed_of(1, 2) != seed_of(2, 1)
    assert all(seed_of(seed, -1, n) == int(combine(seed, -1, n)[0]) >> 1 for seed in (0, 7, 2**63) for n in range(20))


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = uniform_NK(combine(1, 0, np.arange(20000)), 2)
    assert abs(draws.mean() - 0.5) < 0.01 and draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws[:, 0], bins=10, range=(0, 1))[0]
    assert abs(counts - 2000).max() < 250
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.03
