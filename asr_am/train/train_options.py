"""The options of a training run: those that change its result, and those that change its speed.

`device`, `threads` and `workers` change a result by rounding at most, as the order of additions depends on them. Under
an asynchronous strategy they also change which learner is ahead. So do the number of cores and their load, and no two
runs of adpsgd, ps_async and psp on real processes are the same. Two runs have the same bits if the strategy is
synchronous or the cluster virtual, and device, number of threads, kind of CPU and versions of libraries are the same.
On a GPU, cuBLAS has a fixed workspace for that (CUBLAS_WORKSPACE_CONFIG), and no sum is made by atomic additions but
that of gradient compression, which is exact in any order. One H200 has confirmed it (scripts/gpu_check.sh).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.egs.augment import Masking
from asr_am.egs.epoch_plan import BUFFER
from asr_am.errors import InputError
from asr_am.extensions import class_path
from asr_am.models.acoustic import ModelOptions, model_options
from asr_am.models.blstm import BlstmOptions
from asr_am.options import build
from asr_am.train.chain_loss import ChainOptions
from asr_am.train.ctc_loss import CtcOptions
from asr_am.train.identity import MORE_OF_THE_SAME, deciding
from asr_am.train.mmi_loss import MmiOptions
from asr_am.train.schedule import Anneal, Newbob, Schedule, make_schedule


@dataclass(frozen=True)
class TrainOptions:
    """Options of one run.

    Attributes:
        epochs: number of epochs.
        batch_size: chunks of a batch, of all learners together.
        seed: seed of weights, order of examples and dropout.
        optimizer: the update rule.
        schedule: learning rates.
        model: the network.
        masking: masking of features and frames.
        ivector_noise: standard deviation of noise on i-vectors, in units of each dimension's own.
        random_offset: cut utterances into chunks at other frames in each epoch.
        init: best.pt whose weights to start with. None: random weights.
        subset: share of the training utterances to use. It does not depend on the seed.
        one_speed: an epoch has each utterance at one of its speeds, in turn. False: at all of them.
        shuffle_buffer: chunks that are shuffled together. Memory should hold twice as many.
        chunk: frames of a chunk. 0: as the examples say.
        mmi: train with the MMI loss and these options. None: with the cross-entropy.
        chain: train with the loss of chain models and these options, instead.
        ctc: train with the loss of CTC and these options, instead.
        with_dev: train on the set dev, too. There is no held-out loss then, and the epoch with the least training loss
            is kept.
        label_smoothing: share of the target distribution that is uniform.
        accumulation: parts in which a batch is computed, to save memory.
        precision: dtype of the matrix products. Weights and softmax are float32. On a GPU, float32 products are TF32.
        device: auto takes the GPU if there is one.
        threads: threads of arithmetic on the CPU. 0: one per core for a single learner, 1 for virtual learners and in
            each of several processes.
        workers: threads that read examples.
        report_every: updates between two lines of metrics.jsonl.
        checkpoint_every: updates between two checkpoints.
        checkpoint_minutes: minutes between two checkpoints, by the speed so far. `checkpoint_every` is then for the
            first one only. 0: by updates.
    """

    epochs: int = 16
    batch_size: int = 256
    seed: int = 1
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: Schedule = field(default_factory=Anneal)
    model: ModelOptions = field(default_factory=BlstmOptions)
    masking: Masking = field(default_factory=Masking)
    ivector_noise: float = 0.0
    random_offset: bool = False
    init: str | None = None
    subset: float = 1.0
    one_speed: bool = False
    shuffle_buffer: int = BUFFER
    chunk: int = 0
    mmi: MmiOptions | None = None
    chain: ChainOptions | None = None
    ctc: CtcOptions | None = None
    with_dev: bool = False
    label_smoothing: float = 0.0
    accumulation: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    workers: int = 1
    report_every: int = 50
    checkpoint_every: int = 500
    checkpoint_minutes: float = 0.0

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        positive = ("epochs", "batch_size", "accumulation", "report_every", "checkpoint_every", "shuffle_buffer")
        for name in positive:
            if getattr(self, name) < 1:
                raise InputError(f"train.{name}={getattr(self, name)}: must be at least 1")
        if not all(0 <= share < 1 for share in (self.label_smoothing, self.optimizer.momentum)):
            raise InputError("train.label_smoothing and train.optimizer.momentum must be at least 0 and below 1")
        if self.chunk < 0:
            raise InputError(f"train.chunk={self.chunk}: must be at least 1, or 0 for that of the examples")
        losses = [f"train.{name}" for name in ("mmi", "chain", "ctc") if getattr(self, name)]
        if len(losses) > 1:
            raise InputError(f"{' and '.join(losses)}: give one of them")
        if losses and self.label_smoothing:
            raise InputError(f"train.label_smoothing: is for the cross-entropy, not for {losses[0]}; set it to 0")
        if (self.mmi or self.chain) and isinstance(self.schedule, Newbob):
            raise InputError(
                "schedule=newbob: compares shares of the held-out loss, which may be negative with train.mmi or "
                "train.chain; use schedule=small"
            )
        if not 0 < self.subset <= 1:
            raise InputError(f"train.subset={self.subset}: must be above 0 and at most 1")
        not_negative = (self.optimizer.weight_decay, self.optimizer.clip_norm, self.workers, self.threads)
        if not min(*not_negative, self.ivector_noise, self.checkpoint_minutes) >= 0:
            raise InputError(
                "train.optimizer.weight_decay, train.optimizer.clip_norm, train.workers, train.threads, "
                "train.ivector_noise and train.checkpoint_minutes must not be negative"
            )
        if min(asdict(self.masking).values()) < 0 or self.masking.streams < 1:
            raise InputError("train.masking: no value may be negative, and streams must be at least 1")
        if self.optimizer.kind == "nesterov" and self.optimizer.momentum == 0:
            raise InputError("train.optimizer.kind=nesterov: needs train.optimizer.momentum above 0")

    @classmethod
    def build(
        cls, train: Mapping[str, Any], model: Mapping[str, Any], schedule: Mapping[str, Any], seed: int
    ) -> TrainOptions:
        """Builds the options from plain values of the configuration's groups.

        Args:
            train: group `train`.
            model: group `model`, without its name.
            schedule: group `schedule`.
            seed: the seed.

        Raises:
            InputError: an option is unknown, of another type or out of range.
        """
        parts = {
            "optimizer": build(OptimizerOptions, train.get("optimizer", {}), "train.optimizer"),
            "masking": build(Masking, train.get("masking", {}), "train.masking"),
            "model": model_options(**model),
            "schedule": make_schedule(**schedule),
            "seed": seed,
            "mmi": build(MmiOptions, train["mmi"], "train.mmi") if train.get("mmi") else None,
            "chain": build(ChainOptions, train["chain"], "train.chain") if train.get("chain") else None,
            "ctc": build(CtcOptions, train["ctc"], "train.ctc") if train.get("ctc") else None,
        }
        return build(cls, {**train, **parts}, "train")

    def plain(self) -> dict[str, Any]:
        """Returns the options as nested plain values."""
        return asdict(self)

    def fingerprint(self) -> str:
        """Returns a digest of the options that change the result. A run is not resumed under another one."""
        values = {name: value for name, value in deciding(asdict(self)).items() if name not in MORE_OF_THE_SAME}
        if not self.with_dev:  # so that runs of earlier versions are resumed
            del values["with_dev"]
        values["classes"] = [class_path(self.model), class_path(self.schedule)]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
