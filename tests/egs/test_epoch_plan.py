"""Plans of sets that are larger than the shuffle buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asr_am.egs import epoch_plan
from asr_am.egs.epoch_plan import ChunkOrder, EpochPlan, Versions, cut
from asr_am.egs.loader import Loader
from asr_am.egs.stateless_rng import combine, string_keys
from asr_am.egs.store import EgsSet
from tests.support.egs_examples import write_examples

FRAMES = np.random.default_rng(0).integers(1, 200, 300)
KEYS = string_keys([f"u{index}" for index in range(300)])


def order(buffer: int, **options: bool) -> ChunkOrder:
    options = {"shuffle": True, "random_offset": True} | options
    return ChunkOrder(FRAMES, KEYS, np.flatnonzero(np.arange(300) % 5), 7, 1, buffer=buffer, **options)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_plan, "BLOCK", 20)


@pytest.mark.parametrize("buffer", [100, 700, 10**6])
def test_every_chunk_comes_once_in_any_epoch(buffer: int) -> None:
    for epoch in (0, 1):
        plan = EpochPlan(order(buffer), epoch, 16)
        assert (len(plan.groups) > 1) == (buffer < 10**6)
        chunks = sorted(zip(plan.utterance_N.tolist(), plan.begin_N.tolist(), plan.frames_N.tolist(), strict=True))
        offset_U = (combine(1, epoch, KEYS) % np.uint64(7)).astype(np.int64)
        all_chunks = zip(*(column.tolist() for column in cut(FRAMES, 7, offset_U)), strict=True)
        assert chunks == [chunk for chunk in all_chunks if chunk[0] % 5]
        assert plan.num_examples == len(chunks) and plan.num_frames == plan.frames_N.sum()
        assert len(plan) == -(-len(chunks) // 16)


def test_any_batch_is_found_by_its_number() -> None:
    plan, other = EpochPlan(order(100), 3, 16), EpochPlan(order(100), 3, 16)
    whole = plan.part(slice(0, plan.num_examples))
    for number in np.random.default_rng(0).permutation(len(plan)):
        for column_N, column_B in zip(whole, other.part(other.chunks(int(number))), strict=True):
            np.testing.assert_array_equal(column_N[plan.chunks(int(number))], column_B)
    assert len(other._chunks) == epoch_plan.CACHED, "few groups are in memory"


def test_chunks_of_a_group_are_mixed_and_groups_change_with_the_epoch() -> None:
    plan, later = EpochPlan(order(700), 0, 16), EpochPlan(order(700), 1, 16)
    positions = np.flatnonzero(np.isin(plan.utterance_N, plan.groups[0]))
    assert positions.tolist() == list(range(len(positions))), "a group comes in one piece"
    first = plan.utterance_N[: len(positions)]
    assert np.corrcoef(np.arange(len(first)), first)[0, 1] < 0.2, "in no order"
    assert len(np.unique(plan.groups[0] // 30)) > 5, "from all over the set"
    assert set(plan.groups[0]) != set(later.groups[0])


def test_without_shuffling_the_stored_order_is_kept() -> None:
    plan = EpochPlan(order(100, shuffle=False), 0, 16)
    assert len(plan.groups) > 1
    keys = list(zip(plan.utterance_N.tolist(), plan.begin_N.tolist(), strict=True))
    assert keys == sorted(keys)


def test_a_small_set_is_one_permutation_of_all_chunks() -> None:
    plan = EpochPlan(order(10**6), 2, 16)
    offset_U = (combine(1, 2, KEYS) % np.uint64(7)).astype(np.int64)
    columns = np.stack(cut(FRAMES, 7, offset_U))
    columns = columns[:, columns[0] % 5 > 0]
    seed = int(combine(1, 2)[0] >> np.uint64(1))
    columns = columns[:, np.random.default_rng(seed).permutation(columns.shape[1])]
    np.testing.assert_array_equal(plan.utterance_N, columns[0])
    np.testing.assert_array_equal(plan.begin_N, columns[1])


def test_batches_and_identities_of_a_set_in_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    egs = EgsSet(write_examples(tmp_path_factory.mktemp("egs")), "train")
    loader, other = (Loader(egs, 3, seed=1, random_offset=True, workers=2, buffer=8) for _ in range(2))
    plan = loader.plan(1)
    assert len(plan.groups) > 1
    digests = loader.digests(plan, 0, len(plan))
    batches = list(loader.batches(plan, range(len(plan))))
    assert [batch.digest for batch in batches] == list(digests) and len(set(digests)) == len(digests)
    assert sum(batch.frames for batch in batches) == egs.frames
    last = other.batch(other.plan(1), len(plan) - 1)
    assert torch.equal(last.x_BTF, batches[-1].x_BTF) and last.digest == digests[-1]


@pytest.mark.parametrize("buffer", [100, 10**6])
def test_an_epoch_has_each_utterance_at_one_of_its_speeds_in_turn(buffer: int) -> None:
    sources = [f"u{index}" for index in range(100)]
    names = [f"{prefix}{name}" for prefix in ("", "sp0.9-", "sp1.1-") for name in sources] + ["sp0.9-alone"]
    frames_U = np.append(np.repeat([20, 22, 18], 100), 9)
    used = np.arange(301)
    turns = ChunkOrder(frames_U, string_keys(names), used, 7, 1, True, True, buffer, Versions.of(names))
    seen = []
    for epoch in range(3):
        plan = EpochPlan(turns, epoch, 16)
        seen.append([names[index] for index in np.unique(plan.utterance_N)])
        assert sorted(name.rpartition("-")[2] for name in seen[-1]) == sorted([*sources, "alone"])
        assert plan.num_frames == plan.frames_N.sum()
        assert 20 < sum(name.startswith("sp0.9") for name in seen[-1]) < 50, "all speeds in every epoch"
    assert set().union(*seen) == set(names), "all of them in three epochs"
    assert plan.utterance_N.tolist() == EpochPlan(turns, 2, 16).utterance_N.tolist()
    assert set(np.unique(EpochPlan(replace(turns, seed=2), 0, 16).utterance_N)) != {names.index(n) for n in seen[0]}
