"""Training of a recurrent language model on one GPU or one core, with dev perplexity after each epoch.

A killed run continues from its checkpoint, on a CPU bit for bit. The run's directory has best.pt
(`asr_am.model.lm_file`), metrics.jsonl, summary.json, lm.json and checkpoint.pt.

Shapes: N units of the text, R rows (sentences, long ones in pieces), B rows of a batch, T units of its longest.
"""

from __future__ import annotations

import array
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.lang.mixture import counted, perplexity
from asr_am.lang.transcripts import read_sentences
from asr_am.lang.units import BOUNDARY, Units, make_units
from asr_am.model.lm_file import load_lm, save_lm
from asr_am.model.lm_scorer import word_logprobs
from asr_am.model.lstm_lm import IGNORED, LstmLm, LstmLmOptions
from asr_am.model.model_file import read_torch, write_torch
from asr_am.options import build
from asr_am.train.run_log import JsonLines, TrainingBar

log = logging.getLogger(__name__)
FORMAT = "asr_am language model checkpoint 1"
MIN_KNOWN = 0.5  # share of known words below which text and lexicon cannot belong together
MIN_GAIN = 1e-3  # share by which dev perplexity must fall, or the rate is lowered
REMEDY = "set lm.text to the name of a text of the corpus, or to a text file"


@dataclass(frozen=True)
class LmOptions:
    """Options of a language model and its training.

    Attributes:
        model: the network.
        epochs: maximum number of epochs.
        batch_size: sentences of a batch.
        longest: units after which a sentence is cut.
        optimizer: the update rule.
        rate: first learning rate.
        decay: factor on the rate after each epoch that did not lower dev perplexity.
        patience: number of such epochs in a row that ends the training.
        accumulator: first value of Adagrad's sums.
        clip_norm: upper limit of the norm of the LSTM's gradient. 0: none.
        seed: seed of weights, order of batches and dropout.
        checkpoint_every: batches between two checkpoints. There is also one after each epoch.
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
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        for name in ("epochs", "batch_size", "longest", "patience", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"lm.train.{name}={getattr(self, name)}: must be at least 1")
        if self.model.sparse and self.optimizer == "adam":
            raise InputError(
                "lm.model.sparse=true: Adam takes no sparse gradients; set lm.train.optimizer=adagrad or sgd"
            )
        if self.rate <= 0 or not 0 < self.decay <= 1 or self.clip_norm < 0 or self.accumulator < 0:
            raise InputError(
                "lm.train: rate must be above 0, decay above 0 and at most 1, clip_norm and accumulator not negative"
            )

    @classmethod
    def build(cls, model: Mapping[str, Any], train: Mapping[str, Any]) -> LmOptions:
        """Builds the options from plain values. Raises InputError if one is unknown or of another type."""
        return build(cls, {"model": build(LstmLmOptions, model, "lm.model"), **train}, "lm.train")

    def plain(self) -> dict[str, Any]:
        """Returns the options as nested plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Text:
    """A text as numbers. A row is a sentence or a piece of one, and is predicted from its start.

    Attributes:
        unit_N: int32, a BOUNDARY, then the units of each sentence and the BOUNDARY that ends it.
        begin_R: first unit of each row.
        end_R: end of each row: unit_N[begin:end] predicts unit_N[begin+1:end+1].
    """

    unit_N: np.ndarray
    begin_R: np.ndarray
    end_R: np.ndarray

    def batches(self, size: int, seed: int, epoch: int) -> list[np.ndarray]:
        """Returns the rows of each batch of an epoch. Rows of a batch have about equal length.

        The order depends on (seed, epoch) only.
        """
        rng = np.random.default_rng((seed, epoch))
        order_R = np.lexsort((rng.random(len(self.begin_R)), self.end_R - self.begin_R))
        cuts = np.arange(size, len(order_R), size)
        parts = np.split(order_R, cuts)
        return [parts[number] for number in rng.permutation(len(parts))]

    def batch(self, row_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns (input, target), both int64 [B, T]. The target is IGNORED after the end of a row."""
        unit_BT = np.arange((self.end_R - self.begin_R)[row_B].max()) + self.begin_R[row_B, None]
        inside_BT = unit_BT < self.end_R[row_B, None]
        unit_BT = np.where(inside_BT, unit_BT, 0)
        target_BT = np.where(inside_BT, self.unit_N[unit_BT + 1], IGNORED)
        return torch.from_numpy(self.unit_N[unit_BT].astype(np.int64)), torch.from_numpy(target_BT.astype(np.int64))


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
class LmProgress:
    """Progress of a run, saved in its checkpoint under these names.

    Attributes:
        epoch: finished epochs.
        done: finished batches of the current epoch.
        rate: learning rate of the current epoch.
        best: lowest dev perplexity.
        worse: epochs since the last one that lowered it.
        loss: summed loss of the current epoch.
        units: units of the current epoch so far.
        seconds: seconds of training.
        kept: bytes of metrics.jsonl.
        perplexities: dev perplexity of each epoch.
    """

    epoch: int = 0
    done: int = 0
    rate: float = 0.0
    best: float = math.inf
    worse: int = 0
    loss: float = 0.0
    units: int = 0
    seconds: float = 0.0
    kept: int = 0
    perplexities: list[float] = field(default_factory=list)


class LmRun:
    """A training run, which continues from its checkpoint if there is one.

    Args:
        out: directory of the run.
        options: options of the run.
        units: units of the model.
        text: training text.
        dev: sentences for the perplexity that decides rate, best model and end.
    """

    def __init__(self, out: Path, options: LmOptions, units: Units, text: Text, dev: HeldOutText) -> None:
        self.out, self.options, self.units, self.text, self.dev = out, options, units, text, dev
        torch.manual_seed(options.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = LstmLm(options.model, len(units)).to(self.device)
        self.optimizer = make_optimizer(options, self.model)
        self.progress = LmProgress(rate=options.rate)

    def train(self) -> None:
        """Trains to the last epoch, or until dev perplexity has not fallen for `patience` epochs."""
        self._resume()
        self.metrics = JsonLines(self.out / "metrics.jsonl", self.progress.kept)
        self.progress_bar = TrainingBar(self.options.epochs)
        self.progress_bar.start()
        try:
            while self.progress.epoch < self.options.epochs and self.progress.worse < self.options.patience:
                self._do_epoch()
                self._finish_epoch()
        finally:
            self.progress_bar.stop()
            self.metrics.close()

    def step(self, input_BT: Tensor, target_BT: Tensor) -> float:
        """Does one update on a batch (int64 [B, T] each) and returns its loss."""
        loss = self.model(input_BT.to(self.device), target_BT.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        if self.options.clip_norm:
            nn.utils.clip_grad_norm_(self.model.lstm.parameters(), self.options.clip_norm)
        self.optimizer.step()
        return loss.item()

    def _do_epoch(self) -> None:
        progress = self.progress
        batches = self.text.batches(self.options.batch_size, self.options.seed, progress.epoch)
        self.progress_bar.epoch(progress.epoch, len(batches), progress.done)
        for group in self.optimizer.param_groups:
            group["lr"] = progress.rate
        self.model.train()
        for row_B in batches[progress.done :]:
            begin = time.monotonic()
            input_BT, target_BT = self.text.batch(row_B)
            count = int((self.text.end_R - self.text.begin_R)[row_B].sum())
            loss = self.step(input_BT, target_BT)
            if not math.isfinite(loss):
                raise InputError(f"{self.out}: the loss is {loss} in epoch {progress.epoch + 1}; lower lm.train.rate")
            progress.loss, progress.units = progress.loss + loss * count, progress.units + count
            progress.done, progress.seconds = progress.done + 1, progress.seconds + time.monotonic() - begin
            self.progress_bar.done(progress.done)
            if progress.done % self.options.checkpoint_every == 0:
                self._save()

    def _finish_epoch(self) -> None:
        """Computes dev perplexity. Keeps the model if it is the best, lowers the rate if it is not better."""
        progress = self.progress
        now = self.dev.perplexity(self.model.eval(), self.units)
        if not math.isfinite(now):
            raise InputError(
                f"{self.out}: dev perplexity is {now} after epoch {progress.epoch + 1}; lower lm.train.rate"
            )
        loss = progress.loss / progress.units
        progress.worse = 0 if now < progress.best * (1 - MIN_GAIN) else progress.worse + 1
        progress.perplexities.append(round(now, 4))
        progress.epoch, progress.done, progress.loss, progress.units = progress.epoch + 1, 0, 0.0, 0
        log.info("epoch %d: dev perplexity %.2f, training loss %.3f, rate %g", progress.epoch, now, loss, progress.rate)
        self.metrics.write({"epoch": progress.epoch, "dev_perplexity": now, "train_loss": loss, "lr": progress.rate})
        if now < progress.best:
            progress.best = now
            save_lm(self.out / "best.pt", self.model, self.units, {"epoch": progress.epoch, "dev_perplexity": now})
        progress.rate *= self.options.decay if progress.worse else 1.0
        self._save()

    def _save(self) -> None:
        self.progress.kept = self.metrics.sync()
        state = {
            "format": FORMAT, "cursor": asdict(self.progress), "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state(),
        }  # fmt: skip
        write_torch(state, self.out / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return
        remedy = f"remove {self.out} to start anew"
        state = read_torch(path, remedy)
        try:
            if state["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            self.progress = LmProgress(**state["cursor"])
            self.model.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{path}: is not a checkpoint of this model ({reason}); {remedy}") from error
        log.info("resuming from epoch %d, batch %d", self.progress.epoch + 1, self.progress.done)


def prepare(
    out: Path, options: LmOptions, text: Path, vocabulary: Sequence[str], dev: HeldOutText, *,
    kind: Literal["word", "sentencepiece"], pieces: int,
) -> LmRun:  # fmt: skip
    """Prepares a run on a text file.

    Args:
        out: directory of the run.
        options: options of the run.
        text: training text, one sentence per line.
        vocabulary: words of the lexicon.
        dev: held-out sentences.
        kind: kind of units, see `make_units`.
        pieces: number of sentence pieces.

    Raises:
        InputError: the text is empty, or most of its words are not in the lexicon.
    """
    counts = count_words(text)
    known = sum(counts[word] for word in vocabulary)
    if known < MIN_KNOWN * counts.total():
        raise InputError(
            f"{text}: {known} of its {counts.total()} words are in the lexicon; check that it is of this language"
        )
    units = make_units(kind, vocabulary, counts, pieces)
    encoded = encode(read_sentences(text, REMEDY), units, options.longest)
    outside = counts.total() - known
    log.info("%s: %d words, %d outside the lexicon; %d units", text, counts.total(), outside, len(units))
    return LmRun(out, options, units, encoded, dev)


def make_optimizer(options: LmOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Makes Adam, Adagrad (Jozefowicz et al.) or SGD. The last two also take sparse gradients."""
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.rate, betas=(0.9, 0.99))
    if options.optimizer == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=options.rate, initial_accumulator_value=options.accumulator)
    return torch.optim.SGD(model.parameters(), lr=options.rate)


def finish(run: LmRun, name: str, source: Path, test: HeldOutText, provenance: Mapping[str, Any]) -> None:
    """Writes summary.json with the best model's perplexities, and lm.json, which the report reads.

    Args:
        run: the finished run.
        name: name of the model in the report.
        source: training text.
        test: test sentences.
        provenance: origin of the run, for summary.json.
    """
    model, units, info = load_lm(run.out / "best.pt")
    dev = run.dev
    values = {"dev_perplexity": dev.perplexity(model, units), "test_perplexity": test.perplexity(model, units)}
    words = sum(map(len, dev.sentences))
    described = {
        "name": name, "source": source.name, "parameters": sum(p.numel() for p in model.parameters()),
        "units": len(units), **values, "dev_sentences": len(dev.sentences), "dev_words": words,
        "dev_oov": words + len(dev.sentences) - int(counted(dev.sentences, dev.vocabulary).sum()),
    }  # fmt: skip
    progress = run.progress
    summary = described | {
        "text_units": len(run.text.unit_N) - 1, "epochs": progress.epoch, "best_epoch": info["epoch"],
        "dev_perplexities": progress.perplexities, "seconds": round(progress.seconds, 1),
        "units_per_second": round(progress.epoch * (len(run.text.unit_N) - 1) / max(progress.seconds, 1e-9)),
        **run.options.plain(), **provenance,
    }  # fmt: skip
    write_lines(run.out / "lm.json", [json.dumps(described, indent=1)])
    write_lines(run.out / "summary.json", [json.dumps(summary, indent=1)])
    log.info("language model %s: perplexity of dev %.2f, of test %.2f", name, *values.values())
