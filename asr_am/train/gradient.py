"""The two computations of training: the gradient of a batch, and the loss on held-out examples.

Shapes: B chunks, T frames, F features, N parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, Leases, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.egs.loader import Batch, Loader
from asr_am.egs.stateless_rng import seed_of
from asr_am.errors import InputError
from asr_am.models.acoustic import AcousticModel
from asr_am.train.cuda_graph import GraphedGradient
from asr_am.train.frame_loss import batch_loss
from asr_am.train.schedule import Schedule
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainable import Batch as AnyBatch
from asr_am.train.trainable import LearnerState, Plan, load_statistics, running_statistics

log = logging.getLogger(__name__)

BatchLoss = Callable[[AcousticModel, Tensor, Tensor | None, Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""Loss and number of correct frames, both summed over frames (`frame_loss.batch_loss`, `mmi_loss.MmiLoss`)."""


def matrix_dtype(options: TrainOptions) -> torch.dtype:
    """Returns the dtype of matrix products."""
    return torch.bfloat16 if options.precision == "bfloat16" else torch.float32


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host without waiting for the GPU, which needs pinned memory for that."""
    pinned = device.type == "cuda" and not x.is_cuda
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seeds torch's generators.

    torch.manual_seed would also record its call stack for each kind of accelerator that is absent, 0.1 ms a batch.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


@dataclass
class ModelState:
    """One learner's acoustic model and all that its gradients need (`trainable.LearnerState`).

    Attributes:
        model: the network.
        params: its weights and gradients as flat vectors.
        optimizer: the update rule, which receives the learning rate of each step.
        loader: training examples.
        options: options of the run.
        device: where the model is.
        loss: the loss of a batch.
        makes_graph: whether a GPU computes batches of the usual size by a CUDA graph, if it can.
        graph: that graph, from the first such batch on.
    """

    model: AcousticModel
    params: FlatParams
    optimizer: Optimizer
    loader: Loader
    options: TrainOptions
    device: torch.device
    loss: BatchLoss = batch_loss
    makes_graph: bool = True
    graph: GraphedGradient | None = field(default=None, init=False)

    def backward(self, batch: Batch, loss_denominator: float, on_bucket: BucketHook | None) -> tuple[Tensor, Tensor]:
        """See `LearnerState.backward`. Computes the batch in `options.accumulation` parts."""
        if replayed := self._replay(batch, loss_denominator):
            self.params.notify_all_buckets(on_bucket)
            return replayed
        self.params.g.zero_()
        loss_sum, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        size = -(-len(batch.lengths_B) // self.options.accumulation)
        parts = list(zip(*(t.split(size) for t in (batch.x_BTF, batch.targets_BT, batch.lengths_B)), strict=True))
        for k, (x_BTF, targets_BT, lengths_B) in enumerate(parts):
            x_BTF, targets_BT = (to_device(t, self.device) for t in (x_BTF, targets_BT))
            part_loss, part_correct = self._batch_loss(x_BTF, targets_BT, lengths_B)
            with self.params.notify_buckets(on_bucket if k == len(parts) - 1 else None):
                (part_loss / loss_denominator).backward()
            loss_sum += part_loss.detach()
            correct += part_correct
        return loss_sum, correct

    def _batch_loss(self, x_BTF: Tensor, targets_BT: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(self.model, x_BTF, lengths_B, targets_BT, matrix_dtype(self.options))

    def _replay(self, batch: Batch, loss_denominator: float) -> tuple[Tensor, Tensor] | None:
        """Computes a batch of the usual size by a CUDA graph. Returns None for others, and where there is no graph."""
        if self.device.type != "cuda" or self.options.accumulation > 1 or len(batch) < self.loader.batch_size:
            return None
        inputs = batch.x_BTF, batch.targets_BT, batch.lengths_B, torch.tensor(loss_denominator)
        if self.makes_graph:
            self.makes_graph = False
            on_gpu = [x.to(self.device) for x in inputs]
            try:
                self.graph = GraphedGradient(self._gradient, on_gpu, [*running_statistics(self.model).values()])
            except RuntimeError as error:
                reason = str(error).split("\n")[0]
                log.info("no CUDA graph of this training (%s): its kernels are launched one by one", reason)
        if self.graph is None or not self.graph.fits(*inputs):
            return None
        return self.graph(*(x if x.is_cuda else x.pin_memory() for x in inputs))

    def _gradient(
        self, x_BTF: Tensor, targets_BT: Tensor, lengths_B: Tensor, denominator: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.params.g.zero_()
        loss, correct = self._batch_loss(x_BTF, targets_BT, lengths_B)
        (loss / denominator).backward()
        return loss.detach(), correct.float()


class GradientComputer:
    """The gradient closure of one segment: each call leases a batch and runs forward and backward on it.

    Args:
        model_state: this learner's model.
        plan: the batches of the epoch.
        leases: hands out the batches of the segment.
        schedule: learning rates of the epoch.
        read_ahead: assemble batches in advance if the leases are known in advance.
    """

    def __init__(
        self, model_state: LearnerState, plan: Plan, leases: Leases, schedule: Schedule, read_ahead: bool
    ) -> None:
        self._model_state, self._plan, self._schedule = model_state, plan, schedule
        self._leases: Iterator[Lease] = iter(leases.lease, None)
        self._batches: Iterator[AnyBatch] | None = None
        if read_ahead and leases.ahead:
            known = list(self._leases)
            self._leases = iter(known)
            numbers = [lease.batch for lease in known if lease.batch is not None]
            self._batches = model_state.loader.batches(plan, numbers)

    def stop(self) -> None:
        """Ends the batches that were leased in advance. Those of a queue end with the queue."""
        if self._batches is not None:
            self._leases = iter(())

    def __call__(self, on_bucket: BucketHook | None) -> StepResult | None:
        """Computes the next gradient into `params.g`. Returns None when the segment has no batch left."""
        lease = next(self._leases, None)
        if lease is None:
            return None
        learner, epoch = self._model_state, self._plan.epoch
        lr = self._schedule.rate(epoch, lease.progress, lease.updates)
        if not 0 <= lr < math.inf:
            raise InputError(f"epoch {epoch + 1}: the learning rate is {lr}; correct the schedule")
        learner.optimizer.lr = lr
        if lease.batch is None:  # an idle turn: a gradient of zero, so that all learners take part in the step
            learner.params.g.zero_()
            learner.params.notify_all_buckets(on_bucket)
            return StepResult(lease, 0, 0, lr, torch.zeros(()), torch.zeros(()))
        batch = next(self._batches) if self._batches else learner.loader.batch(self._plan, lease.batch)
        # Dropout depends on the batch and not on the learner that leased it.
        seed_dropout(seed_of(learner.options.seed, epoch, batch.id), learner.device)
        loss_sum, correct = learner.backward(batch, lease.loss_denominator, on_bucket)
        return StepResult(lease, batch.frames, len(batch), lr, loss_sum, correct, digest=batch.digest)


class Validator:
    """Loss and frame error on held-out examples, computed with a copy of the model.

    Args:
        model: a model of the run.
        loader: held-out examples.
        options: options of the run.
        device: where to compute.
        loss: the loss of a batch.
    """

    def __init__(
        self, model: AcousticModel, loader: Loader, options: TrainOptions, device: torch.device,
        loss: BatchLoss = batch_loss,
    ) -> None:  # fmt: skip
        self.model = deepcopy(model).eval()
        self._params = FlatParams(self.model)
        self._plan = loader.plan(0)
        self._loader, self._options, self._device, self._loss = loader, options, device, loss

    @torch.no_grad()
    def load(self, w: Tensor, statistics: Mapping[str, Tensor] | None = None) -> None:
        """Gives the copy weights [N] and running statistics."""
        self._params.w.copy_(w)
        load_statistics(self.model, statistics or {})

    @torch.no_grad()
    def __call__(self, w: Tensor, statistics: Mapping[str, Tensor] | None = None) -> tuple[float, float]:
        """Returns the mean loss per frame and the share of wrong frames.

        Args:
            w: weights [N].
            statistics: the model's running statistics.
        """
        self.load(w, statistics)
        sums_2 = torch.zeros(2, dtype=torch.float64, device=self._device)
        frames, dtype = 0, matrix_dtype(self._options)
        for batch in self._loader.batches(self._plan, range(len(self._plan))):
            x_BTF, targets_BT = (to_device(t, self._device) for t in (batch.x_BTF, batch.targets_BT))
            sums_2 += torch.stack(self._loss(self.model, x_BTF, batch.lengths_B, targets_BT, dtype))
            frames += batch.frames
        loss, correct = sums_2.tolist()
        return loss / frames, 1.0 - correct / frames
