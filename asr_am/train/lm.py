"""What decides a recurrent language model: its sizes and its training.

A text as numbers, and its batches: sentences of about equal length, each predicted from its start.

Shapes: N units of the text, R rows (sentences, long ones in pieces), B rows of a batch, T units of its longest.


Training of a recurrent language model: plain PyTorch, dev perplexity after each epoch, nothing lost when killed.

On a GPU where there is one, else on one core, where a run that is taken up again ends with the same bits. Written into
the run's folder: best.pt (`asr_am.model.lm_file`), metrics.jsonl, summary.json, lm.json, checkpoint.pt.
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
from asr_am.train.run_log import JsonLines, ProgressBar


@dataclass(frozen=True)
class LmOptions:
    """batch_size: sentences. longest: units of a sentence before it is cut. rate: to begin with; it is multiplied by
    `decay` after each epoch that did not lower dev perplexity, and `patience` such epochs in a row end the training.
    accumulator: what Adagrad's sums begin with. clip_norm: upper limit of the norm of the LSTM's gradient; 0: none.
    checkpoint_every: batches, beside the checkpoint after each epoch.
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
        """InputError where a value is out of range."""
        for name in ("epochs", "batch_size", "longest", "patience", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"lm.train.{name}={getattr(self, name)}: must be at least 1")
        if self.model.sparse and self.optimizer == "adam":
            raise InputError("lm.model.sparse: Adam takes no sparse gradients; set lm.train.optimizer=adagrad or sgd")
        if self.rate <= 0 or not 0 < self.decay <= 1 or self.clip_norm < 0 or self.accumulator < 0:
            raise InputError("lm.train: rate must be above 0, decay above 0 and at most 1, clip_norm not negative")

    @classmethod
    def build(cls, model: Mapping[str, Any], train: Mapping[str, Any]) -> LmOptions:
        """From plain values, as configuration files hold them; InputError for an unknown name or another type."""
        return build(cls, {"model": build(LstmLmOptions, model, "lm.model"), **train}, "lm.train")

    def plain(self) -> dict[str, Any]:
        """As nested plain values."""
        return asdict(self)


REMEDY = "set lm.text to the name of a text of the corpus, or to a text file"


@dataclass(frozen=True)
class Text:
    """unit_N int32: a BOUNDARY, then the units of each sentence with the BOUNDARY that ends it. begin_R, end_R: the
    rows; unit_N[begin:end] predicts unit_N[begin+1:end+1].
    """

    unit_N: np.ndarray
    begin_R: np.ndarray
    end_R: np.ndarray

    def batches(self, size: int, seed: int, epoch: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch, in an order that depends on (seed, epoch) alone."""
        rng = np.random.default_rng((seed, epoch))
        order_R = np.lexsort((rng.random(len(self.begin_R)), self.end_R - self.begin_R))
        cuts = np.arange(size, len(order_R), size)
        parts = np.split(order_R, cuts)
        return [parts[number] for number in rng.permutation(len(parts))]

    def batch(self, row_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """(input, target), both int64 [B, T]; IGNORED where a row has ended."""
        place_BT = np.arange((self.end_R - self.begin_R)[row_B].max()) + self.begin_R[row_B, None]
        inside_BT = place_BT < self.end_R[row_B, None]
        place_BT = np.where(inside_BT, place_BT, 0)
        target_BT = np.where(inside_BT, self.unit_N[place_BT + 1], IGNORED)
        return torch.from_numpy(self.unit_N[place_BT].astype(np.int64)), torch.from_numpy(target_BT.astype(np.int64))


def count_words(path: Path) -> Counter[str]:
    """How often each word occurs in a text. InputError for a text without a word."""
    counts: Counter[str] = Counter()
    for sentence in read_sentences(path, REMEDY):
        counts.update(sentence)
    if not counts:
        raise InputError(f"{path}: holds no sentence; {REMEDY}")
    return counts


def encode(sentences: Iterable[Sequence[str]], units: Units, longest: int) -> Text:
    """A text in units; a sentence of more than `longest` units is cut, and each piece but the first starts anew."""
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


log = logging.getLogger(__name__)
FORMAT = "asr_am language model checkpoint 1"
TOO_FEW = 0.5  # share of known words below which text and lexicon cannot belong together
GAIN = 1e-3  # share by which dev perplexity must fall, or the rate does


@dataclass(frozen=True)
class HeldOutText:
    """A set's transcripts, and the lexicon's words, which are the ones that perplexity counts."""

    sentences: Sequence[Sequence[str]]
    vocabulary: Sequence[str]

    def perplexity(self, model: LstmLm, units: Units) -> float:
        """Per word and sentence end; words outside the vocabulary are not counted (`asr_am.lang.mixture`)."""
        return perplexity(word_logprobs(model, units, self.sentences), counted(self.sentences, self.vocabulary))


@dataclass
class LmProgress:
    """Where a run stands. done: batches of the epoch. worse: epochs since the best one. loss, units: sums of the epoch.
    kept: bytes of metrics.jsonl. perplexities: dev, of each epoch.
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
    """One training run in `out`; goes on from its checkpoint if there is one."""

    def __init__(self, out: Path, options: LmOptions, units: Units, text: Text, dev: HeldOutText) -> None:
        self.out, self.options, self.units, self.text, self.dev = out, options, units, text, dev
        torch.manual_seed(options.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = LstmLm(options.model, len(units)).to(self.device)
        self.optimizer = make_optimizer(options, self.model)
        self.cursor = LmProgress(rate=options.rate)

    def train(self) -> None:
        """To the last epoch, or until dev perplexity has not fallen for `patience` epochs."""
        self._resume()
        self.metrics = JsonLines(self.out / "metrics.jsonl", self.cursor.kept)
        self.progress_bar = ProgressBar(self.options.epochs)
        self.progress_bar.start()
        try:
            while self.cursor.epoch < self.options.epochs and self.cursor.worse < self.options.patience:
                self._do_epoch()
                self._finish_epoch()
        finally:
            self.progress_bar.stop()
            self.metrics.close()

    def step(self, input_BT: Tensor, target_BT: Tensor) -> float:
        """One update on one batch; its loss."""
        loss = self.model(input_BT.to(self.device), target_BT.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        if self.options.clip_norm:
            nn.utils.clip_grad_norm_(self.model.lstm.parameters(), self.options.clip_norm)
        self.optimizer.step()
        return loss.item()

    def _do_epoch(self) -> None:
        cursor = self.cursor
        batches = self.text.batches(self.options.batch_size, self.options.seed, cursor.epoch)
        self.progress_bar.epoch(cursor.epoch, len(batches), cursor.done)
        for group in self.optimizer.param_groups:
            group["lr"] = cursor.rate
        self.model.train()
        for row_B in batches[cursor.done :]:
            begin = time.monotonic()
            input_BT, target_BT = self.text.batch(row_B)
            count = int((self.text.end_R - self.text.begin_R)[row_B].sum())
            loss = self.step(input_BT, target_BT)
            if not math.isfinite(loss):
                raise InputError(f"{self.out}: the loss is {loss} in epoch {cursor.epoch + 1}; lower lm.train.rate")
            cursor.loss, cursor.units = cursor.loss + loss * count, cursor.units + count
            cursor.done, cursor.seconds = cursor.done + 1, cursor.seconds + time.monotonic() - begin
            self.progress_bar.done(cursor.done)
            if cursor.done % self.options.checkpoint_every == 0:
                self._save()

    def _finish_epoch(self) -> None:
        """Dev perplexity; the best model is kept, and where it was not better, the rate falls."""
        cursor = self.cursor
        now = self.dev.perplexity(self.model.eval(), self.units)
        if not math.isfinite(now):
            raise InputError(f"{self.out}: dev perplexity is {now} after epoch {cursor.epoch + 1}; lower lm.train.rate")
        loss = cursor.loss / cursor.units
        cursor.worse = 0 if now < cursor.best * (1 - GAIN) else cursor.worse + 1
        cursor.perplexities.append(round(now, 4))
        cursor.epoch, cursor.done, cursor.loss, cursor.units = cursor.epoch + 1, 0, 0.0, 0
        log.info("epoch %d: dev perplexity %.2f, training loss %.3f, rate %g", cursor.epoch, now, loss, cursor.rate)
        self.metrics.write({"epoch": cursor.epoch, "dev_perplexity": now, "train_loss": loss, "lr": cursor.rate})
        if now < cursor.best:
            cursor.best = now
            save_lm(self.out / "best.pt", self.model, self.units, {"epoch": cursor.epoch, "dev_perplexity": now})
        cursor.rate *= self.options.decay if cursor.worse else 1.0
        self._save()

    def _save(self) -> None:
        self.cursor.kept = self.metrics.size()
        state = {
            "format": FORMAT, "cursor": asdict(self.cursor), "weights": self.model.state_dict(),
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
                raise ValueError("another format")
            self.cursor = LmProgress(**state["cursor"])
            self.model.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{path}: is not a checkpoint of this model ({reason}); {remedy}") from error
        log.info("goes on from epoch %d, batch %d", self.cursor.epoch + 1, self.cursor.done)


def prepare(
    out: Path, options: LmOptions, text: Path, vocabulary: Sequence[str], dev: HeldOutText, *,
    kind: Literal["word", "sentencepiece"], pieces: int,
) -> LmRun:  # fmt: skip
    """A run on a text file. vocabulary: the lexicon's words. kind, pieces: of units, see `make_units`."""
    counts = count_words(text)
    known = sum(counts[word] for word in vocabulary)
    if known < TOO_FEW * counts.total():
        raise InputError(f"{text}: {known} of its {counts.total()} words are in the lexicon; is it of this language?")
    units = make_units(kind, vocabulary, counts, pieces)
    encoded = encode(read_sentences(text, REMEDY), units, options.longest)
    outside = counts.total() - known
    log.info("%s: %d words, %d outside the lexicon; %d units", text, counts.total(), outside, len(units))
    return LmRun(out, options, units, encoded, dev)


def make_optimizer(options: LmOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Adam, Adagrad (Jozefowicz et al.) or SGD; the latter two also for sparse gradients."""
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.rate, betas=(0.9, 0.99))
    if options.optimizer == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=options.rate, initial_accumulator_value=options.accumulator)
    return torch.optim.SGD(model.parameters(), lr=options.rate)


def finish(run: LmRun, name: str, source: Path, test: HeldOutText, provenance: Mapping[str, Any]) -> None:
    """summary.json, with the best model's perplexity of dev and test, and lm.json, which the report reads."""
    model, units, info = load_lm(run.out / "best.pt")
    dev = run.dev
    values = {"dev_perplexity": dev.perplexity(model, units), "test_perplexity": test.perplexity(model, units)}
    words = sum(map(len, dev.sentences))
    described = {
        "name": name, "source": source.name, "parameters": sum(p.numel() for p in model.parameters()),
        "units": len(units), **values, "dev_sentences": len(dev.sentences), "dev_words": words,
        "dev_oov": words + len(dev.sentences) - int(counted(dev.sentences, dev.vocabulary).sum()),
    }  # fmt: skip
    cursor = run.cursor
    summary = described | {
        "text_units": len(run.text.unit_N) - 1, "epochs": cursor.epoch, "best_epoch": info["epoch"],
        "dev_perplexities": cursor.perplexities, "seconds": round(cursor.seconds, 1),
        "units_per_second": round(cursor.epoch * (len(run.text.unit_N) - 1) / max(cursor.seconds, 1e-9)),
        **run.options.plain(), **provenance,
    }  # fmt: skip
    write_lines(run.out / "lm.json", [json.dumps(described, indent=1)])
    write_lines(run.out / "summary.json", [json.dumps(summary, indent=1)])
    log.info("language model %s: perplexity of dev %.2f, of test %.2f", name, *values.values())
