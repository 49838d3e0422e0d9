"""Single-device programs under Parallax: what works without changes, and what is refused with a message."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_am import parallax
from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.simulator import SimCluster, SimTeam
from asr_am.distributed.strategy import LossFn
from asr_am.errors import InputError
from asr_am.parallax import Config
from asr_am.parallax.placement import Method
from asr_am.parallax.row_optimizer import RULES
from tests.support.toy_lm import (
    MAKE,
    Batch,
    C,
    Weights,
    Words,
    assert_close,
    hardware,
    make_batches,
    make_model,
    on_cluster,
    reference,
    summed_loss,
)  # fmt: skip


def single_device(steps: int, prepare: Callable[[Words], None], loss: LossFn = summed_loss) -> dict[str, Tensor]:
    """Returns the weights after training by SGD with torch alone."""
    model = make_model()
    prepare(model)
    optimizer = MAKE["sgd"](p for p in model.parameters() if p.requires_grad)
    for batch in make_batches(steps):
        optimizer.zero_grad()
        loss_sum, words = loss(model, batch)
        (loss_sum / words).backward()
        optimizer.step()
    return model.state_dict()


def freeze(model: Words) -> None:
    model.inputs.requires_grad_(False)
    model.hidden.weight.requires_grad_(False)


@pytest.mark.parametrize("path", ["servers", "all-gather"])
def test_frozen_parameters_stay_as_they_are(path: Method) -> None:
    def main(team: SimTeam) -> Weights:
        model = make_model()
        freeze(model)
        optimizer = MAKE["sgd"](model.parameters())  # it does not update frozen parameters either
        with parallax.get_runner(model, summed_loss, optimizer, team, Config(path=path)) as runner:
            for batch in make_batches(12):
                runner.run(batch if team.rank == 1 else None)
            return runner.weights()

    expected = single_device(12, freeze)
    for found in on_cluster(main, learners=2).values():
        assert found.keys() == expected.keys()
        assert torch.equal(found["inputs.weight"], make_model().inputs.weight)
        assert_close(found, expected)


def test_a_zero_grad_that_was_left_in_the_program_does_no_harm() -> None:
    model = make_model()
    with parallax.get_runner(model, summed_loss, MAKE["sgd"](model.parameters())) as runner:
        for batch in make_batches(12):
            model.zero_grad()
            runner.run(batch)
        assert_close(runner.weights(), single_device(12, lambda model: None))


def test_a_batch_without_examples_changes_nothing() -> None:
    model = make_model()
    with parallax.get_runner(model, summed_loss, MAKE["sgd"](model.parameters())) as runner:
        runner.run(make_batches(1)[0])
        before = runner.weights()
        empty = torch.zeros(0, dtype=torch.int64)
        assert runner.run(Batch(empty, torch.arange(C), empty)) == 0.0
        assert all(torch.equal(value, before[name]) for name, value in runner.weights().items())


def test_unsupported_optimizers_are_refused() -> None:
    def refused(optimizer: torch.optim.Optimizer, message: str) -> None:
        with pytest.raises(InputError, match=message):
            parallax.get_runner(model, summed_loss, optimizer)

    model = make_model()
    refused(torch.optim.SGD(model.hidden.parameters(), lr=0.1), r"outputs: the optimizer does not have it; freeze it")
    refused(torch.optim.SGD([*model.parameters(), torch.zeros(1)], lr=0.1), "parameters that are not the model's")
    refused(
        torch.optim.SparseAdam(model.parameters()), "optimizer SparseAdam: not supported by parallax; use one of SGD"
    )
    optimizer = MAKE["momentum"](model.parameters())
    summed_loss(model, make_batches(1)[0])[0].backward()
    optimizer.step()
    refused(optimizer, "optimizer SGD: has done steps")

    model = make_model()
    optimizer = MAKE["momentum"](model.parameters())
    runner = parallax.get_runner(model, summed_loss, optimizer)
    runner.run(make_batches(1)[0])
    optimizer.param_groups[0].update(lr=0.01, momentum=0.8)
    with pytest.raises(InputError, match=r"the optimizer's momentum changed from 0\.9 to 0\.8; only lr may change"):
        runner.run(make_batches(1)[0])


@pytest.mark.parametrize("kind", RULES)
def test_every_rule_is_made_from_the_options_of_an_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    model = make_model()
    with parallax.get_runner(model, summed_loss, kind(model.parameters(), lr=0.01)) as runner:  # type: ignore[call-arg]
        for batch in make_batches(2):
            runner.run(batch)


def test_names_of_dense_parameters_are_the_models() -> None:
    class Tied(Words):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.inputs

    for dense in ("inputs.weight", "again.weight"):
        model = Tied()
        with parallax.get_runner(
            model, summed_loss, MAKE["sgd"](model.parameters()), config=Config(dense=(dense,))
        ) as r:
            r.run(make_batches(1)[0])
            assert r.plan is not None and {one.name for one in r.plan.sparse} == {"outputs", "bias"}
    model = make_model()
    with pytest.raises(InputError, match=r"Config\.dense: the model has no parameter input; it has outputs, bias"):
        parallax.get_runner(model, summed_loss, MAKE["sgd"](model.parameters()), config=Config(dense=("input",))).run(
            make_batches(1)[0]
        )


def test_weights_load_into_a_new_model_strictly() -> None:
    class Counting(Words):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    model = Counting()
    with parallax.get_runner(model, summed_loss, MAKE["sgd"](model.parameters()), config=Config(servers=2)) as runner:
        runner.run(make_batches(1)[0])
        Counting().load_state_dict(runner.weights())


def test_a_parameter_that_is_also_read_transposed_stays_whole() -> None:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        assert isinstance(model, Words)
        hidden = model.inputs(batch.inputs)
        logits = (hidden @ model.outputs.T)[:, batch.candidates] + model.bias[batch.candidates]
        return F.cross_entropy(logits, batch.targets, reduction="sum"), float(len(batch.inputs))

    model = make_model()
    model.hidden.requires_grad_(False)
    optimizer = MAKE["sgd"](p for p in model.parameters() if p.requires_grad)
    with parallax.get_runner(model, loss, optimizer) as runner:
        for batch in make_batches(5):
            runner.run(batch)
        assert_close(runner.weights(), single_device(5, lambda model: model.hidden.requires_grad_(False), loss))
        assert runner.plan is not None and {one.name for one in runner.plan.sparse} == {"inputs.weight", "bias"}


def test_rows_of_only_one_learner_are_clipped_once() -> None:
    """On a virtual cluster, gathered tensors lie in memory that all learners share."""

    def main(team: SimTeam) -> Weights:
        model = make_model()
        config = Config(path="all-gather", clip_norm=0.05)
        with parallax.get_runner(model, summed_loss, MAKE["sgd"](model.parameters()), team, config) as runner:
            for batch in make_batches(5):
                runner.run(batch if team.rank == 0 else None)
            return runner.weights()

    expected = reference("sgd", [[batch] for batch in make_batches(5)], 0.05)[-1]
    for found in on_cluster(main).values():
        assert_close(found, expected)


def test_no_push_overtakes_another_where_nothing_is_pulled() -> None:
    """Alternates a batch of words with several of vectors: only updates of `words` keep learners from running ahead."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.out = nn.Embedding(4000, 8), nn.Linear(8, 3)

        def forward(self, batch: Tensor) -> Tensor:
            return self.out(batch if batch.is_floating_point() else self.words(batch))

    rng = torch.Generator().manual_seed(0)
    words, vectors = torch.randint(4000, (4, 600), generator=rng), torch.randn(26, 3, 8, generator=rng)
    batches = [vectors[k] if k // 2 % 6 else words[k // 8] for k in range(26)]

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        return model(batch).square().sum(), float(len(batch))

    def main(team: SimTeam) -> int:
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with parallax.get_runner(model, loss, optimizer, team, Config(path="servers")) as runner:
            for batch in parallax.shard(batches, team):
                runner.run(batch)
        return team.comm_stats.overwritten

    cluster = SimCluster(
        hardware(hosts=2, devices_per_host=1, jitter=0.0), Workload("w", seconds_per_batch={"toy": 0.05}), 2, seed=1
    )
    assert cluster.run(main) == {0: 0, 1: 0}
