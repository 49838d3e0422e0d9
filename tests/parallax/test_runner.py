"""The runner as a program sees it: plan, refusals, dense steps, models without sparse parameters, checkpoints."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_am import parallax
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import LearnerLost, Lease, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.simulator import SimTeam
from asr_am.distributed.strategies.sync import Sync
from asr_am.errors import InputError
from asr_am.parallax import Config
from asr_am.parallax.placement import PlacementPlan, cheapest_method, transfer
from asr_am.parallax.row_server import RowServer
from asr_am.parallax.sparse_weight import SparseWeight
from asr_am.parallax.sparsity_probe import probe
from asr_am.parallax.strategy import Parallax
from tests.support.toy_lm import (
    MAKE,
    Batch,
    Weights,
    Words,
    assert_close,
    make_batches,
    make_model,
    on_cluster,
    reference,
    summed_loss,
    train_virtually,
)  # fmt: skip

# Plan.


def test_the_cheapest_method_of_table_3_is_selected() -> None:
    assert transfer("servers", 0.1, 1000.0, 8) == 200 and transfer("all-gather", 0.1, 1000.0, 8) == 1400
    assert transfer("all-reduce", 0.1, 1000.0, 8) == 1750
    assert [cheapest_method(alpha, 8) for alpha in (0.01, 0.8, 0.9)] == ["servers", "servers", "all-reduce"]
    assert cheapest_method(0.1, 2) == cheapest_method(0.1, 1) == "all-gather"


def test_the_probe_finds_sparse_parameters_by_how_they_are_read() -> None:
    model, batch = make_model(), make_batches(1)[0]
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    seen = dict(zip([name for name, _ in model.named_parameters()], probe(model, summed_loss, batch), strict=True))
    assert {name for name, one in seen.items() if one.lookups_only} == {"inputs.weight", "outputs", "bias"}
    assert seen["inputs.weight"].alpha == len(batch.inputs.unique()) / 60
    assert seen["hidden.weight"].alpha == 1.0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_sparse_gradients_count_as_well_and_names_do_not() -> None:
    model = nn.ModuleDict({"linear": nn.Embedding(9, 2, sparse=True), "embedding": nn.Linear(2, 9)})

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        return model["embedding"](model["linear"](batch)).square().sum(), 1.0  # type: ignore[index]

    seen = probe(model, loss, torch.tensor([1, 1, 4]))
    assert [(one.alpha, one.lookups_only) for one in seen] == [(2 / 9, True), (1.0, False), (1.0, False)]


def test_the_plan_is_a_table_and_survives_a_checkpoint() -> None:
    runs = train_virtually("sgd", Config(), steps=2)
    assert "outputs" in runs[0].plan and "dense (2 parameters)" in runs[0].plan and runs[0].plan.count("servers") == 4
    mixed = train_virtually("sgd", Config(dense=("bias",), path="all-reduce"), steps=2)[0].plan
    assert "dense (3 parameters)" in mixed and "bias" not in mixed


def test_a_shard_gives_all_as_many_batches() -> None:
    teams = [list(parallax.shard(range(10), FakeTeam(rank, 4))) for rank in range(4)]  # type: ignore[arg-type]
    assert teams == [[0, 4, 8], [1, 5, 9], [2, 6, None], [3, 7, None]]
    assert list(parallax.shard(iter(range(3)))) == [0, 1, 2]


class FakeTeam:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


# Refusals.


def make_weight() -> SparseWeight:
    return SparseWeight("table", torch.zeros(5, 2), lambda numbers: numbers[:, None].repeat(1, 2).float())


@pytest.mark.parametrize(
    "access",
    [
        lambda w: w.sum(), lambda w: w.t(), lambda w: torch.ones(3, 5) @ w, lambda w: w[2], lambda w: w[1:3],
        lambda w: torch.relu(w), lambda w: w.index_select(1, torch.tensor([0])), lambda w: torch.cat([w, w]),
        lambda w: F.embedding(torch.tensor([1]), w, max_norm=1.0),
    ],
)  # fmt: skip
def test_other_access_is_refused(access: Any) -> None:
    with pytest.raises(InputError, match=r"table: .* parallax keeps this parameter on servers"):
        access(make_weight())


def test_lookups_do_what_they_do_to_a_tensor() -> None:
    whole = torch.arange(5.0)[:, None].repeat(1, 2).requires_grad_()
    numbers = torch.tensor([[3, 1, 3], [0, 0, 3]])
    weight = make_weight()
    for function in (
        lambda w: F.embedding(numbers, w, padding_idx=3), lambda w: w[numbers],
        lambda w: torch.index_select(w, 0, numbers[0]), lambda w: F.linear(torch.ones(4, 2), w),
    ):  # fmt: skip
        theirs = function(whole)
        ours = function(weight)
        assert torch.equal(ours, theirs)
        (expected,) = torch.autograd.grad(theirs.pow(2).sum() + theirs.sum(), whole)
        (ours.pow(2).sum() + ours.sum()).backward()
        found = weight.gradient()
        assert torch.equal(torch.zeros(5, 2).index_add(0, found.numbers, found.values), expected)
    with pytest.raises(InputError, match="table: row 5 was looked up, but rows are 0 to 4"):
        weight[torch.tensor([2, 5])]
    with torch.no_grad():
        weight[numbers]
    assert not len(weight.gradient()), "validation leaves no gradient"


def test_bad_options_and_unequal_learners_are_refused() -> None:
    def unequal(team: SimTeam) -> None:
        model = make_model()
        with torch.no_grad():
            model.bias[team.rank] = 1.0
        parallax.get_runner(model, summed_loss, MAKE["sgd"](model.parameters()), team).run(make_batches(1)[0])

    def elsewhere(team: SimTeam) -> None:
        team.hosts = (0, 0, 1, 1 if team.rank < 2 else 0)
        model = make_model()
        parallax.get_runner(model, summed_loss, MAKE["sgd"](model.parameters()), team).run(make_batches(1)[0])

    with pytest.raises(InputError, match=r"learner 2 and learner 0 disagree about the machines"):
        on_cluster(elsewhere)
    with pytest.raises(InputError, match=r"learner 1 begins with other weights than learner 0"):
        on_cluster(unequal)
    with pytest.raises(InputError, match="optimizer LBFGS: not supported by parallax"):
        parallax.get_runner(make_model(), summed_loss, torch.optim.LBFGS(make_model().parameters()))
    for options, message in (
        ({"wire": "int8"}, "wire=int8"), ({"path": "broadcast"}, "path=broadcast"),
        ({"moving_average": 1.0}, "moving_average"), ({"clip_norm": -1.0}, "clip_norm"),
        ({"hybrid": False, "path": "all-gather"}, "hybrid=false"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            Config(**options)  # type: ignore[arg-type]


def test_a_single_process_needs_no_team() -> None:
    batches = make_batches(40)
    expected = reference("adagrad", [[batch] for batch in batches], 0.3)[-1]
    for config in (Config(clip_norm=0.3), Config(clip_norm=0.3, hybrid=False), Config(clip_norm=0.3, path="servers")):
        model = make_model()
        with parallax.get_runner(model, summed_loss, MAKE["adagrad"](model.parameters()), config=config) as runner:
            for batch in parallax.shard(batches):
                runner.run(batch)
            assert_close(runner.weights(), expected)


# Steps in which a parameter is dense.


def mostly_sampled(model: nn.Module, batch: tuple[Batch, bool]) -> tuple[Tensor, float]:
    """Uses the full softmax in every third step. It reads all rows of `outputs` and `bias`."""
    words, full = batch
    assert isinstance(model, Words)
    if not full:
        return summed_loss(model, words)
    hidden = torch.tanh(model.hidden(model.inputs(words.inputs)))
    logits = F.linear(hidden, model.outputs, model.bias)
    return F.cross_entropy(logits, words.candidates[words.targets], reduction="sum"), float(len(words.inputs))


def test_a_parameter_may_be_sparse_in_one_step_and_dense_in_another() -> None:
    batches = [(batch, (k // 2) % 3 == 2) for k, batch in enumerate(make_batches(80))]

    def main(team: SimTeam) -> Weights:
        model = make_model()
        optimizer = MAKE["sgd"](model.parameters())
        with parallax.get_runner(model, mostly_sampled, optimizer, team, Config(path="servers")) as runner:
            for batch in parallax.shard(batches, team):
                runner.run(batch)
            return runner.weights()

    model = make_model()
    optimizer = MAKE["sgd"](model.parameters())
    for k in range(0, 80, 2):
        optimizer.zero_grad()
        losses, words = zip(*(mostly_sampled(model, batch) for batch in batches[k : k + 2]), strict=True)
        (sum(losses) / sum(words)).backward()
        optimizer.step()
    for found in on_cluster(main, learners=2).values():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


# Models without sparse parameters.


def dense_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return model(batch).square().sum(), float(len(batch))


def dense_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_without_sparse_parameters_it_is_sync_to_the_bit_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    data = torch.randn(120, 6, 3)

    def ours(team: SimTeam) -> Tensor:
        model = dense_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with parallax.get_runner(model, dense_loss, optimizer, team) as runner:
            for batch in parallax.shard(data, team):
                runner.run(batch)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def sync(team: SimTeam, make: type[Sync] = Sync) -> Tensor:
        params = FlatParams(model := dense_model())
        strategy = make(params, optimizer := Optimizer(params, OptimizerOptions(momentum=0.9)), team)
        strategy.attach(model, dense_loss, lambda: data[team.rank])
        for batch in parallax.shard(data, team):

            def gradient(on_bucket: BucketHook | None, batch: Tensor | None = batch) -> StepResult:
                params.g.zero_()
                optimizer.lr = 0.1
                with params.notify_buckets(on_bucket):
                    (dense_loss(model, batch)[0] / 6.0).backward()  # type: ignore[arg-type]
                return StepResult(Lease(None, 0, 0, 6.0), 6.0, 0, 0.1, torch.zeros(()), torch.zeros(()))

            strategy.step(gradient)
        return params.w

    with caplog.at_level(logging.INFO):
        found, expected, strategy = on_cluster(ours), on_cluster(sync), on_cluster(partial(sync, make=Parallax))
    for rank in range(4):
        assert torch.equal(found[rank], expected[rank]) and torch.equal(strategy[rank], expected[rank])
    assert "no sparse parameters: this is synchronous SGD" in caplog.text
    assert "no sparse parameters, so this is strategy=sync" in caplog.text


def test_numbers_of_examples_and_exported_rows_are_not_rounded_to_the_type_of_messages() -> None:
    examples = 90_150.0  # above the largest number of float16

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        return summed_loss(model, batch)[0] * examples / len(batch.inputs), examples

    def main(team: SimTeam) -> tuple[float, Weights]:
        model = make_model()
        config = Config(path="servers")
        with parallax.get_runner(model, loss, MAKE["sgd"](model.parameters()), team, config) as runner:
            means = [runner.run(batch) for batch in parallax.shard(make_batches(8), team)]
            return means[0], runner.weights()

    (mean, weights), (expected, _) = (on_cluster(main, wire=wire)[0] for wire in ("float16", "float32"))
    assert mean == pytest.approx(expected, rel=1e-2)
    assert all(not torch.equal(value.half().float(), value) for value in weights.values())


def test_a_lost_learner_ends_the_run() -> None:
    with pytest.raises(LearnerLost, match="learner 3"):
        train_virtually("sgd", Config(), steps=20, faults={"crashes": [{"learner": 3, "at": 9.0}]})


# Checkpoints.


def part_of_a_run(team: SimTeam, config: Config, batches: Sequence[Batch], states: dict[int, bytes]) -> list[Weights]:
    """Resumes from the learner's saved state, if there is one, and replaces it at the end."""
    model = make_model()
    with parallax.get_runner(model, summed_loss, MAKE["adam"](model.parameters()), team, config) as runner:
        if team.rank in states:
            runner.load_state_dict(torch.load(io.BytesIO(states[team.rank]), weights_only=True))
        for batch in parallax.shard(batches, team):
            runner.run(batch)
        torch.save(runner.state_dict(), file := io.BytesIO())
        states[team.rank] = file.getvalue()
        return [runner.weights(), runner.weights(average=True), {"steps": torch.tensor(runner.steps)}]


@pytest.mark.parametrize("options", [{}, {"path": "all-gather"}, {"hybrid": False}], ids=str)
def test_a_resumed_run_has_the_same_bits(options: dict[str, Any]) -> None:
    config, batches = Config(clip_norm=0.3, moving_average=0.9, **options), make_batches(96)

    def run(begin: int, end: int, states: dict[int, bytes]) -> dict[int, Any]:
        return on_cluster(lambda team: part_of_a_run(team, config, batches[begin:end], states))

    whole, states = run(0, 96, {}), {}
    run(0, 44, states)
    resumed = run(44, 96, states)
    for rank in range(4):
        for ours, theirs in zip(resumed[rank], whole[rank], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(InputError, match=r"was made with learners on machines \[0, 0, 0, 0\], not \[0, 0\]"):
        on_cluster(lambda team: part_of_a_run(team, config, batches, states), learners=2)


def test_plans_are_plain_values() -> None:
    state = {"learners": 2, "choices": [["e", 5, 2, 0.5, True, "servers"]]}
    assert PlacementPlan.from_state_dict(state).state_dict() == state


def test_no_learner_pulls_from_a_server_that_is_still_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays loading, which takes no virtual time of its own. A server may hold gigabytes."""
    config, batches = Config(path="servers", moving_average=0.9), make_batches(32)
    expected, states = on_cluster(lambda team: part_of_a_run(team, config, batches, {})), {}
    on_cluster(lambda team: part_of_a_run(team, config, batches[:16], states))
    load = RowServer.load_state_dict

    def slowly(self: RowServer, state: dict[str, Any]) -> None:
        self.t = state["t"]
        self._team.sleep(5.0)
        load(self, state)

    monkeypatch.setattr(RowServer, "load_state_dict", slowly)
    for rank, found in on_cluster(lambda team: part_of_a_run(team, config, batches[16:], states)).items():
        for ours, theirs in zip(found, expected[rank], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("options", [{"moving_average": 0.5}, {"hybrid": False}, {"servers": 1}], ids=str)
def test_a_checkpoint_of_other_options_is_refused(options: dict[str, Any]) -> None:
    states: dict[int, bytes] = {}
    batches = make_batches(8)
    on_cluster(lambda team: part_of_a_run(team, Config(path="servers", moving_average=0.9), batches, states))
    config = Config(**{"path": "servers", "moving_average": 0.9, **options})
    with pytest.raises(InputError, match=rf"made with parallax\.{next(iter(options))}"):
        on_cluster(lambda team: part_of_a_run(team, config, batches, states))
