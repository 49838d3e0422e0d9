"""What the training loop needs of a model and its data: an acoustic model (`run_setup`) or a language model (`lm`).

    Trainable           one run: options, batches of an epoch, validation, files (ForkedRun: opened for all learners)
      Data              the batches, which any learner can assemble by number
      LearnerState      one learner's model, with its dense parameters as flat vectors

A batch is counted in frames: frames of speech, or units of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.run_log import RunLog
from asr_am.train.train_options import TrainOptions


class Batch(Protocol):
    """Examples of one gradient: number in the epoch, frames, and identity (`Data.digests`)."""

    @property
    def id(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def digest(self) -> int: ...
    def __len__(self) -> int: ...


class Plan(Protocol):
    """Examples of one epoch, `batch_size` of them in a batch, in the order of training.

    Its length is the number of batches.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_examples(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    def __len__(self) -> int: ...

    def frames(self, rows: slice) -> np.ndarray:
        """Returns the frames of consecutive examples."""
        ...

    def in_batches_of(self, batch_size: int) -> Plan:
        """Returns the plan of a learner of a team of another size, whose batches are larger or smaller."""
        ...


class Data(Protocol):
    """The training batches."""

    def batch(self, plan: Any, number: int) -> Batch: ...
    def batches(self, plan: Any, numbers: Iterable[int]) -> Iterator[Batch]: ...
    def digests(self, plan: Any, first: int, end: int) -> tuple[int, ...]: ...


class LearnerState(Protocol):
    """One learner's model and all that its gradients need."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def params(self) -> FlatParams: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def loader(self) -> Data: ...
    @property
    def options(self) -> TrainOptions: ...
    @property
    def device(self) -> torch.device: ...

    def backward(self, batch: Any, loss_denominator: float, on_bucket: BucketHook | None) -> tuple[Tensor, Tensor]:
        """Fills `params.g` with the gradient of summed loss / `loss_denominator`.

        Args:
            batch: the examples.
            loss_denominator: frames to divide the loss by.
            on_bucket: called as soon as a bucket of gradients is complete.

        Returns:
            Summed loss and number of correct frames, both scalars on the device.
        """
        ...


class Trainable(Protocol):
    """One run.

    Attributes:
        unit: what a frame of a batch is called.
        remedy: what to do about a loss that is not finite.
        validation: what is measured on held-out data beside the loss: "frame error", where the model has a right class
            for each frame, "perplexity", or "" for nothing. None: there is no validation, and the best epoch is the
            one with the lowest training loss.
        learners: number of ranks that compute gradients. Known when `learner` has returned.
        validator: returns held-out loss per frame and share of wrong frames (0 without "frame error") of weights [N]
            and running statistics by name (`running_statistics`).
    """

    unit: str
    remedy: str
    validation: str | None
    out: Path
    options: TrainOptions
    learners: int
    run_log: RunLog
    provenance: dict[str, object]

    @property
    def num_weights(self) -> int: ...
    @property
    def loader(self) -> Data: ...
    @property
    def validator(self) -> Callable[[Tensor, Mapping[str, Tensor]], tuple[float, float]]: ...

    def learner(self, team: Team) -> tuple[LearnerState, Strategy]:
        """Makes a learner of `team` and its strategy. All learners call it."""
        ...

    def plan(self, epoch: int) -> Plan:
        """Returns the batches of an epoch."""
        ...

    def save_best(
        self, path: Path, record: Mapping[str, float], weights_N: Tensor, statistics: Mapping[str, Tensor]
    ) -> None:
        """Saves the model with these weights and running statistics, with the record of its epoch."""
        ...

    def checkpoints(self, strategy: str) -> Checkpoints:
        """Returns the run's checkpoints. Those of other options, learners or examples are refused."""
        ...


class ForkedRun(Trainable, Protocol):
    """A run that a process opens once for all learners that it forks (`fork_server`)."""

    def warm_up(self) -> None:
        """Makes the first weights and computes one loss on the CPU, so that learners find done what is slow the first
        time. Starts no thread if torch uses one. So there is no backward pass: autograd may start threads.
        """
        ...


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers by name, such as the statistics that normalisation layers gather in training. They are no
    parameters, so no strategy sees them: learners average them when they are drained. `fixed_buffers` are left out.
    """
    fixed = getattr(model, "fixed_buffers", ())
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name not in fixed}


@torch.no_grad()
def load_statistics(model: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    """Gives a model running statistics of another copy, which may have replaced some by others of another shape."""
    for name, given in statistics.items():
        module, _, key = name.rpartition(".")
        buffers = model.get_submodule(module)._buffers
        own = buffers.get(key)
        if own is None or own.shape != given.shape:
            target = own if own is not None else next(model.parameters(), given)
            buffers[key] = given.to(target.device, copy=True)
        elif not torch.equal(own, given.to(own)):  # constants may be expanded: they cannot be written to
            own.copy_(given)


def as_numbers(statistic: Tensor) -> Tensor:
    """Returns the elements as float64 on the CPU, the parts of complex ones one after the other."""
    real = torch.view_as_real(statistic) if statistic.is_complex() else statistic
    return real.reshape(-1).double().cpu()


def set_numbers(statistic: Tensor, numbers: Tensor) -> None:
    """Sets the elements to those that `as_numbers` has returned."""
    real = torch.view_as_real(statistic) if statistic.is_complex() else statistic
    if not torch.equal(real, values := numbers.view(real.shape).to(real)):  # as above
        real.copy_(values)


def first_batch(run: Trainable, rank: int) -> Batch | None:
    """Returns a batch of the first epoch, another one for each learner. None if there are fewer."""
    plan = run.plan(0)
    return run.loader.batch(plan, rank) if rank < len(plan) else None
