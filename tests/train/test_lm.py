"""Training of the recurrent LM: it learns, resumes with the same bits, and refuses bad texts and options."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.errors import InputError
from asr_am.lang.mixture import counted, ngram_logprobs, perplexity
from asr_am.lang.ngram import estimate
from asr_am.lang.units import BOUNDARY, Units
from asr_am.model.lm_file import load_lm
from asr_am.model.lstm_lm import IGNORED, LstmLmOptions
from asr_am.train.lm import HeldOutText, LmOptions, LmRun, encode, finish, prepare

WORDS = [*"ABCDEFGH", "<unk>"]
OPTIONS = LmOptions(
    model=LstmLmOptions(embedding=12, cells=24, projection=12), epochs=8, batch_size=8, rate=0.03, checkpoint_every=7
)


def sentences(count: int, seed: int) -> list[list[str]]:
    """Makes sentences whose last word repeats the first, four words before. No trigram can predict it."""
    rng = np.random.default_rng(seed)
    return [
        [first, *("E" if rng.random() < 0.5 else "F" for _ in range(3)), first]
        for first in ("ABCD"[rng.integers(4)] for _ in range(count))
    ]


DEV = HeldOutText(sentences(40, 2), WORDS)


def write(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(" ".join(sentence) + "\n" for sentence in sentences(160, 1)))
    return path


def run_in(folder: Path, options: LmOptions = OPTIONS, kind: str = "word") -> LmRun:
    folder.mkdir(exist_ok=True)
    return prepare(folder, options, write(folder.parent), WORDS, DEV, kind=kind, pieces=9)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LmRun:
    run = run_in(tmp_path_factory.mktemp("lm") / "lstm")
    run.train()
    finish(run, "lstm", Path("text.txt"), HeldOutText([["A", "X", "A"]], WORDS), {"commit": "abc"})
    return run


def test_it_learns_what_a_trigram_cannot(trained: LmRun) -> None:
    trigram = ngram_logprobs(estimate(sentences(160, 1), WORDS, 3), DEV.sentences)
    limit = perplexity(trigram, counted(DEV.sentences, WORDS))
    best = min(trained.progress.perplexities)
    assert best < 0.9 * limit
    exact = np.exp((np.log(4) + 3 * np.log(2)) / 6)  # the entropy of the sentences over words and end
    assert best > exact * 0.97


def test_the_files_agree(trained: LmRun) -> None:
    summary, described = (json.loads((trained.out / name).read_text()) for name in ("summary.json", "lm.json"))
    model, units, info = load_lm(trained.out / "best.pt")
    assert DEV.perplexity(model, units) == pytest.approx(summary["dev_perplexity"])
    assert summary["dev_perplexities"][info["epoch"] - 1] == pytest.approx(summary["dev_perplexity"], abs=1e-3)
    assert summary["best_epoch"] == info["epoch"] and summary["commit"] == "abc" and summary["test_perplexity"] > 1
    assert described["dev_words"] == 200 and described["dev_oov"] == 0 and described["parameters"] > 1000
    lines = [json.loads(line) for line in (trained.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, summary["epochs"] + 1))


class Killed(Exception):
    pass


def train_and_die(steps: int, run: LmRun) -> None:
    real, count = run.step, itertools.count(1)

    def step(*batch: torch.Tensor) -> float:
        if next(count) > steps:
            raise Killed
        return real(*batch)

    run.step = step  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run.train()


@pytest.mark.parametrize("steps", [5, 30, 61])
def test_a_killed_run_ends_with_the_same_bits(trained: LmRun, tmp_path: Path, steps: int) -> None:
    """20 batches per epoch, a checkpoint every 7 and after each epoch. Checkpoints keep the random state of dropout."""
    options = replace(OPTIONS, epochs=4, model=replace(OPTIONS.model, dropout=0.3))
    whole = run_in(tmp_path / "whole", options)
    whole.train()
    train_and_die(steps, run_in(tmp_path / "cut", options))
    again = run_in(tmp_path / "cut", options)
    again.train()
    assert again.progress.perplexities == whole.progress.perplexities
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "cut/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    train_and_die(10, run_in(tmp_path / "lm"))
    path = tmp_path / "lm" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"checkpoint.pt: not readable.*remove .*/lm to start anew"):
        run_in(tmp_path / "lm").train()
    torch.save({"format": "other"}, path)
    with pytest.raises(InputError, match="is not a checkpoint of this model"):
        run_in(tmp_path / "lm").train()


@pytest.mark.parametrize(
    "change",
    [
        lambda o: replace(o, optimizer="adagrad", rate=0.05, model=replace(o.model, samples=4, sparse=True)),
        lambda o: replace(o, model=replace(o.model, samples=8, tied=True)),
    ],
    ids=["sampled, sparse, adagrad", "sampled, tied, adam"],
)
def test_sampled_softmax_trains_too(tmp_path: Path, change: Callable[[LmOptions], LmOptions]) -> None:
    run = run_in(tmp_path / "lm", change(OPTIONS))
    before = run.dev.perplexity(run.model, run.units)
    run.train()
    assert min(run.progress.perplexities) < 0.7 * before


def test_pieces_train_too(tmp_path: Path) -> None:
    run = run_in(tmp_path / "lm", replace(OPTIONS, epochs=2), kind="sentencepiece")
    run.train()
    assert len(run.units) == 10 and np.isfinite(run.progress.perplexities[-1])


def test_dev_decides_when_to_stop(tmp_path: Path) -> None:
    run = run_in(tmp_path / "lm", replace(OPTIONS, epochs=50, rate=1e-9, patience=2, decay=0.5))
    run.train()
    assert run.progress.epoch == 3 and run.progress.rate == pytest.approx(0.25e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no sentence"),
        ("\n \n", "holds no sentence"),
        ("A B </s>\n", "text.txt:1: holds <s> or </s>"),
        ("hello over there\nA\n", "1 of its 4 words are in the lexicon"),
    ],
)
def test_bad_texts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, OPTIONS, path, WORDS, DEV, kind="word", pieces=9)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = run_in(tmp_path / "lm", replace(OPTIONS, optimizer="sgd", rate=1e30, clip_norm=0.0))
    with pytest.raises(InputError, match=r"the loss is .* in epoch 1; lower lm.train.rate"):
        run.train()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"epochs": 0}, "lm.train.epochs=0"),
        ({"optimizer": "adamw"}, r"lm\.train\.optimizer=adamw: .*'adam', 'adagrad' or 'sgd'"),
        ({"rate": -1.0}, "rate must be above 0"),
        ({"momentum": 0.9}, r"lm\.train\.momentum: there is no such"),
    ],
)
def test_bad_options_are_refused(train: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LmOptions.build({}, train)
    with pytest.raises(InputError, match="adagrad or sgd"):
        LmOptions.build({"samples": 5, "sparse": True}, {})


UNITS = Units(["</s>", "<unk>", "a", "b"], {"A": (2,), "AB": (2, 3)})


def test_a_text_in_rows() -> None:
    text = encode([["A", "AB"], ["X"], ["AB", "AB", "A"]], UNITS, longest=4)
    assert text.unit_N.tolist() == [0, 2, 2, 3, 0, 1, 0, 2, 3, 2, 3, 2, 0]
    assert (text.begin_R.tolist(), text.end_R.tolist()) == ([0, 4, 6, 10], [4, 6, 10, 12])
    input_BT, target_BT = text.batch(np.array([1, 0]))
    assert input_BT[1].tolist() == [BOUNDARY, 2, 2, 3] and target_BT[1].tolist() == [2, 2, 3, BOUNDARY]
    assert input_BT[0, :2].tolist() == [BOUNDARY, 1] and target_BT[0].tolist() == [1, BOUNDARY, IGNORED, IGNORED]


def test_every_row_once_per_epoch_in_another_order() -> None:
    text = encode([["A"] * (1 + n % 7) for n in range(50)], UNITS, longest=100)
    first, again, second = (text.batches(8, seed=1, epoch=epoch) for epoch in (0, 0, 1))
    assert sorted(np.concatenate(first).tolist()) == list(range(50)) and len(first) == 7
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert np.concatenate(first).tolist() != np.concatenate(second).tolist()
