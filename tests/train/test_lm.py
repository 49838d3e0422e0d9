"""Training of the recurrent LM: it learns, alone and on a team, resumes with the same bits, and refuses bad texts."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.team import LearnerLost
from asr_am.errors import InputError
from asr_am.lang.mixture import counted, ngram_logprobs, perplexity
from asr_am.lang.ngram import estimate
from asr_am.lang.units import BOUNDARY, Units
from asr_am.models.lm_file import load_lm
from asr_am.models.lstm_lm import IGNORED
from asr_am.parallax.strategy import Parallax
from asr_am.train.lm import HeldOutText, LmOptions, LmRun, finish
from asr_am.train.lm_text import LmData, encode, read_text
from tests.support.toy_lm_run import (
    ADAGRAD,
    DEV,
    OPTIONS,
    WORDS,
    Killed,
    Killer,
    make_run,
    sentences,
    train_alone,
    train_on_team,
)  # fmt: skip
from tests.support.toy_runs import cluster, lease_log, lines


def summary(run: LmRun) -> dict[str, Any]:
    return json.loads((run.out / "summary.json").read_text())


def weights(out: Path) -> torch.Tensor:
    """Returns all weights of best.pt."""
    return torch.cat([weight.reshape(-1) for weight in load_lm(out / "best.pt")[0].state_dict().values()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LmRun:
    run = train_alone(tmp_path_factory.mktemp("lm") / "lstm")
    finish(run.out, "lstm", Path("text.txt"), DEV, HeldOutText([["A", "X", "A"]], WORDS))
    return run


def test_the_option_chooses_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_run(tmp_path / "lm", replace(OPTIONS, device="cpu")).device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_run(tmp_path / "lm", replace(OPTIONS, device="auto")).device == torch.device("cpu")
    with pytest.raises(InputError, match="has no GPU"):
        make_run(tmp_path / "lm", replace(OPTIONS, device="cuda"))


def test_it_learns_what_a_trigram_cannot(trained: LmRun) -> None:
    trigram = ngram_logprobs(estimate(sentences(160, 1), WORDS, 3), DEV.sentences)
    limit = perplexity(trigram, counted(DEV.sentences, WORDS))
    best = min(summary(trained)["heldout_perplexity"])
    assert best < 0.9 * limit
    exact = np.exp((np.log(4) + 3 * np.log(2)) / 6)  # the entropy of the sentences over words and end
    assert best > exact * 0.97


def test_the_files_agree(trained: LmRun) -> None:
    found, described = summary(trained), json.loads((trained.out / "lm.json").read_text())
    model, units, info = load_lm(trained.out / "best.pt")
    assert DEV.perplexity(model, units) == pytest.approx(found["dev_perplexity"])
    assert found["heldout_perplexity"][info["epoch"] - 1] == pytest.approx(found["dev_perplexity"], abs=1e-3)
    assert found["best_epoch"] == info["epoch"] and found["test_perplexity"] > 1
    assert described["dev_words"] == 200 and described["dev_oov"] == 0
    assert described["parameters"] == found["parameters"] > 1000
    epochs = [line["epoch"] for line in lines(trained.out) if "heldout_perplexity" in line]
    assert epochs == list(range(1, found["epochs_done"] + 1))
    assert "frame_accuracy" not in (trained.out / "metrics.jsonl").read_text(), "no unit is called right or wrong"


@pytest.mark.parametrize("path", ["servers", "all-gather", "all-reduce"])
def test_a_team_is_one_device_with_its_batch(path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Compares with plain single-device training, which updates all rows: Adagrad leaves those without gradient."""
    alone = train_alone(tmp_path / "alone", ADAGRAD, Local)
    with caplog.at_level(logging.INFO):
        team = train_on_team(tmp_path / "team", ADAGRAD, partial(Parallax, path=path))
    torch.testing.assert_close(weights(team.out), weights(alone.out), rtol=1e-4, atol=1e-5)
    found = summary(team)
    assert found["heldout_perplexity"] == pytest.approx(summary(alone)["heldout_perplexity"], rel=1e-4)
    assert found["batches_per_learner"] == {"0": 20, "1": 20, "2": 20, "3": 20}
    assert "embedding.weight" in caplog.text and path in caplog.text, "the plan"
    assert found["counts"]["all-reduce"] > 0 and found["counts"]["pulled" if path == "servers" else "sent"] > 0
    shown = team.run_log.view
    assert shown is not None and [line.split()[:2] for line in shown.lines()] == [["learner", str(n)] for n in range(4)]
    assert " 0 batches" not in shown.lines()[3] and "alive" in shown.lines()[3]
    assert found["parameters"] == summary(alone)["parameters"] and found["consensus_distance"] == [0.0]


@pytest.mark.parametrize("samples", [0, 5])
def test_dropout_samples_and_the_rows_that_adam_leaves_are_those_of_one_device(samples: int, tmp_path: Path) -> None:
    """Adam divides by gradients near 0, which makes much of rounding: hence one epoch."""
    options = replace(ADAGRAD, optimizer="adam", rate=0.01, model=replace(OPTIONS.model, dropout=0.3, samples=samples))
    alone, team = train_alone(tmp_path / "alone", options, Parallax), train_on_team(tmp_path / "team", options)
    assert summary(team)["heldout_perplexity"] == pytest.approx(summary(alone)["heldout_perplexity"], rel=1e-4)
    torch.testing.assert_close(weights(team.out), weights(alone.out), rtol=1e-2, atol=1e-3)


def test_a_tied_model_has_no_sparse_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = replace(ADAGRAD, model=replace(OPTIONS.model, tied=True))
    with caplog.at_level(logging.INFO):
        team = train_on_team(tmp_path / "team", options)
    assert "so this is strategy=sync" in caplog.text
    alone = train_alone(tmp_path / "alone", options)
    torch.testing.assert_close(weights(team.out), weights(alone.out), rtol=1e-4, atol=1e-5)


def test_an_asynchronous_strategy_trains_a_language_model(tmp_path: Path) -> None:
    found = summary(train_on_team(tmp_path / "lm", replace(OPTIONS, epochs=2), Adpsgd))
    assert found["heldout_perplexity"][-1] < found["heldout_perplexity"][0] < 9 and found["strategy"] == "adpsgd"


TRAIN: dict[str, Callable[..., LmRun]] = {"alone": train_alone, "team": train_on_team}


@pytest.mark.parametrize(("who", "records"), [("alone", 1), ("alone", 6), ("alone", 9), ("team", 6)])
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, who: str, records: int) -> None:
    """20 updates per epoch, a checkpoint every 7 and after each epoch, 5 records per epoch."""
    options = replace(OPTIONS, epochs=2, model=replace(OPTIONS.model, dropout=0.3))
    whole = TRAIN[who](tmp_path / "whole", options)
    with pytest.raises(Killed):
        TRAIN[who](tmp_path / "cut", options, tracker=Killer(records))
    again = TRAIN[who](tmp_path / "cut", options)
    assert torch.equal(weights(again.out), weights(whole.out))
    assert lines(again.out) == lines(whole.out) and lease_log(again.out) == lease_log(whole.out)


def test_real_processes_are_virtual_learners_also_when_one_was_killed(tmp_path: Path) -> None:
    command, real = [sys.executable, "-m", "tests.support.lm_worker_main", str(tmp_path / "real")], tmp_path / "real"
    launch([*command, "1"], 2, synchronous=True, restart_after=0.1)
    summary = json.loads((real / "summary.json").read_text())
    assert summary["clock"] == "wall" and summary["restarts"] == 2, "it went on from the first checkpoint"
    torch.testing.assert_close(
        weights(real), weights(train_alone(tmp_path / "alone", ADAGRAD).out), rtol=1e-4, atol=1e-5
    )


def test_a_lost_learner_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(LearnerLost, match="learner 3"):
        train_on_team(tmp_path / "lm", hardware=cluster(crashes=[{"learner": 3, "at": 9.0}]))
    with pytest.raises(InputError, match="strategy=parallax waits for every message"):
        train_on_team(tmp_path / "lost", hardware=cluster(lost_share=0.1))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train_alone(tmp_path / "lm", tracker=Killer(4))
    with pytest.raises(InputError, match=r"belongs to a run with other options.*remove .*/lm/checkpoints to start"):
        train_alone(tmp_path / "lm", replace(OPTIONS, model=replace(OPTIONS.model, cells=25)))
    for path in (tmp_path / "lm/checkpoints").glob("checkpoint-*/learner-0.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"learner-0.pt: not readable.*to start anew"):
        train_alone(tmp_path / "lm")


@pytest.mark.parametrize(
    "change",
    [
        lambda o: replace(o, optimizer="adagrad", rate=0.05, model=replace(o.model, samples=4)),
        lambda o: replace(o, model=replace(o.model, samples=8, tied=True)),
    ],
    ids=["sampled, sparse, adagrad", "sampled, tied, adam"],
)
def test_sampled_softmax_trains_too(tmp_path: Path, change: Callable[[LmOptions], LmOptions]) -> None:
    run = make_run(tmp_path / "before", change(OPTIONS))
    before = run.dev.perplexity(run.model().eval(), run.units)
    assert min(summary(train_alone(tmp_path / "lm", change(OPTIONS), Parallax))["heldout_perplexity"]) < 0.7 * before


def test_pieces_train_too(tmp_path: Path) -> None:
    run = train_alone(tmp_path / "lm", replace(OPTIONS, epochs=2), kind="sentencepiece")
    assert len(run.units) == 10 and np.isfinite(summary(run)["heldout_perplexity"][-1])


def test_dev_decides_when_to_stop(tmp_path: Path) -> None:
    run = train_alone(tmp_path / "lm", replace(OPTIONS, epochs=50, rate=1e-9, patience=2, decay=0.5))
    assert summary(run)["epochs_done"] == 3
    assert [line["lr"] for line in lines(run.out) if "lr" in line][-1] == pytest.approx(0.5e-9)


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
        read_text(path, WORDS, 100, kind="word", pieces=9)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the loss is .* in epoch 1; lower lm.train.rate"):
        train_alone(tmp_path / "lm", replace(OPTIONS, optimizer="sgd", rate=1e30, clip_norm=0.0))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"epochs": 0}, "lm.train.epochs=0"),
        ({"optimizer": "adamw"}, r"lm\.train\.optimizer=adamw: .*'adam', 'adagrad' or 'sgd'"),
        ({"rate": -1.0}, "rate must be above 0"),
        ({"threads": 0}, "lm.train.threads=0"),
        ({"momentum": 0.9}, r"lm\.train\.momentum: there is no such"),
    ],
)
def test_bad_options_are_refused(train: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LmOptions.build({}, train)


def test_a_batch_that_the_learners_cannot_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^lm\.train\.batch_size=8: lm\.learners=3 cannot divide it"):
        make_run(tmp_path / "lm", learners=3)


UNITS = Units(["</s>", "<unk>", "a", "b"], {"A": (2,), "AB": (2, 3)})


def test_a_text_in_rows() -> None:
    text = encode([["A", "AB"], ["X"], ["AB", "AB", "A"]], UNITS, longest=4)
    assert text.unit_M.tolist() == [0, 2, 2, 3, 0, 1, 0, 2, 3, 2, 3, 2, 0]
    assert (text.begin_R.tolist(), text.end_R.tolist()) == ([0, 4, 6, 10], [4, 6, 10, 12])
    input_BT, target_BT = text.tensors(np.array([1, 0]))
    assert input_BT[1].tolist() == [BOUNDARY, 2, 2, 3] and target_BT[1].tolist() == [2, 2, 3, BOUNDARY]
    assert input_BT[0, :2].tolist() == [BOUNDARY, 1] and target_BT[0].tolist() == [1, BOUNDARY, IGNORED, IGNORED]


def test_every_row_once_per_epoch_in_another_order() -> None:
    text = encode([["A"] * (1 + n % 7) for n in range(50)], UNITS, longest=100)
    data = LmData(text, batch_size=8, learners=1, seed=1)
    first, again, second = (data.plan(epoch) for epoch in (0, 0, 1))
    assert sorted(first.row_N.tolist()) == list(range(50)) and len(first) == 7
    assert np.array_equal(first.row_N, again.row_N) and first.row_N.tolist() != second.row_N.tolist()
    assert max(np.ptp(first.frames_N[8 * n : 8 * n + 8]) for n in range(6)) <= 2, "rows of about equal length"
    assert data.digests(first, 0, 7) == tuple(batch.digest for batch in data.batches(first, range(7)))
    assert len(set(data.digests(first, 0, 7))) == 7


def test_the_batches_of_four_learners_are_those_of_one() -> None:
    text = encode([["A"] * (1 + n % 7) for n in range(50)], UNITS, longest=100)
    one, four = (LmData(text, batch_size=8, learners=learners, seed=1).plan(0) for learners in (1, 4))
    assert len(four) == 25
    for number in range(len(one)):
        parts = [four.rows(4 * number + rank) for rank in range(4)]
        assert np.concatenate(parts).tolist() == one.rows(number).tolist()
