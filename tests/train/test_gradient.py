from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import RoundRobinLeases, Segment
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.team import SingleProcess
from asr_am.egs.epoch_plan import EpochPlan
from asr_am.egs.loader import IGNORE, Batch, Loader
from asr_am.egs.store import EgsSet
from asr_am.models.acoustic import ModelOptions
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.models.conformer import ConformerOptions
from asr_am.models.lstm import LstmOptions
from asr_am.models.tdnnf import TdnnfOptions
from asr_am.train.gradient import GradientComputer, ModelState, Validator
from asr_am.train.schedule import Anneal
from asr_am.train.train_options import TrainOptions
from tests.support.egs_examples import write_examples


@pytest.fixture
def egs_dir(tmp_path: Path) -> Path:
    return write_examples(tmp_path / "egs")


def make_learner(egs_dir: Path, **options: object) -> ModelState:
    chosen = TrainOptions(model=BlstmOptions(1, 8, 6), **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = Blstm(chosen.model, 6, 6)
    params = FlatParams(model)
    loader = Loader(EgsSet(egs_dir, "train"), chosen.batch_size, random_offset=True)
    return ModelState(model, params, Optimizer(params, chosen.optimizer), loader, chosen, torch.device("cpu"))


def rounds(
    plan: EpochPlan, rank: int = 0, size: int = 1, begin: int = 0, digests: tuple[int, ...] = ()
) -> RoundRobinLeases:
    frames = [int(plan.frames_N[plan.chunks(n)].sum()) for n in range(begin, len(plan))]
    segment = Segment(
        plan.epoch, begin, len(plan), len(plan), tuple(frames), updates_before=0, learners=1, digests=digests
    )
    return RoundRobinLeases(segment, rank, size, SingleProcess().gather)


def test_padding_changes_neither_loss_nor_gradient(egs_dir: Path) -> None:
    """Compares a batch of padded chunks with the same chunks one by one, cut to their lengths."""
    learner = make_learner(egs_dir, batch_size=9)
    batch = learner.loader.batch(learner.loader.plan(0), 0)
    assert batch.lengths_B.min() < 7
    loss, correct = learner.backward(batch, batch.frames, None)
    backend = learner.params.g.clone()
    learner.params.g.zero_()
    alone, right = torch.zeros(()), 0
    for x_TF, targets_T, length in zip(batch.x_BTF, batch.targets_BT, batch.lengths_B.tolist(), strict=True):
        logits_TP = learner.model(x_TF[None, :length])[0]
        part = cross_entropy(logits_TP, targets_T[:length], reduction="sum")
        (part / batch.frames).backward()
        alone += part.detach()
        right += int((logits_TP.argmax(1) == targets_T[:length]).sum())
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(backend, learner.params.g, rtol=1e-4, atol=1e-7)
    assert int(correct) == right


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model",
    [
        BlstmOptions(2, 8, 6), LstmOptions(2, 8, 2), TdnnfOptions(1, 1, 8, 4, 6, dropout=0.1, subsampling=3),
        ConformerOptions(1, 8, 2, 8, 3, dropout=0.1, subsampling=3),
    ],
)  # fmt: skip
def test_a_step_never_waits_for_the_device(egs_dir: Path, precision: str, model: ModelOptions) -> None:
    """On the meta device, where tensors have no values: reading one, as item() and cpu() do, raises an error."""
    learner = make_learner(egs_dir, batch_size=9, precision=precision, accumulation=2, label_smoothing=0.1)
    network = model.make(6, 6).to("meta")
    params = FlatParams(network)
    optimizer = Optimizer(params, OptimizerOptions("adam", clip_norm=1.0))
    optimizer.lr = 0.1
    learner = replace(learner, model=network, params=params, optimizer=optimizer, device=torch.device("meta"))
    batch = learner.loader.batch(learner.loader.plan(0), 0)
    assert batch.lengths_B.min() < 7
    loss, correct = learner.backward(batch, batch.frames, lambda begin, end: None)
    optimizer.step()
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()
    assert correct.device.type == "meta"


def test_accumulation_gives_the_gradient_of_the_whole_batch(egs_dir: Path) -> None:
    results = []
    for parts in (1, 4):
        learner = make_learner(egs_dir, batch_size=10, accumulation=parts)
        buckets: list[tuple[int, int]] = []
        batch = learner.loader.batch(learner.loader.plan(0), 1)
        learner.backward(batch, batch.frames, lambda *bucket, to=buckets: to.append(bucket))
        assert buckets == [(0, len(learner.params))]
        results.append(learner.params.g.clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-7)


def test_each_batch_once_at_the_rate_of_its_share(egs_dir: Path) -> None:
    schedule = Anneal(base=1.0, batch_ratio=2, warmup_epochs=1)
    learner = make_learner(egs_dir, batch_size=3)
    plan = learner.loader.plan(0)
    leases = rounds(plan, digests=learner.loader.digests(plan, 0, len(plan)))
    gradient = GradientComputer(learner, plan, leases, schedule, read_ahead=True)
    examples = []
    while (step_result := gradient(None)) is not None:
        leases.complete(step_result)
        assert step_result.lr == learner.optimizer.lr == pytest.approx(1 + len(examples) / len(plan))
        examples.append(step_result.examples)
    leases.record().audit(examples)
    assert leases.totals().frames == plan.frames_N.sum() and sum(examples) == len(plan.utterance_N)


def test_learners_together_compute_the_gradient_of_one(egs_dir: Path) -> None:
    """The plain mean over three learners, one of them without data, is the gradient of the whole round's mean loss."""
    alone = make_learner(egs_dir, batch_size=9)
    plan = alone.loader.plan(0)
    whole = GradientComputer(alone, plan, rounds(plan), Anneal(), read_ahead=False)
    parts = []
    for rank in range(3):
        learner = make_learner(egs_dir, batch_size=3)
        plan = learner.loader.plan(0)
        turns = rounds(plan, rank, size=3)
        parts.append((learner, GradientComputer(learner, plan, turns, Anneal(), read_ahead=rank == 1)))
    buckets: list[tuple[int, int]] = []
    while whole(None) is not None:
        step_result = [gradient(lambda *bucket: buckets.append(bucket)) for _, gradient in parts]
        mean = torch.stack([learner.params.g for learner, _ in parts]).mean(dim=0)
        torch.testing.assert_close(mean, alone.params.g)
        assert {s.lr for s in step_result if s} == {alone.optimizer.lr}
    assert [gradient(None) for _, gradient in parts] == [None] * 3
    assert step_result[2] is not None and step_result[2].lease.batch is None and not parts[2][0].params.g.any()
    assert len(set(buckets)) * 3 * -(-len(plan) // 3) == len(buckets), "an idle turn reports the same buckets"


def test_dropout_depends_on_the_batch_and_not_on_what_came_before(egs_dir: Path) -> None:
    learner = make_learner(egs_dir, batch_size=4)
    learner.model.dropout.p = 0.5
    plan = learner.loader.plan(2)

    def gradient_of(batch: int, first: int) -> torch.Tensor:
        gradient = GradientComputer(learner, plan, rounds(plan, begin=first), Anneal(), read_ahead=False)
        for _ in range(batch - first + 1):
            gradient(None)
        return learner.params.g.clone()

    assert torch.equal(gradient_of(3, first=0), gradient_of(3, first=3))
    assert not torch.equal(gradient_of(3, first=3), gradient_of(4, first=4))


def test_held_out_loss_is_the_mean_over_frames_and_leaves_the_model_alone(egs_dir: Path) -> None:
    learner = make_learner(egs_dir)
    dev = EgsSet(egs_dir, "dev")
    held_out = Validator(learner.model, Loader(dev, 3, shuffle=False), learner.options, learner.device)
    other = torch.randn_like(learner.params.w)
    before = learner.params.w.clone()
    loss, error = held_out(other)
    assert torch.equal(learner.params.w, before)
    learner.params.w.copy_(other)
    everything: Batch = (whole := Loader(dev, 1000, shuffle=False)).batch(whole.plan(0), 0)
    with torch.no_grad():
        logits_BTP = learner.model(everything.x_BTF, everything.lengths_B)
    exact = cross_entropy(logits_BTP.flatten(0, 1), everything.targets_BT.flatten(), ignore_index=IGNORE)
    assert loss == pytest.approx(float(exact), rel=1e-5)
    right = int((logits_BTP.argmax(2) == everything.targets_BT).sum())
    assert error == pytest.approx(1 - right / dev.frames)
