"""Any torch model from Python: data of every kind, every launcher, checkpoints, validation, and what a user forgets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from asr_am.api import launch, simulate, train_model
from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import Team
from asr_am.errors import InputError, Preempted
from asr_am.parallax.strategy import Parallax
from asr_am.train.any_model import Epoch, Loss
from tests.support.toy_training import hardware

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = {"sync": Sync, "bmuf": partial(Bmuf, block_size=2), "adpsgd": Adpsgd, "ps_async": PsAsync}
TRUE = torch.tensor([1.0, -2.0, 0.5, 0.3])


def line(examples: int = 320) -> TensorDataset:
    """Points x_NF and y_N1 on a plane with the coefficients TRUE."""
    x_NF = torch.randn(examples, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x_NF, x_NF @ TRUE[:3, None] + TRUE[3])


def batches_of(size: int = 8) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(size) for part in line().tensors), strict=True))


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x_BF, y_B1 = batch
    return (model(x_BF) - y_B1).square().sum(), len(x_BF)


def mean_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x_BF, y_B1 = batch
    return nn.functional.mse_loss(model(x_BF), y_B1)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fit(
    strategy: Callable[..., Any], team: Team | None = None, data: Any = None, loss: Loss = squared_error, **how: Any
) -> tuple[Tensor, list[Epoch]]:
    """Trains a plane from weights that differ between learners. Returns its coefficients and the losses."""
    torch.manual_seed(team.rank if team else 0)
    model = nn.Linear(3, 1)
    slow = strategy in (PsAsync, STRATEGIES["bmuf"])  # stale gradients, or momentum of blocks
    how = {"epochs": 12 if slow else 6, "lr": 0.03, "optimizer": OptimizerOptions(momentum=0.0 if slow else 0.9), **how}
    history = train_model(model, data or batches_of(), loss, strategy, team, **how)
    return flat(model), history


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), Dpsgd])
def test_learners_of_a_virtual_cluster_begin_and_end_with_the_same_weights(strategy: Callable[..., Any]) -> None:
    results = simulate(partial(fit, strategy), learners=4)
    assert len(results) == 4
    for weights, history in results.values():
        assert torch.equal(weights, results[0][0]) and history[-1].train_loss < 0.05 * history[0].train_loss
        assert torch.allclose(weights, TRUE, atol=0.1)


@pytest.mark.parametrize("strategy", [PsSync, PsAsync])
def test_dedicated_servers_compute_no_batches(strategy: Callable[..., Any], tmp_path: Path) -> None:
    used: set[int] = set()

    def learner(team: Team) -> Tensor:
        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            used.add(team.rank)
            return mean_error(model, batch)

        return fit(partial(strategy, apart=True, servers=1), team, loss=loss, out=tmp_path, lr=0.02)[0]

    results = simulate(learner, learners=3)
    assert used == {0, 1} and all(torch.equal(results[rank], results[0]) for rank in range(3))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["learners"] == 2 and summary["train_loss"][-1] < 0.2 * summary["train_loss"][0]


def test_one_learner_takes_every_batch_in_turn() -> None:
    weights, history = fit(Sync)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    rule = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for batch in batches_of() * 6:
        rule.zero_grad()
        mean_error(model, batch).backward()  # type: ignore[arg-type]
        rule.step()
    assert torch.allclose(weights, flat(model), atol=1e-6) and len(history) == 6


def test_synchronous_learners_do_what_one_does_with_their_batches_together() -> None:
    four = simulate(partial(fit, Sync), learners=4)[0]
    one = fit(Sync, None, batches_of(32))
    assert torch.allclose(four[0], one[0], atol=1e-5)


@pytest.mark.parametrize("loss", [squared_error, mean_error])
@pytest.mark.parametrize("kind", ["loader", "dataset", "workers", "generator"])
def test_data_of_torch(kind: str, loss: Loss) -> None:
    data: Any = line()
    if kind == "loader":
        data = DataLoader(line(), batch_size=16, shuffle=True)
    elif kind == "workers":
        data = DataLoader(line(), batch_size=16, num_workers=1)
    elif kind == "generator":
        data = DataLoader(line(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(7))
    state = torch.get_rng_state()
    weights, history = fit(Sync, None, data, loss, epochs=8)
    assert torch.allclose(weights, TRUE, atol=0.05) and history[-1].train_loss < 0.05 * history[0].train_loss
    again, same = fit(Sync, None, data, loss, epochs=8)
    assert torch.equal(weights, again) and history == same, "the order follows from the seed alone"
    other, _ = fit(Sync, None, data, loss, epochs=1, seed=2)
    assert kind == "workers" or not torch.equal(other, fit(Sync, None, data, loss, epochs=1)[0])
    assert len(state) == len(torch.get_rng_state())


def test_learners_share_out_a_loader(tmp_path: Path) -> None:
    seen: dict[int, list[float]] = {0: [], 1: []}

    def learner(team: Team) -> None:
        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            seen[team.rank] += batch[0][:, 0].tolist()
            return mean_error(model, batch)

        train_model(nn.Linear(3, 1), DataLoader(line(), 8, shuffle=True), loss, Sync, team)

    simulate(learner, learners=2)
    assert sorted(seen[0] + seen[1]) == sorted(line().tensors[0][:, 0].tolist()) and len(seen[0]) == len(seen[1]) == 160


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.layers(x_BF)  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", [Sync, Adpsgd])
def test_statistics_of_normalisation_layers_are_the_same_at_all(strategy: Callable[..., Any], tmp_path: Path) -> None:
    held_out = line().tensors

    def learner(team: Team) -> tuple[dict[str, Tensor], list[Epoch]]:
        torch.manual_seed(team.rank)
        model = Normalised()
        validate = lambda found: mean_error(found, held_out).item()  # type: ignore[arg-type] # noqa: E731
        history = train_model(
            model, line(), mean_error, strategy, team, epochs=8, lr=0.02, validate=validate, out=tmp_path
        )
        model.eval()
        assert mean_error(model, held_out).item() == pytest.approx(history[-1].heldout_loss, abs=1e-5)  # type: ignore[arg-type]
        return model.state_dict(), history

    (first, history), *others = simulate(learner, learners=4).values()
    assert float(first["layers.1.num_batches_tracked"]) > 0 and history[-1].heldout_loss < history[0].heldout_loss  # type: ignore[operator]
    for state, _ in others:
        assert all(torch.equal(first[name], state[name]) for name in first)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["model"].keys() == first.keys() and best["heldout_loss"] == min(epoch.heldout_loss for epoch in history)  # type: ignore[type-var]


def test_without_a_validation_the_weights_of_the_best_epoch_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normalised()
    history = train_model(model, line(), mean_error, Sync, epochs=4, lr=0.01, out=tmp_path)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["train_loss"] == min(epoch.train_loss for epoch in history) == history[-1].train_loss
    assert all(torch.equal(best["model"][name], value) for name, value in model.state_dict().items())


class Buffered(nn.Module):
    """Centres its inputs and outputs, has a spectral norm, and buffers of other kinds that change in training."""

    mean_F: Tensor
    seen: Tensor
    level: Tensor
    order_F: Tensor
    cache_BF: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 8)), nn.Tanh())
        self.out = nn.Linear(8, 1)
        self.register_buffer("mean_F", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(1), persistent=False)
        self.register_buffer("turn", torch.rand(3, dtype=torch.complex64))
        self.register_buffer("order_F", torch.arange(1.0).expand(3))
        self.register_buffer("cache_BF", torch.zeros(0), persistent=False)

    def forward(self, x_BF: Tensor) -> Tensor:
        if self.training:
            self.mean_F = 0.9 * self.mean_F + 0.1 * x_BF.mean(0)  # another tensor
            self.seen += len(x_BF)
            self.level.fill_(float(self.seen) / 100)
        if len(self.cache_BF) < len(x_BF):
            self.cache_BF = torch.zeros(len(x_BF), 3)
        x_BF = x_BF - self.mean_F + self.order_F + self.cache_BF[: len(x_BF)]
        return self.out(self.layers(x_BF)) + self.level  # type: ignore[no-any-return]


@pytest.mark.parametrize(("learners", "strategy"), [(1, Sync), (3, Sync), (2, Adpsgd)])
def test_buffers_of_all_kinds_are_validated_saved_and_the_same_at_all(
    learners: int, strategy: Callable[..., Any], tmp_path: Path
) -> None:
    held_out = line().tensors

    def train(team: Team | None, out: Path, stops: bool) -> dict[str, Tensor]:
        torch.manual_seed(team.rank if team else 0)
        model, count = Buffered(), 0

        def validate(model: nn.Module) -> float:
            nonlocal count
            if stops and (count := count + 1) == 2:
                raise Interrupted
            return mean_error(model, held_out).item()  # type: ignore[arg-type]

        history = train_model(
            model, batches_of(20), mean_error, strategy, team, epochs=2, lr=0.02, validate=validate, out=out,
            checkpoint_every=3,
        )  # fmt: skip
        model.eval()
        with torch.no_grad():
            found = mean_error(model, held_out).item()  # type: ignore[arg-type]
        assert found == pytest.approx(history[-1].heldout_loss, rel=1e-5)
        found_buffers = {name: buffer for name, buffer in model.named_buffers() if name != "cache_BF"}
        return {**model.state_dict(), **found_buffers}

    def run(out: Path, stops: bool = False) -> dict[int, dict[str, Tensor]]:
        if learners == 1:
            return {0: train(None, out, stops)}
        return simulate(partial(train, out=out, stops=stops), learners)

    whole = run(tmp_path / "whole")
    assert int(whole[0]["seen"]) > 0 and not whole[0]["mean_F"].equal(torch.zeros(3)) and whole[0]["turn"].is_complex()
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", stops=True)
    parts = run(tmp_path / "parts")
    for found in [*whole.values(), *(parts.values() if strategy is Sync else [])]:
        assert all(torch.equal(found[name], value) for name, value in whole[0].items())
    best = torch.load(tmp_path / "whole/best.pt", weights_only=True)
    if best["epoch"] == 2:
        assert all(torch.equal(value, whole[0][name]) for name, value in best["model"].items())
    assert int(best["model"]["seen"]) > 0


class Words(nn.Module):
    """Predicts a number from a word, by a table of which a batch touches a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(500, 4), nn.Linear(4, 1)

    def forward(self, word_B: Tensor) -> Tensor:
        return self.out(self.table(word_B))  # type: ignore[no-any-return]


def fit_words(strategy: Callable[..., Any], team: Team) -> tuple[Tensor, int]:
    torch.manual_seed(0)
    model, word_N = Words(), torch.arange(64) * 7
    table = model.table.weight
    data = list(zip(word_N.split(8), (word_N[:, None] % 3).float().split(8), strict=True))
    train_model(model, data, mean_error, strategy, team, epochs=3, lr=0.1, optimizer=OptimizerOptions(momentum=0.0))
    assert model.table.weight is table and next(name for name, _ in model.named_parameters()) == "table.weight"
    return flat(model), sum(team.comm_stats.bytes_sent.values())


def test_parallax_sends_the_touched_rows_only_and_gives_the_parameters_back() -> None:
    sync, parallax = (simulate(partial(fit_words, strategy), learners=2) for strategy in (Sync, Parallax))
    assert torch.allclose(parallax[0][0], sync[0][0], atol=1e-6)
    assert parallax[0][1] < 0.5 * sync[0][1]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("strategy", [Sync, STRATEGIES["bmuf"]])
def test_an_interrupted_training_continues_in_its_folder(
    strategy: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(team: Team, out: Path, stop_at: int | None) -> Tensor:
        count = 0

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            nonlocal count
            count += 1
            if count == stop_at:
                raise Interrupted
            return mean_error(model, batch)

        return fit(strategy, team, DataLoader(line(), 8, shuffle=True), loss, out=out, checkpoint_every=4)[0]

    whole = simulate(partial(train, out=tmp_path / "whole", stop_at=None), learners=2)
    with pytest.raises(Interrupted):
        simulate(partial(train, out=tmp_path / "parts", stop_at=53), learners=2)
    parts = simulate(partial(train, out=tmp_path / "parts", stop_at=None), learners=2)
    assert torch.equal(parts[0], whole[0]), "the same bits"
    whole_losses, losses = (
        json.loads((tmp_path / name / "summary.json").read_text())["train_loss"] for name in ("whole", "parts")
    )
    assert losses == whole_losses and len(losses) >= 6
    assert "whole: is finished, and its results are returned" not in caplog.text
    again = simulate(partial(train, out=tmp_path / "whole", stop_at=1), learners=2)
    assert torch.equal(again[0], whole[0]) and "whole: is finished, and its results are returned" in caplog.text
    with pytest.raises(InputError, match="belongs to a run with other options"):
        fit(strategy, None, out=tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoints")
    caplog.clear()
    fit(strategy, None, out=tmp_path / "parts")
    assert "is finished" not in caplog.text, "it was trained anew"


PROGRAM = """
import sys, json, torch
sys.path.insert(0, {root!r})
from tests.train.test_any_model import fit, STRATEGIES
from asr_am.api import connect
team = connect()
weights, history = fit(STRATEGIES[sys.argv[1]], team)
torch.save(weights, f"{{sys.argv[2]}}/{{team.rank}}.pt")
team.close()
"""


@pytest.mark.parametrize(
    ("name", "launcher"), [("bmuf", "launch"), ("adpsgd", "launch"), ("sync", "torchrun"), ("ps_async", "torchrun")]
)
def test_processes(name: str, launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    synchronous = name in ("sync", "bmuf")
    if launcher == "launch":
        launch([sys.executable, str(program), name, str(tmp_path)], 2, synchronous=synchronous)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*torchrun, str(program), name, str(tmp_path)], capture_output=True, text=True, timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if not synchronous:
            assert "asynchronous" in done.stderr and "asr_am.api.launch" in done.stderr
            return
        assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    # The result of an asynchronous strategy depends on how the processes are scheduled.
    assert torch.equal(first, second) and torch.allclose(first, TRUE, atol=0.15 if synchronous else 0.3)
    if synchronous:
        virtual = simulate(partial(fit, STRATEGIES[name]), learners=2)[0][0]
        assert torch.allclose(first, virtual, atol=1e-6)


def test_restarts_by_torchrun_are_counted(tmp_path: Path) -> None:
    dies = 'if team.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os._exit(7)\nweights'
    program = PROGRAM.format(root=str(ROOT)).replace("import sys", "import os, sys").replace("weights", dies, 1)
    program = program.replace("team)", "team, out=sys.argv[2] + '/run')", 1)
    (tmp_path / "program.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "program.py"), "sync", str(tmp_path)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["restarts"] == 2, "of both learners"


def test_learners_that_launch_asks_to_end_save_a_checkpoint(tmp_path: Path) -> None:
    program = PROGRAM.format(root=str(ROOT)).replace("team)", "team, loss=loss, out=sys.argv[2] + '/run')", 1)
    asks = """
import os, signal, time
from asr_am.distributed.runtime.preemption import preempted
from tests.train.test_any_model import squared_error
count = 0
def loss(model, batch):
    global count
    count += 1
    if count == 5 and team.rank == 1:
        os.kill(int(os.environ["ASR_AM_LAUNCHER"]), signal.SIGUSR2)
    while count == 5 and team.rank == 1 and not preempted():
        time.sleep(0.01)
    return squared_error(model, batch)
weights, history"""
    (tmp_path / "program.py").write_text(program.replace("weights, history", asks, 1), encoding="utf-8")
    with pytest.raises(Preempted, match="continues from the last checkpoint"):
        launch(
            [sys.executable, str(tmp_path / "program.py"), "sync", str(tmp_path)], 2, synchronous=True,
            signals=["USR2"],
        )  # fmt: skip
    assert len(list((tmp_path / "run/checkpoints").glob("checkpoint-*[0-9]/run.pt"))) == 1
    assert not (tmp_path / "run/summary.json").exists(), "in the first epoch"


def test_a_run_that_is_asked_to_end_says_whether_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_AM_LAUNCHER", str(os.getppid()))
    asked = False

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal asked
        if not asked:
            os.kill(os.getpid(), signal.SIGUSR1)
        asked = True
        return mean_error(model, batch)

    with pytest.raises(Preempted, match="keeps no checkpoints: the same command starts it anew"):
        fit(Sync, loss=loss)
    asked = False
    with pytest.raises(Preempted, match="a checkpoint was written, and the same command continues"):
        fit(Sync, loss=loss, out=tmp_path)
    assert torch.equal(fit(Sync, loss=loss, out=tmp_path)[0], fit(Sync, loss=loss)[0])
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_the_program_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "recipes/README.md").read_text(encoding="utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if "train_model(" in block]
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    launch([sys.executable, "train.py"], 2, synchronous=False, env={"PYTHONPATH": str(ROOT)})
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text(encoding="utf-8"))
    assert summary["strategy"] == "adpsgd" and summary["learners"] == 2 and len(summary["heldout_loss"]) == 4
    assert (tmp_path / "runs/first/best.pt").exists()


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(3)


class NoLength(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "0 batches"),
        (DataLoader(line(4), batch_size=8, drop_last=True), "no batches"),
        (Endless(), "give a DataLoader"),
        (DataLoader(Endless()), "give a DataLoader with a dataset that has a length"),
        (DataLoader(line(), sampler=DistributedSampler(line(), 2, 0)), "no DistributedSampler"),
        (NoLength(), "give a DataLoader"),
        (iter(batches_of()), "give a DataLoader"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_that_cannot_be_shared_out(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_model(nn.Linear(3, 1), data, mean_error, Sync)


@pytest.mark.parametrize("learners", [1, 2])
def test_a_folder_of_the_user_is_not_written_into(tmp_path: Path, learners: int) -> None:
    mine = tmp_path / "metrics.jsonl"
    mine.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="not made by train_model"):
        simulate(partial(fit, Sync, out=tmp_path), learners)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert mine.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("changes", "message"), [
    ({"strategy": "sync"}, "strategy='sync' must be the class of a strategy"),
    ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
    ({"lr": -1}, "lr=-1 must be a number that is not negative"), ({"lr": "0.1"}, "lr='0.1' must be a number"),
    ({"optimizer": "adam"}, "optimizer is a str; give OptimizerOptions"),
    ({"out": __file__}, "test_any_model.py is no folder"),
    ({"model": nn.Linear(3, 1).requires_grad_(False)}, "no parameter that is trained"),
    ({"validate": lambda model: None}, "validate returned a NoneType; return a number"),
])  # fmt: skip
def test_a_wrong_argument_is_named(changes: dict[str, Any], message: str) -> None:
    arguments = {"model": nn.Linear(3, 1), "batches": batches_of(), "loss": mean_error, "strategy": Sync} | changes
    with pytest.raises(InputError, match=message):
        train_model(**arguments)


def test_a_model_in_evaluation_mode_is_trained_in_training_mode() -> None:
    modes = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        modes.append([module.training for module in model.modules()])
        return mean_error(model, batch)

    for frozen in (False, True):
        model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).eval()
        if frozen:
            model.train()[1].eval()
        train_model(model, batches_of(), loss, Sync)
        assert modes.pop() == [True, True, not frozen]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_that_learners_would_round_are_named(dtype: torch.dtype) -> None:
    def learner(team: Team | None) -> None:
        model = nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1)).to(dtype)
        data = [(x_BF.to(dtype), y_B1.to(dtype)) for x_BF, y_B1 in batches_of(40)]
        train_model(model, data, mean_error, Sync, team)
        assert model[1].weight.dtype is dtype

    learner(None)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(InputError, match=rf"parameter 1\.weight is {name}, and .* call model\.float\(\)"):
        simulate(learner, learners=2)


def test_faults_that_a_strategy_cannot_cope_with_are_named() -> None:
    cluster = hardware(faults={"lost_share": 0.2})
    workload = Workload("any", seconds_per_batch={"toy": 1.0})
    with pytest.raises(InputError, match=r"lost_share=0\.2: dpsgd never resends messages"):
        SimCluster(cluster, workload, 2, seed=0).run(partial(fit, Dpsgd))


def test_mistakes_are_named() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(InputError, match="learners=0"):
        simulate(partial(fit, Sync), learners=0)
    with pytest.raises(InputError, match=r"shape \[8, 1\]; return its mean"):
        train_model(model, batches_of(), lambda m, batch: m(batch[0]), Sync)
    with pytest.raises(InputError, match="counts 1 examples in a batch of 8"):
        train_model(model, batches_of(), lambda m, batch: (m(batch[0]).sum(), 1), Sync)
    with pytest.raises(InputError, match="does not depend on the model"):
        train_model(model, batches_of(), lambda m, batch: batch[0].mean(), Sync)
    with pytest.raises(InputError, match="returned a float; return the mean loss as a tensor"):
        train_model(model, batches_of(), lambda m, batch: 1.0, Sync)  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match="begins with a int does not say"):
        train_model(model, [(1, 2)], mean_error, Sync)
    with pytest.raises(InputError, match="must share one dtype"):
        train_model(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1).double()), batches_of(), mean_error, Sync)
    with pytest.raises(InputError, match="the loss is nan"):
        train_model(model, batches_of(), lambda m, batch: mean_error(m, batch) * float("nan"), Sync)
    with pytest.raises(InputError, match="weights that are not finite numbers before the first step"):
        train_model(model, batches_of(), mean_error, Sync)
    model = nn.Linear(3, 1)
    with pytest.raises(InputError, match="batch 1 has 0 examples; each needs at least one"):
        train_model(model, batches_of()[:2], mean_error, Sync, sizes=[8, 0])
    with pytest.raises(InputError, match=r"epoch 1: the learning rate is -1.0; correct the schedule"):
        train_model(model, batches_of(), mean_error, Sync, lr=lambda share: -1.0)
