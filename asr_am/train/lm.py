"""Training of a recurrent language model by the loop of the acoustic models (`trainer`).

    LmRun        what the loop needs: model, batches (`lm_text`), dev perplexity, best.pt
    finish       summary.json and lm.json of the best model

The run's directory has best.pt (`asr_am.models.lm_file`), metrics.jsonl, leases.jsonl, summary.json, lm.json and
checkpoints.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asr_am.data.textfile import write_lines
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from asr_am.lang.mixture import counted, perplexity
from asr_am.lang.units import Units
from asr_am.models.lm_file import load_lm, save_lm
from asr_am.models.lm_scorer import word_logprobs
from asr_am.models.lstm_lm import LstmLm, LstmLmOptions
from asr_am.options import build
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.lm_text import LmBatch, LmData, LmPlan, Text
from asr_am.train.run_log import RunLog, TrainingBar
from asr_am.train.run_setup import StrategyFactory, check_batch, training_device
from asr_am.train.schedule import Plateau
from asr_am.train.tracking import NoTracker, Tracker
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainable import first_batch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LmOptions:
    """Options of a language model and its training.

    Attributes:
        epochs: maximum number of epochs.
        batch_size: sentences of a batch, of all learners together.
        longest: units after which a sentence is cut.
        rate: first learning rate.
        decay: factor on the rate after each epoch that did not lower dev perplexity by 0.1 percent.
        patience: number of such epochs in a row that ends the training.
        accumulator: first value of Adagrad's sums.
        clip_norm: upper limit of the gradient's norm. 0: none.
        seed: seed of weights, order of batches and dropout.
        device: auto takes the GPU if there is one.
        threads: threads of arithmetic of each learner on the CPU.
        report_every: updates between two lines of metrics.jsonl.
        checkpoint_every: updates between two checkpoints. There is also one after each epoch.
    """

    model: LstmLmOptions = field(default_factory=LstmLmOptions)
    epochs: int = 30
    batch_size: int = 32
    longest: int = 100
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
    rate: float = 0.003
    decay: float = 0.5
    patience: int = 3
    accumulator: float = 1e-6
    clip_norm: float = 1.0
    seed: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    report_every: int = 100
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        positive = ("epochs", "batch_size", "longest", "patience", "threads", "report_every", "checkpoint_every")
        for name in positive:
            if getattr(self, name) < 1:
                raise InputError(f"lm.train.{name}={getattr(self, name)}: must be at least 1")
        if self.rate <= 0 or not 0 < self.decay <= 1 or self.clip_norm < 0 or self.accumulator < 0:
            raise InputError(
                "lm.train: rate must be above 0, decay above 0 and at most 1, clip_norm and accumulator not negative"
            )

    @classmethod
    def build(cls, model: Mapping[str, Any], train: Mapping[str, Any]) -> LmOptions:
        """Builds the options from plain values. Raises InputError if one is unknown or of another type."""
        return build(cls, {"model": build(LstmLmOptions, model, "lm.model"), **train}, "lm.train")

    def train_options(self) -> TrainOptions:
        """Returns the options of the training loop, which leave `model` and `longest` out."""
        optimizer = OptimizerOptions(
            self.optimizer, momentum=0.9 if self.optimizer == "adam" else 0.0, clip_norm=self.clip_norm,
            accumulator=self.accumulator,
        )  # fmt: skip
        return TrainOptions(
            epochs=self.epochs, batch_size=self.batch_size, seed=self.seed, optimizer=optimizer,
            schedule=Plateau(self.rate, self.decay, self.patience), device=self.device, threads=self.threads,
            report_every=self.report_every, checkpoint_every=self.checkpoint_every,
        )  # fmt: skip


@dataclass(frozen=True)
class HeldOutText:
    """Transcripts of a set.

    Attributes:
        sentences: words of each utterance.
        vocabulary: words of the lexicon, the only ones that perplexity counts.
    """

    sentences: Sequence[Sequence[str]]
    vocabulary: Sequence[str]

    def perplexity(self, model: LstmLm, units: Units) -> float:
        """Returns the perplexity per word and sentence end, words outside the vocabulary left out."""
        return perplexity(word_logprobs(model, units, self.sentences), counted(self.sentences, self.vocabulary))


@dataclass
class LmState:
    """One learner's language model (`trainable.LearnerState`).

    Attributes:
        params: its dense weights and gradients as flat vectors.
        optimizer: the update rule, which receives the learning rate of each step.
        loader: training text.
        device: where the model is.
    """

    model: LstmLm
    params: FlatParams
    optimizer: Optimizer
    loader: LmData
    options: TrainOptions
    device: torch.device

    def backward(self, batch: LmBatch, loss_denominator: float, on_bucket: BucketHook | None) -> tuple[Tensor, Tensor]:
        """See `LearnerState.backward`. No unit counts as correct."""
        self.params.g.zero_()
        with self.params.notify_buckets(on_bucket):
            loss_sum, _ = summed_loss(self.model, batch)
            (loss_sum / loss_denominator).backward()
        return loss_sum.detach(), torch.zeros((), device=self.device)


def summed_loss(model: nn.Module, batch: LmBatch) -> tuple[Tensor, float]:
    """Returns the loss summed over the units of a batch, and their number."""
    assert isinstance(model, LstmLm)
    device, model.dropout.part = next(model.parameters()).device, batch.part
    return model(batch.input_BT.to(device), batch.target_BT.to(device)) * batch.frames, float(batch.frames)


class LmRun:
    """One training run of a language model (`trainable.Trainable`).

    Args:
        dev: sentences for the perplexity that decides rate, best model and end.
        learners: number of learners that share a batch.
        provenance: origin of the run, for summary.json and the model file.
        share_gpus: several learners may compute on one GPU.

    Raises:
        InputError: the batch cannot be divided, or there is no GPU.
    """

    unit = "units"
    remedy = "lower lm.train.rate"
    validation: str | None = "perplexity"

    def __init__(
        self, out: Path, options: LmOptions, units: Units, text: Text, dev: HeldOutText,
        strategy: StrategyFactory = Local, *, learners: int = 1, tracker: Tracker | None = None,
        provenance: Mapping[str, object] | None = None, share_gpus: bool = False,
    ) -> None:  # fmt: skip
        check_batch(options.batch_size, learners, "lm.")
        self.out, self.units, self.text, self.dev, self.learners = out, units, text, dev, learners
        self.options, self.provenance, self._factory = options.train_options(), dict(provenance or {}), strategy
        self._model_options = options.model
        self.device = training_device(self.options, share_gpus)
        self.loader = LmData(text, options.batch_size, learners, options.seed)
        out.mkdir(parents=True, exist_ok=True)
        self.run_log = RunLog(out, tracker or NoTracker(), TrainingBar(options.epochs), asdict(options))
        self._plan: LmPlan | None = None

    @cached_property
    def _start(self) -> LstmLm:
        torch.manual_seed(self.options.seed)
        return LstmLm(self._model_options, len(self.units))

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        return sum(parameter.numel() for parameter in self._start.parameters())

    def model(self) -> LstmLm:
        """Returns the network with its first weights, the same for every learner."""
        return deepcopy(self._start).to(self.device)

    def learner(self, team: Team) -> tuple[LmState, Strategy]:
        """Makes a learner of `team` and its strategy."""
        params = FlatParams(model := self.model())
        strategy = self._factory(params, Optimizer(params, self.options.optimizer), team)
        strategy.attach(model, summed_loss, partial(first_batch, self, team.rank))
        return LmState(model, strategy.params, strategy.optimizer, self.loader, self.options, self.device), strategy

    def warm_up(self) -> None:
        """See `ForkedRun.warm_up`."""
        summed_loss(self.model(), self.loader.batch(self.plan(0), 0))

    def plan(self, epoch: int) -> LmPlan:
        """Returns the batches of an epoch. Caches one plan, as all learners ask for the same."""
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = self.loader.plan(epoch)
        return self._plan

    @cached_property
    def validator(self) -> LmValidator:
        """Computes the dev perplexity."""
        return LmValidator(self.model(), self.units, self.dev)

    def save_best(
        self, path: Path, record: Mapping[str, float], weights_N: Tensor, statistics: Mapping[str, Tensor]
    ) -> None:
        """Saves the model with these weights. It has no running statistics."""
        self.validator.load(weights_N)
        info = {"epoch": record["epoch"], "dev_perplexity": record["heldout_perplexity"], **self.provenance}
        save_lm(path, self.validator.model, self.units, info)

    def checkpoints(self, strategy: str) -> Checkpoints:
        """Returns the run's checkpoints. Those of other options, learners or texts are refused."""
        text = f"{len(self.units)}-{len(self.text)}-{zlib.crc32(self.text.unit_M.tobytes()):08x}"
        model = ",".join(map(str, astuple(self._model_options)))
        fingerprint = f"{self.options.fingerprint()}-{strategy}-{model}-{text}"
        return Checkpoints(self.out / "checkpoints", fingerprint)


class LmValidator:
    """Logarithm of the dev perplexity, computed with a copy of the model."""

    def __init__(self, model: LstmLm, units: Units, dev: HeldOutText) -> None:
        self.model, self._units, self._dev = model.eval(), units, dev
        self._params = FlatParams(model)

    def load(self, w: Tensor) -> None:
        """Gives the copy the weights `w` [N]."""
        self._params.w.copy_(w)

    def __call__(self, w: Tensor, statistics: Mapping[str, Tensor] | None = None) -> tuple[float, float]:
        """Returns the logarithm under the weights `w` [N], and 0. The model has no running statistics."""
        self.load(w)
        return math.log(self._dev.perplexity(self.model, self._units)), 0.0


def finish(out: Path, name: str, source: Path, dev: HeldOutText, test: HeldOutText) -> None:
    """Adds the best model's perplexities to summary.json, and writes lm.json, which the report reads."""
    model, units, _ = load_lm(out / "best.pt")
    values = {"dev_perplexity": dev.perplexity(model, units), "test_perplexity": test.perplexity(model, units)}
    words = sum(map(len, dev.sentences))
    described = {
        "name": name, "source": source.name, "parameters": sum(p.numel() for p in model.parameters()),
        "units": len(units), **values, "dev_sentences": len(dev.sentences), "dev_words": words,
        "dev_oov": words + len(dev.sentences) - int(counted(dev.sentences, dev.vocabulary).sum()),
    }  # fmt: skip
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    write_lines(out / "lm.json", [json.dumps(described, indent=1)])
    write_lines(out / "summary.json", [json.dumps(summary | described, indent=1)])
    log.info("language model %s: perplexity of dev %.2f, of test %.2f", name, *values.values())
