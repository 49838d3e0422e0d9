"""Training of a recurrent language model by the loop of the acoustic models (`trainer`).

    read_text    a text and the words of the lexicon -> units, and rows of units
    LmData       rows -> batches. A batch of one learner is a part of a batch of all
    LmRun        what the loop needs: model, batches, dev perplexity, best.pt
    finish       summary.json and lm.json of the best model

The run's directory has best.pt (`asr_am.model.lm_file`), metrics.jsonl, leases.jsonl, summary.json, lm.json and
checkpoints.

Shapes: M units of the text, R rows (sentences, long ones in pieces), N rows of an epoch in the order of training, B
rows of a batch, T units of its longest.
"""

from __future__ import annotations

import array
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from asr_am.data.textfile import write_lines
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.egs.stateless_rng import combine
from asr_am.errors import InputError
from asr_am.lang.mixture import counted, perplexity
from asr_am.lang.transcripts import read_sentences
from asr_am.lang.units import BOUNDARY, Units, make_units
from asr_am.model.lm_file import load_lm, save_lm
from asr_am.model.lm_scorer import word_logprobs
from asr_am.model.lstm_lm import IGNORED, BatchPart, LstmLm, LstmLmOptions
from asr_am.options import build
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.run_log import RunLog, TrainingBar
from asr_am.train.run_setup import StrategyFactory, check_batch, training_device
from asr_am.train.schedule import Plateau
from asr_am.train.tracking import NoTracker, Tracker
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainable import first_batch

log = logging.getLogger(__name__)
MIN_KNOWN = 0.5  # share of known words below which text and lexicon cannot belong together
REMEDY = "set lm.text to the name of a text of the corpus, or to a text file"


@dataclass(frozen=True)
class LmOptions:
    """Options of a language model and its training.

    Attributes:
        model: the network.
        epochs: maximum number of epochs.
        batch_size: sentences of a batch, of all learners together.
        longest: units after which a sentence is cut.
        optimizer: the update rule.
        rate: first learning rate.
        decay: factor on the rate after each epoch that did not lower dev perplexity.
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
class Text:
    """A text as numbers. A row is a sentence or a piece of one, and is predicted from its start.

    Attributes:
        unit_M: int32, a BOUNDARY, then the units of each sentence and the BOUNDARY that ends it.
        begin_R: first unit of each row.
        end_R: end of each row: unit_M[begin:end] predicts unit_M[begin+1:end+1].
    """

    unit_M: np.ndarray
    begin_R: np.ndarray
    end_R: np.ndarray

    def __len__(self) -> int:
        return len(self.begin_R)

    @property
    def length_R(self) -> np.ndarray:
        """Units of each row."""
        return self.end_R - self.begin_R

    def tensors(self, row_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns (input, target), both int64 [B, T]. The target is IGNORED after the end of a row."""
        unit_BT = np.arange(self.length_R[row_B].max()) + self.begin_R[row_B, None]
        inside_BT = unit_BT < self.end_R[row_B, None]
        unit_BT = np.where(inside_BT, unit_BT, 0)
        target_BT = np.where(inside_BT, self.unit_M[unit_BT + 1], IGNORED)
        return torch.from_numpy(self.unit_M[unit_BT].astype(np.int64)), torch.from_numpy(target_BT.astype(np.int64))


@dataclass(frozen=True)
class LmPlan:
    """Rows of one epoch (`trainable.Plan`).

    Attributes:
        row_N: row of the text.
        frames_N: units of each row.
        batch_size: rows of a learner's batch.
        whole: rows of a batch of all learners.
        epoch: the epoch.
    """

    row_N: np.ndarray
    frames_N: np.ndarray
    batch_size: int
    whole: int
    epoch: int

    def __len__(self) -> int:
        return -(-len(self.row_N) // self.batch_size)

    @property
    def num_examples(self) -> int:
        return len(self.row_N)

    @property
    def num_frames(self) -> int:
        return int(self.frames_N.sum())

    def frames(self, rows: slice) -> np.ndarray:
        """Returns the units of consecutive rows."""
        return self.frames_N[rows]

    def rows(self, number: int) -> np.ndarray:
        """Returns the rows of a learner's batch."""
        return self.row_N[number * self.batch_size : (number + 1) * self.batch_size]

    def part(self, number: int) -> BatchPart:
        """Returns the place of a learner's batch in that of all learners."""
        first = number * self.batch_size // self.whole * self.whole
        frames_B = self.frames_N[first : first + self.whole]
        return BatchPart(number * self.batch_size - first, len(frames_B), int(frames_B.max()))


@dataclass(frozen=True)
class LmBatch:
    """Rows padded to equal length (`trainable.Batch`).

    Attributes:
        id: number of the batch of all learners in its epoch, from which dropout and samples are drawn.
        part: place in that batch.
        input_BT: units.
        target_BT: next units, IGNORED in the padding.
        frames: number of targets.
        digest: identity of the rows.
    """

    id: int
    part: BatchPart
    input_BT: Tensor
    target_BT: Tensor
    frames: int
    digest: int

    def __len__(self) -> int:
        return len(self.input_BT)


class LmData:
    """Batches of a text (`trainable.Data`).

    Args:
        text: the text.
        batch_size: rows of a batch of all learners.
        learners: number of learners that share it.
        seed: seed of the order.
    """

    def __init__(self, text: Text, batch_size: int, learners: int, seed: int) -> None:
        self.text, self._all, self._own, self._seed = text, batch_size, batch_size // learners, seed

    def plan(self, epoch: int) -> LmPlan:
        """Returns the rows of an epoch. Rows of a batch of all learners have about equal length.

        The order depends on (seed, epoch) and the batch of all learners only. The batch with fewer rows is the last.
        """
        rng = np.random.default_rng((self._seed, epoch))
        order_R = np.lexsort((rng.random(len(self.text)), self.text.length_R))
        whole = len(order_R) // self._all * self._all
        parts = order_R[:whole].reshape(-1, self._all)
        row_N = np.concatenate([parts[rng.permutation(len(parts))].reshape(-1), order_R[whole:]])
        return LmPlan(row_N, self.text.length_R[row_N], self._own, self._all, epoch)

    def batch(self, plan: LmPlan, number: int) -> LmBatch:
        """Assembles batch `number` of `plan`."""
        row_B, of_all = plan.rows(number), number * plan.batch_size // plan.whole
        units = int(self.text.length_R[row_B].sum())
        return LmBatch(of_all, plan.part(number), *self.text.tensors(row_B), units, self._digest(row_B))

    def batches(self, plan: LmPlan, numbers: Iterable[int]) -> Iterator[LmBatch]:
        """Yields the batches with these numbers."""
        return (self.batch(plan, number) for number in numbers)

    def digests(self, plan: LmPlan, first: int, end: int) -> tuple[int, ...]:
        """Returns the 48-bit identities of the batches from `first` to `end` (exclusive)."""
        return tuple(self._digest(plan.rows(number)) for number in range(first, end))

    def _digest(self, row_B: np.ndarray) -> int:
        key_B = combine(row_B, self.text.begin_R[row_B], self.text.end_R[row_B])
        return int(key_B.sum(dtype=np.uint64) >> np.uint64(16))


def count_words(path: Path) -> Counter[str]:
    """Counts the words of a text. Raises InputError if it has none."""
    counts: Counter[str] = Counter()
    for sentence in read_sentences(path, REMEDY):
        counts.update(sentence)
    if not counts:
        raise InputError(f"{path}: holds no sentence; {REMEDY}")
    return counts


def encode(sentences: Iterable[Sequence[str]], units: Units, longest: int) -> Text:
    """Converts sentences to units.

    A sentence of more than `longest` units is cut, and each piece is predicted without the ones before it.
    """
    unit, begins, ends = array.array("i", [BOUNDARY]), array.array("q"), array.array("q")
    for sentence in sentences:
        begin = len(unit) - 1
        for word in sentence:
            unit.extend(units.of(word))
        unit.append(BOUNDARY)
        starts = range(begin, len(unit) - 1, longest)
        begins.extend(starts)
        ends.extend(min(start + longest, len(unit) - 1) for start in starts)
    return Text(np.array(unit, dtype=np.int32), np.array(begins), np.array(ends))


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
        model: the network.
        params: its dense weights and gradients as flat vectors.
        optimizer: the update rule, which receives the learning rate of each step.
        loader: training text.
        options: options of the run.
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
        out: directory of the run.
        options: options of the run.
        units: units of the model.
        text: training text.
        dev: sentences for the perplexity that decides rate, best model and end.
        strategy: makes the strategy of a learner.
        learners: number of learners that share a batch.
        tracker: experiment tracking.
        provenance: origin of the run, for summary.json and the model file.
        share_gpus: several learners may compute on one GPU.

    Raises:
        InputError: the batch cannot be divided, or there is no GPU.
    """

    unit = "units"
    remedy = "lower lm.train.rate"
    classifies = False

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

    def plan(self, epoch: int) -> LmPlan:
        """Returns the batches of an epoch. Caches one plan, as all learners ask for the same."""
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = self.loader.plan(epoch)
        return self._plan

    @cached_property
    def validator(self) -> LmValidator:
        """Computes the dev perplexity."""
        return LmValidator(self.model(), self.units, self.dev)

    def save_best(self, path: Path, record: Mapping[str, float]) -> None:
        """Saves the model that was validated last."""
        info = {"epoch": record["epoch"], "dev_perplexity": record["heldout_perplexity"], **self.provenance}
        save_lm(path, self.validator.model, self.units, info)

    def checkpoints(self, strategy: str) -> Checkpoints:
        """Returns the run's checkpoints. Those of other options, learners or texts are refused."""
        text = f"{len(self.units)}-{len(self.text)}-{zlib.crc32(self.text.unit_M.tobytes()):08x}"
        model = ",".join(map(str, astuple(self._model_options)))
        fingerprint = f"{self.options.fingerprint()}-{strategy}-{self.learners}-{model}-{text}"
        return Checkpoints(self.out / "checkpoints", fingerprint)


class LmValidator:
    """Logarithm of the dev perplexity, computed with a copy of the model.

    Args:
        model: a model of the run.
        units: its units.
        dev: the sentences.
    """

    def __init__(self, model: LstmLm, units: Units, dev: HeldOutText) -> None:
        self.model, self._units, self._dev = model.eval(), units, dev
        self._params = FlatParams(model)

    def __call__(self, w: Tensor) -> tuple[float, float]:
        """Returns the logarithm under the weights `w` [N], and 0."""
        self._params.w.copy_(w)
        return math.log(self._dev.perplexity(self.model, self._units)), 0.0


def read_text(
    path: Path, vocabulary: Sequence[str], longest: int, *, kind: Literal["word", "sentencepiece"], pieces: int
) -> tuple[Units, Text]:
    """Reads a training text.

    Args:
        path: the text, one sentence per line.
        vocabulary: words of the lexicon.
        longest: units after which a sentence is cut.
        kind: kind of units, see `make_units`.
        pieces: number of sentence pieces.

    Raises:
        InputError: the text is empty, or most of its words are not in the lexicon.
    """
    counts = count_words(path)
    known = sum(counts[word] for word in vocabulary)
    if known < MIN_KNOWN * counts.total():
        raise InputError(
            f"{path}: {known} of its {counts.total()} words are in the lexicon; check that it is of this language"
        )
    units = make_units(kind, vocabulary, counts, pieces)
    outside = counts.total() - known
    log.info("%s: %d words, %d outside the lexicon; %d units", path, counts.total(), outside, len(units))
    return units, encode(read_sentences(path, REMEDY), units, longest)


def finish(out: Path, name: str, source: Path, dev: HeldOutText, test: HeldOutText) -> None:
    """Adds the best model's perplexities to summary.json, and writes lm.json, which the report reads.

    Args:
        out: directory of the finished run.
        name: name of the model in the report.
        source: training text.
        dev: dev sentences.
        test: test sentences.
    """
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
