"""Compares Parallax with one device that updates touched rows only, over 52 steps, and checks that mutants fail.

Batches differ in size and repeat words, gradients are clipped, and two learners have no batch in the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_am.parallax import Config
from asr_am.parallax import indexed_rows as rows_module
from asr_am.parallax import row_worker as worker_module
from asr_am.parallax.indexed_rows import IndexedRows
from asr_am.parallax.row_optimizer import RowOptimizer
from asr_am.parallax.row_server import RowServer
from asr_am.parallax.row_worker import RowWorker
from tests.support.toy_lm import (
    BATCHES,
    EVERY,
    D,
    assert_close,
    make_batches,
    reference,
    rounds_of,
    train_virtually,
)  # fmt: skip

CLIP = 0.3
CASES: dict[str, tuple[str, Config]] = {
    "everything on": ("momentum", Config(clip_norm=CLIP)),
    "no local aggregation": ("sgd", Config(clip_norm=CLIP, local_aggregation=False)),
    "clipping at the chief": ("nesterov", Config(clip_norm=CLIP, after_aggregation=False)),
    "all on servers": ("adagrad", Config(clip_norm=CLIP, hybrid=False, servers=3)),
    "gather on the workers": ("adam", Config(clip_norm=CLIP, gather_on_servers=False, merge_each=True)),
    "everything off": (
        "momentum",
        Config(clip_norm=CLIP, hybrid=False, local_aggregation=False, after_aggregation=False, gather_on_servers=False),
    ),
    "all-gather": ("adam", Config(clip_norm=CLIP, path="all-gather")),
    "all-reduce": ("momentum", Config(clip_norm=CLIP, path="all-reduce")),
}


def check(kind: str, config: Config, steps: int = BATCHES // 4 + 1) -> None:
    expected = reference(kind, rounds_of(make_batches(4 * steps - 2)), CLIP)
    for found in train_virtually(kind, config, steps=steps):
        for k, weights in enumerate(found.weights, 1):
            assert_close(weights, expected[EVERY * k - 1])


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_one_device(case: str) -> None:
    check(*CASES[case])


def test_clipping_matters() -> None:
    rounds = rounds_of(make_batches(BATCHES))
    with pytest.raises(AssertionError):
        assert_close(reference("sgd", rounds)[-1], reference("sgd", rounds, CLIP)[-1])


def test_moving_averages_are_those_of_one_device() -> None:
    """Checks averages on servers, hybrid or not, and of replicated parameters."""
    expected = reference("momentum", rounds_of(make_batches(4 * EVERY - 2)), decay=0.9)[-1]
    for config in (Config(), Config(hybrid=False), Config(path="all-gather")):
        config = Config(**{**vars(config), "moving_average": 0.9})
        for found in train_virtually("momentum", config, steps=EVERY):
            assert_close(found.averages[-1], expected)


@pytest.mark.parametrize("options", [{}, {"hybrid": False}, {"path": "all-gather"}, {"path": "all-reduce"}], ids=str)
def test_gradients_are_summed_instead_of_averaged(options: dict[str, Any]) -> None:
    rounds = rounds_of(make_batches(4 * EVERY - 2))
    for dense, sparse in ((False, True), (True, False)):
        expected = reference(
            "momentum", rounds, CLIP, dense_factor=1.0 if dense else 4.0, sparse_factor=1.0 if sparse else 4.0
        )[-1]
        config = Config(clip_norm=CLIP, average_dense=dense, average_sparse=sparse, **options)
        for found in train_virtually("momentum", config, steps=EVERY):
            assert_close(found.weights[-1], expected)
            with pytest.raises(AssertionError):
                assert_close(found.weights[-1], reference("momentum", rounds, CLIP)[-1])


def test_bfloat16_on_the_wire_casts_rows_and_nothing_else() -> None:
    """Compares with a larger tolerance, as a few sums round differently in float64."""
    rounds = rounds_of(make_batches(4 * EVERY - 2))
    expected, uncast = reference("sgd", rounds, half=True)[-1], reference("sgd", rounds)[-1]
    for found in train_virtually("sgd", Config(wire="bfloat16"), steps=EVERY):
        assert_close(found.weights[-1], expected, 3e-4)
        with pytest.raises(AssertionError):
            assert_close(found.weights[-1], uncast, 3e-4)


def test_the_reported_loss_is_the_mean_over_all_words() -> None:
    runs = train_virtually("sgd", Config(), steps=EVERY)
    assert all(found.losses == runs[0].losses for found in runs)
    alone = train_virtually("sgd", Config(), learners=1, steps=1)[0]
    two = train_virtually("sgd", Config(), learners=2, steps=1)[0]
    batches = make_batches(2)
    words = [len(batch.inputs) for batch in batches]
    assert alone.losses[0] != two.losses[0] and len(set(words)) == 2


def test_bytes_are_those_of_table_3() -> None:
    """Counts values that each learner sends and receives, those of its own server included.

    A learner needs D elements for an input word, D + 1 for a candidate.
    """
    batches = make_batches(4 * EVERY - 2)
    by_servers = train_virtually("sgd", Config(local_aggregation=False), steps=EVERY)
    by_all_gather = train_virtually("sgd", Config(path="all-gather"), steps=EVERY)
    for rank in range(4):
        shard, served, gathered = batches[rank::4], by_servers[rank].counts, by_all_gather[rank].counts
        elements = sum(len(b.inputs.unique()) * D + len(b.candidates.unique()) * (D + 1) for b in shard)
        assert served["pulled"] == served["pushed"] == 4 * elements, "2 α b"
        assert gathered["sent"] == 3 * 4 * elements
        assert served["all-reduce"] == round(2 * 3 / 4 * 4 * (D * D + D)) * EVERY, "2 (N - 1) b / N"


# Mutants, each of which must fail the comparison.


def overwrite(parts: Sequence[IndexedRows], count: int) -> IndexedRows:
    unique, positions = torch.unique(torch.cat([part.numbers for part in parts]), return_inverse=True)
    merged = torch.zeros(len(unique), parts[0].values.shape[1])
    merged[positions] = torch.cat([part.values for part in parts])
    return IndexedRows(unique, merged)


def decay_all(self: RowOptimizer, rows: IndexedRows, lr: float) -> None:
    full = torch.zeros_like(self._w)
    full[rows.numbers] = rows.values
    step(self, IndexedRows(torch.arange(len(full)), full), lr)


def update_twice(self: RowServer, sums: Any, lr: float) -> None:
    for optimizer, rows in zip(self._optimizers, sums, strict=True):
        optimizer.step(rows, lr)
    update(self, sums, lr)


def ignore_local_ranks(parts: Sequence[IndexedRows], *_: object) -> IndexedRows:
    return parts[0]


def count_replicas(self: RowWorker, square: Tensor) -> Tensor:
    return norm(self, square * self._team.size)


def norm_of_replicas_only(self: RowWorker, square: Tensor) -> Tensor:
    norm(self, square)
    return square.sqrt()


def answer_early(self: RowServer, worker: int, t: int, message: Any) -> None:
    pull(self, worker, min(t, self.t), message)


step, update, norm, pull = RowOptimizer.step, RowServer._update, RowWorker.norm, RowServer.pull
MUTANTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (rows_module, "merge", overwrite), (RowOptimizer, "step", decay_all), (RowServer, "_update", update_twice),
    (worker_module, "accumulate", ignore_local_ranks), (RowWorker, "norm", count_replicas),
    (RowWorker, "norm", norm_of_replicas_only), (RowServer, "pull", answer_early),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_comparison_catches(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        check("momentum", Config(clip_norm=CLIP), steps=EVERY)
