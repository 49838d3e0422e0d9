"""Trains any torch model with any strategy, by the training loop of the recipes (asr_am/train/trainer.py).

    from torch.utils.data import DataLoader
    from asr_am.api import simulate, train_model
    from asr_am.distributed.strategies.adpsgd import Adpsgd

    def learner(team):
        model = torch.nn.Linear(3, 1)
        loader = DataLoader(dataset, batch_size=8, shuffle=True)
        history = train_model(model, loader, loss, Adpsgd, team, epochs=4, lr=0.05, out="runs/first")
        return model, history

    results = simulate(learner, learners=4)       # by rank

`learner` runs in real processes too: call `learner(connect())` (asr_am/distributed/runtime/connect.py) in a program
that `launch` or torchrun starts. `learner(None)` is one learner in this process.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr_am.data import ownership
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.param_server.base import ParameterServerStrategy
from asr_am.distributed.runtime.preemption import noting
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import SingleProcess, Team
from asr_am.errors import InputError
from asr_am.models.model_file import write_torch
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.no_files import NoCheckpoints, NoRunLog
from asr_am.train.run_log import RunLog, TrainingBar
from asr_am.train.schedule import Schedule
from asr_am.train.tracking import NoTracker
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainable import Data, as_numbers, first_batch, load_statistics, running_statistics, set_numbers
from asr_am.train.trainer import Trainer
from asr_am.train.user_batches import Batches, EpochOrder, ListData, LoaderData, OneBatch, make_data

log = logging.getLogger(__name__)
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, int]]
NEVER = 1 << 40  # updates


class Epoch(NamedTuple):
    """Results of an epoch: training loss per example, while weights changed, and what `validate` returned for the
    consensus weights at its end.
    """

    train_loss: float
    heldout_loss: float | None


def train_model(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    strategy: Callable[[FlatParams, Optimizer, Team], Strategy],
    team: Team | None = None,
    *,
    epochs: int = 1,
    lr: float | Callable[[float], float] = 0.1,
    optimizer: OptimizerOptions | None = None,
    validate: Callable[[nn.Module], float] | None = None,
    out: str | Path | None = None,
    batch_size: int = 32,
    sizes: Sequence[int] | None = None,
    seed: int = 1,
    checkpoint_every: int = 500,
) -> list[Epoch]:
    """Trains as one learner of a team. All learners call it with the same arguments but for `team`.

    Every batch of an epoch is computed by exactly one learner. All begin with the weights of learner 0, and end with
    the consensus weights. Buffers, such as the statistics of normalisation layers, are averaged over the learners, and
    those that are no floating-point numbers are taken from the first learner.

    Args:
        model: the model, on its device. It is trained in place, in training mode. Modules that are in evaluation mode
            stay so, unless the model as a whole is. Several learners need trained parameters of float32.
        batches: a `DataLoader`, a dataset to divide into shuffled batches of `batch_size` examples, or a list of
            batches, which each epoch takes in this order. A sampler's order follows from `seed` and the epoch. Workers
            and page-locked memory of a `DataLoader` are for synchronous strategies of real processes. Learners assemble
            a batch themselves, after they have leased it, under `adpsgd`, `ps_async`, `ps_sync` and `psp`, and on a
            virtual cluster.
        loss: returns the mean loss of a batch over its examples, or the loss summed over its examples and their
            number. It must use the model it is given.
        strategy: makes the strategy, e.g. its class or `partial(Bmuf, block_size=10)`. Of the team of
            `partial(PsSync, apart=True, servers=n)`, the last n ranks compute no batches.
        team: this learner's end of the team. None: a single learner in this process.
        epochs: number of passes over `batches`.
        lr: learning rate, or a function of the share of the training that is done, from 0 to 1.
        optimizer: options of the update rule. Default: SGD with momentum 0.9.
        validate: returns the held-out loss of a model. One learner calls it after each epoch.
        out: folder of the run, the same at all learners. It gets checkpoints, from which the same call continues after
            an interruption, metrics.jsonl, summary.json and the weights of the best epoch, best.pt. None: no files. A
            learner that dies is then not replaced, and fault-tolerant strategies go on without it.
        batch_size: examples of a batch of one learner, for a dataset.
        sizes: number of examples of each batch of a list. Default: the length of the batch, or of its first part.
        seed: seed of the order of examples, and of dropout.
        checkpoint_every: updates of the team between two checkpoints. There is also one after each epoch.

    Returns:
        The results of each epoch.

    Raises:
        InputError: there are no batches, or an argument does not fit.
        LearnerLost: a learner died and the strategy cannot go on.
        Preempted: `launch` has asked the learners to end (`signals`). With `out`, there is a checkpoint.
    """
    _check_arguments(strategy, epochs, lr, optimizer, out)
    team = team or SingleProcess()
    if not model.training:  # as a pretrained one that was loaded
        model.train()
    options = TrainOptions(
        epochs=epochs, batch_size=1, seed=seed, optimizer=optimizer or OptimizerOptions(),
        schedule=Rate.of(lr, epochs), report_every=50, checkpoint_every=checkpoint_every if out else NEVER,
    )  # fmt: skip
    run = ModelRun(model, make_data(batches, batch_size, sizes, seed), loss, strategy, options, validate, out, team)
    trainer = Trainer(run, team)
    finished = trainer.checkpoints.on_disk and trainer.checkpoints.paths() and run.epochs_done() == epochs
    started = "ASR_AM_LAUNCHER" in os.environ and team.clock == "wall"
    signals = ("USR1",) if started else ()  # which `launch` sends to its learners
    try:
        with noting(signals):
            trainer.train()
    finally:
        run.run_log.close()
    if finished and team.rank == 0:
        log.warning("%s: is finished, and its results are returned; give another folder to train again", out)
    run.finish(trainer.strategy.consensus())
    return [Epoch(record["train_loss"], record.get("heldout_loss")) for record in trainer.progress.history]


def _check_arguments(strategy: object, epochs: object, lr: object, optimizer: object, out: str | Path | None) -> None:
    """Raises InputError for an argument of `train_model` of another type, or out of range."""
    if not callable(strategy):
        raise InputError(f"train_model: strategy={strategy!r} must be the class of a strategy, or a partial of one")
    if isinstance(epochs, bool) or not isinstance(epochs, int):
        raise InputError(f"train_model: epochs={epochs!r} must be a whole number")
    if not callable(lr) and not (isinstance(lr, Real) and 0 <= float(lr) < math.inf):
        raise InputError(f"train_model: lr={lr!r} must be a number that is not negative, or a function")
    if not isinstance(optimizer, OptimizerOptions | None):
        raise InputError(
            f"train_model: optimizer is a {type(optimizer).__name__}; give OptimizerOptions, which name the rule and "
            "its options"
        )
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise InputError(f"train_model: out={out} is no folder; give another name")


@dataclass(frozen=True)
class Rate(Schedule):
    """A learning rate that is a function of the share of the training that is done.

    Attributes:
        rates: the rate at the begin of each epoch.
    """

    rates: tuple[float, ...] = ()

    @classmethod
    def of(cls, lr: float | Callable[[float], float], epochs: int) -> Rate:
        """Returns the schedule of a constant or a function."""
        function = lr if callable(lr) else lambda share: lr
        rate = cls(float(function(0.0)), tuple(float(function(epoch / epochs)) for epoch in range(epochs)))
        object.__setattr__(rate, "_function", function)
        return rate

    def rate(self, epoch: int, share: float, updates: float) -> float:
        return float(self._function((epoch + share) / len(self.rates)))  # type: ignore[attr-defined]


@dataclass
class AnyState:
    """One learner's model (`trainable.LearnerState`)."""

    model: nn.Module
    params: FlatParams
    optimizer: Optimizer
    loader: Data
    options: TrainOptions
    device: torch.device
    loss: Callable[[nn.Module, OneBatch], tuple[Tensor, float]]

    def backward(self, batch: OneBatch, loss_denominator: float, on_bucket: BucketHook | None) -> tuple[Tensor, Tensor]:
        """See `LearnerState.backward`. No example counts as correct."""
        self.params.g.zero_()
        loss_sum, _ = self.loss(self.model, batch)
        if not loss_sum.requires_grad:
            raise InputError("train_model: the loss does not depend on the model that the loss function was given")
        with self.params.notify_buckets(on_bucket):
            (loss_sum / loss_denominator).backward()
        return loss_sum.detach(), torch.zeros((), device=self.device)


class ModelRun:
    """One training run of a user's model (`trainable.Trainable`), as one learner sees it.

    Args:
        model: the model.
        data: its batches.
        loss: see `train_model`.
        strategy: makes the strategy.
        options: options of the training loop.
        validate: see `train_model`.
        out: folder of the run, or None.
        team: this learner's end of the team.
    """

    unit = "examples"
    remedy = "lower lr, or set clip_norm of the optimizer"

    def __init__(
        self, model: nn.Module, data: ListData | LoaderData, loss: Loss,
        strategy: Callable[[FlatParams, Optimizer, Team], Strategy], options: TrainOptions,
        validate: Callable[[nn.Module], float] | None, out: str | Path | None, team: Team,
    ) -> None:  # fmt: skip
        if out is not None and not team.rejoins:
            ownership.check_own_dir(Path(out), "train_model")  # before any learner writes there
        if team.size > 1:
            _check_dtypes(model)
        _share_first_weights(model, team)
        self.loader, self.options, self.learners, self.provenance = data, options, team.size, dict[str, object]()
        self._model, self._loss, self._factory, self._validate = model, loss, strategy, validate
        self._parameters = [(module, dict(module._parameters)) for module in model.modules()]
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError("train_model: the model has no parameter that is trained (requires_grad)")
        self._whole = deepcopy(model)  # a strategy may take parameters out of `model`
        try:
            self._whole_params = FlatParams(self._whole)
        except ValueError as error:
            raise InputError(f"train_model: {error}; give a model whose trained parameters do") from error
        self.num_weights = len(self._whole_params)
        self.validation = None if validate is None else ""
        self._has_files, self.out = out is not None, Path(out) if out is not None else Path("train_model")
        if out is None:
            self.run_log: RunLog = NoRunLog(options.epochs)
        else:
            ownership.mark_own_dir(self.out, "train_model")
            plain = {"epochs": options.epochs, "optimizer": asdict(options.optimizer)}
            self.run_log = RunLog(self.out, NoTracker(), TrainingBar(options.epochs), plain)
        self._plan: EpochOrder | None = None

    def learner(self, team: Team) -> tuple[AnyState, Strategy]:
        """Makes a learner of `team` and its strategy."""
        params = FlatParams(self._model)
        strategy = self._factory(params, Optimizer(params, self.options.optimizer), team)
        if isinstance(strategy, ParameterServerStrategy):
            self.learners = team.size - strategy.dedicated_servers
        strategy.attach(self._model, self._summed_loss, partial(first_batch, self, team.rank))
        device = params.w.device
        return AnyState(
            self._model, strategy.params, strategy.optimizer, self.loader, self.options, device, self._summed_loss
        ), strategy

    def plan(self, epoch: int) -> EpochOrder:
        """Returns the batches of an epoch."""
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = self.loader.plan(epoch)
        return self._plan

    def validator(self, w: Tensor, statistics: Mapping[str, Tensor]) -> tuple[float, float]:
        """Returns the user's held-out loss of weights [N] and running statistics, and 0."""
        self._load_whole(w, statistics)
        assert self._validate is not None
        self._whole.eval()
        with torch.no_grad():
            loss = self._validate(self._whole)
        if not isinstance(loss, Real) and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise InputError(f"train_model: validate returned a {type(loss).__name__}; return a number")
        return float(loss), 0.0

    def save_best(
        self, path: Path, record: Mapping[str, float], weights_N: Tensor, statistics: Mapping[str, Tensor]
    ) -> None:
        """Saves weights and running statistics."""
        if self._has_files:
            self._load_whole(weights_N, statistics)
            write_torch({"model": self._whole.state_dict(), **record}, path)

    def checkpoints(self, strategy: str) -> Checkpoints:
        """Returns the run's checkpoints. Those of another model, data, rule or strategy are refused."""
        if not self._has_files:
            return NoCheckpoints()
        options, plan = self.options, self.loader.plan(0)
        shapes = [list(parameter.shape) for parameter in self._whole.parameters()]
        decides = [options.seed, asdict(options.optimizer), asdict(options.schedule), strategy, self.learners, shapes]
        digests = self.loader.digests(plan, 0, len(plan))
        fingerprint = hashlib.sha256(json.dumps([decides, digests, list(plan.sizes)]).encode()).hexdigest()[:16]
        return Checkpoints(self.out / "checkpoints", fingerprint)

    def epochs_done(self) -> int:
        """Returns how many epochs an earlier call has finished, 0 if its summary.json cannot be read."""
        try:
            return int(json.loads((self.out / "summary.json").read_text(encoding="utf-8"))["epochs_done"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def finish(self, w: Tensor) -> None:
        """Gives the user's model all of its parameters again, with the weights [N]."""
        self._load_whole(w, running_statistics(self._model))
        for module, parameters in self._parameters:
            for name in parameters.keys() - module._parameters.keys():
                delattr(module, name)
            module._parameters.clear()  # so that they keep their order
            module._parameters.update(parameters)
        FlatParams(self._model).w.copy_(self._whole_params.w)

    def _load_whole(self, w: Tensor, statistics: Mapping[str, Tensor]) -> None:
        self._whole_params.w.copy_(w)
        load_statistics(self._whole, statistics)

    def _summed_loss(self, model: nn.Module, batch: OneBatch) -> tuple[Tensor, float]:
        """Returns the loss summed over the examples of a batch, and their number."""
        found = self._loss(model, batch.content)
        if isinstance(found, Tensor):
            if found.numel() != 1:
                raise InputError(
                    f"train_model: the loss has shape {list(found.shape)}; return its mean, or its sum and the number "
                    "of examples"
                )
            return found.reshape(()) * batch.frames, float(batch.frames)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
            raise InputError(
                f"train_model: the loss function returned a {type(found).__name__}; return the mean loss as a tensor, "
                "or its sum and the number of examples"
            )
        loss_sum, examples = found
        if examples != batch.frames:
            raise InputError(
                f"train_model: the loss counts {examples} examples in a batch of {batch.frames}; give `sizes`, the "
                "examples of each batch"
            )
        return loss_sum, float(examples)


def _check_dtypes(model: nn.Module) -> None:
    """Raises InputError if learners, which exchange float32, would round trained parameters or refuse them."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise InputError(
                f"train_model: parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and learners "
                "exchange float32; call model.float(), and use torch.autocast in the loss for arithmetic in bfloat16"
            )


def _share_first_weights(model: nn.Module, team: Team) -> None:
    """Gives all learners parameters and buffers of learner 0. A restarted learner copies others' weights later."""
    if team.size == 1 or team.rejoins:
        return
    tensors = [tensor.detach() for tensor in itertools.chain(model.parameters(), model.buffers())]
    own = torch.cat(numbers := [as_numbers(tensor) for tensor in tensors])
    rows = team.gather(own if team.rank == 0 else own[:0])
    if len(first := rows.get(0, own)) != len(own):  # learner 0 may have died, and `Trainer` compares the others
        raise InputError("train_model: the learners have different models")
    for tensor, part in zip(tensors, first.split([len(x) for x in numbers]), strict=True):
        set_numbers(tensor, part)
