from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr_am.egs.augment import Masking
from asr_am.egs.epoch_plan import cut
from asr_am.egs.loader import IGNORE, Loader, feature_moments
from asr_am.egs.store import EgsSet
from asr_am.errors import InputError
from tests.support.egs_examples import write_examples


@pytest.fixture(scope="module")
def egs(tmp_path_factory: pytest.TempPathFactory) -> EgsSet:
    return EgsSet(write_examples(tmp_path_factory.mktemp("egs")), "train")


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20)), min_size=1, max_size=12), st.integers(1, 21))
def test_chunks_cover_every_frame_once(utterances: list[tuple[int, int]], chunk: int) -> None:
    frames_U, offset_U = np.array(utterances).T
    utterance_N, begin_N, count_N = cut(frames_U, chunk, offset_U % chunk)
    assert count_N.min() >= 1 and count_N.max() <= chunk
    for u, frames in enumerate(frames_U):
        mine = utterance_N == u
        covered = [t for b, n in zip(begin_N[mine], count_N[mine], strict=True) for t in range(b, b + n)]
        assert covered == list(range(frames))


def test_a_batch_is_what_was_stored(egs: EgsSet) -> None:
    loader = Loader(egs, 3, seed=1, random_offset=True)
    plan = loader.plan(4)
    seen = np.zeros(egs.frames, dtype=int)
    first_frame_U = np.cumsum(egs.index.frames_U) - egs.index.frames_U
    for number in range(len(plan)):
        batch, part = loader.batch(plan, number), plan.chunks(number)
        assert batch.x_BTF.dtype == torch.float32 and batch.targets_BT.dtype == torch.int64
        for b, (u, begin) in enumerate(zip(plan.utterance_N[part], plan.begin_N[part], strict=True)):
            length, row = int(batch.lengths_B[b]), egs.index.begin_U[u] + begin
            shard = egs.index.shard_U[u]
            assert np.array_equal(batch.x_BTF[b, :length].numpy(), egs.features[shard][row : row + length])
            assert np.array_equal(batch.targets_BT[b, :length].numpy(), egs.targets[shard][row : row + length])
            assert (batch.x_BTF[b, length:] == 0).all() and (batch.targets_BT[b, length:] == IGNORE).all()
            seen[first_frame_U[u] + begin : first_frame_U[u] + begin + length] += 1
        assert batch.utterances.tolist() == plan.utterance_N[part].tolist()
    assert (seen == 1).all()


def test_the_order_depends_on_seed_and_epoch_only(egs: EgsSet) -> None:
    masking = Masking(bands=1, band_width=3, spans=1, span_width=3, streams=1)

    def epoch_of(seed: int, epoch: int, workers: int) -> list[torch.Tensor]:
        loader = Loader(egs, 4, seed=seed, random_offset=True, masking=masking, workers=workers)
        plan = loader.plan(epoch)
        return [batch.x_BTF for batch in loader.batches(plan, range(len(plan)))]

    one, four = epoch_of(1, 2, 1), epoch_of(1, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))
    loader = Loader(egs, 4, seed=1, random_offset=True, masking=masking)
    alone = loader.batch(loader.plan(2), 3)
    assert torch.equal(alone.x_BTF, one[3])
    for other in (epoch_of(2, 2, 1), epoch_of(1, 3, 1)):
        assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(one, other, strict=False))


def test_offsets_move_between_epochs_and_stay_put_without_the_option(egs: EgsSet) -> None:
    def begins(random_offset: bool, epoch: int) -> set[tuple[int, int]]:
        plan = Loader(egs, 4, random_offset=random_offset).plan(epoch)
        return set(zip(plan.utterance_N.tolist(), plan.begin_N.tolist(), strict=True))

    assert begins(False, 0) == begins(False, 1)
    assert begins(True, 0) != begins(True, 1)


def test_masks_cover_a_band_in_all_streams_and_at_most_their_width(egs: EgsSet) -> None:
    mean_F = np.full(6, 99.0, dtype=np.float32)
    masking = Masking(bands=1, band_width=2, spans=1, span_width=3, streams=2)
    loader = Loader(egs, 64, shuffle=False, masking=masking, mean_F=mean_F)
    batch = loader.batch(loader.plan(0), 0)
    whole = batch.lengths_B == egs.info.chunk
    masked_BTF = batch.x_BTF[whole] == 99.0
    band_BF, span_BT = masked_BTF.all(dim=1), masked_BTF.all(dim=2)
    assert band_BF.any() and span_BT.any()
    assert torch.equal(band_BF[:, :3], band_BF[:, 3:])
    partly_BF = band_BF[~span_BT.all(dim=1)]
    assert partly_BF.sum(dim=1).max() <= 4 and span_BT.sum(dim=1).max() <= 3
    assert torch.equal(masked_BTF, band_BF[:, None, :] | span_BT[:, :, None])


def test_numbers_are_drawn_no_further_ahead_than_promised(egs: EgsSet) -> None:
    loader = Loader(egs, 1, workers=2)
    plan = loader.plan(0)
    drawn = []
    batches = loader.batches(plan, (drawn.append(n) or n for n in range(len(plan))))  # type: ignore[func-returns-value]
    assert next(batches).id == 0
    assert len(drawn) <= 5


def test_moments_are_those_of_the_frames(egs: EgsSet) -> None:
    frames = [egs.features[s][b : b + n] for s, b, n in
              zip(egs.index.shard_U, egs.index.begin_U, egs.index.frames_U, strict=True)]  # fmt: skip
    x_NF = np.concatenate(frames).astype(np.float64)
    mean_F, deviation_F = feature_moments(egs)
    np.testing.assert_allclose(mean_F, x_NF.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(deviation_F, x_NF.std(axis=0), atol=1e-5)


def test_a_target_that_no_model_has_names_the_utterance(tmp_path: Path) -> None:
    directory = write_examples(tmp_path / "egs")
    targets_T = np.load(directory / "train" / "targets.0.npy")
    targets_T[33] = 6  # in the second utterance, frames 30 to 36
    np.save(directory / "train" / "targets.0.npy", targets_T)
    loader = Loader(EgsSet(directory, "train"), 4, shuffle=False)
    with pytest.raises(InputError, match=r"train-0[01]"):
        list(loader.batches(loader.plan(0), range(2)))
