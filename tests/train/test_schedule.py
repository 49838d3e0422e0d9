from __future__ import annotations

import itertools
import math

import pytest

from asr_am.errors import InputError
from asr_am.train.schedule import Anneal, Newbob, Plateau, for_batch

ANNEAL = {"base": None, "reference": {"base": 0.1, "batch": 256}, "anneal_from": 11, "warmup_batches": 3}


def test_constant_then_anneal_as_in_the_paper() -> None:
    """Zhang et al., section 3.1: 0.1 for 10 epochs, then times 1/sqrt(2) in each epoch from the 11th to the 16th."""
    schedule = Anneal(base=0.1)
    rates = [schedule.rate(epoch, share, 0) for epoch in range(16) for share in (0.0, 0.999)]
    assert rates[:20] == [0.1] * 20
    assert rates[20::2] == pytest.approx([0.1 / math.sqrt(2) ** n for n in range(1, 7)])
    assert rates[20::2] == rates[21::2]
    assert rates[-1] == pytest.approx(0.0125)


def test_linear_warmup_for_a_batch_ten_times_larger() -> None:
    """The rate rises from 0.1 to 1 within 10 epochs, with every batch, and is annealed from the 11th epoch."""
    schedule = Anneal(base=0.1, batch_ratio=10, warmup_epochs=10)
    assert schedule.rate(0, 0.0, 0) == pytest.approx(0.1)
    assert schedule.rate(4, 0.5, 450) == pytest.approx(0.1 + 0.9 * 4.5 / 10)
    assert schedule.rate(9, 1.0, 999) == pytest.approx(1.0)
    assert schedule.rate(10, 0.0, 1000) == pytest.approx(1 / math.sqrt(2))
    assert schedule.rate(15, 0.3, 1530) == pytest.approx(1 / 8)
    rates = [schedule.rate(epoch, share / 10, 0) for epoch in range(10) for share in range(10)]
    assert all(b - a == pytest.approx(0.009) for a, b in itertools.pairwise(rates))


def test_warmup_over_batches() -> None:
    schedule = Anneal(base=0.2, warmup_batches=4, anneal_from=2, anneal=0.5)
    assert [schedule.rate(0, 0.0, batch) for batch in range(6)] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])
    assert schedule.rate(1, 0.0, 100) == pytest.approx(0.1)


def test_the_rate_follows_the_batch_as_in_the_paper() -> None:
    """Zhang et al., section 3.1: batch 256 has 0.1. Batch 2,560 rises from 0.1 to 1 in the first 10 epochs."""
    same = {"base": 0.1, "anneal_from": 11, "warmup_batches": 3}
    assert for_batch(ANNEAL, 256, "sgd") == same  # exactly the keys of finished runs
    assert Anneal(**for_batch(ANNEAL, 2560, "sgd")) == Anneal(0.1, 10.0, 10, 11, warmup_batches=3)
    assert for_batch(ANNEAL, 64, "nesterov") == same | {"base": 0.025}


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_the_rate_of_adaptive_optimizers_follows_the_root_of_the_batch(optimizer: str) -> None:
    assert for_batch(ANNEAL, 64, optimizer)["base"] == pytest.approx(0.05)
    larger = Anneal(**for_batch(ANNEAL, 1024, optimizer))
    assert larger.rate(0, 0.0, 100) == pytest.approx(0.1) and larger.rate(9, 1.0, 100) == pytest.approx(0.2)


def test_the_rate_of_another_optimizer_is_refused() -> None:
    given = ANNEAL | {"reference": {"base": 0.1, "batch": 256, "optimizer": "sgd"}}
    assert for_batch(given, 64, "nesterov") == for_batch(ANNEAL, 64, "nesterov")
    with pytest.raises(InputError, match=r"^train\.optimizer\.kind=adam: .* 0\.1 is for sgd; .*schedule\.base="):
        for_batch(given, 64, "adam")
    assert for_batch(given | {"base": 0.01}, 64, "adam")["base"] == 0.01


def test_newbob_starts_with_the_rate_of_the_batch() -> None:
    target = "asr_am.train.schedule.Newbob"
    options = {"_target_": target, "base": None, "reference": {"base": 0.003, "batch": 64}, "minimum": 1e-4}
    assert for_batch(options, 256, "adam") == {"_target_": target, "base": 0.006, "minimum": 1e-4}


def test_what_is_given_does_not_follow() -> None:
    assert for_batch(ANNEAL | {"base": 0.5}, 2560, "sgd") == {"base": 0.5, "anneal_from": 11, "warmup_batches": 3}
    assert for_batch({"base": 0.5, "batch_ratio": 2}, 64, "sgd") == {"base": 0.5, "batch_ratio": 2}
    assert for_batch(ANNEAL | {"warmup_epochs": 2}, 512, "sgd")["warmup_epochs"] == 2


@pytest.mark.parametrize(
    ("wrong", "batch", "name"),
    [
        ({"base": 0.0}, 64, "schedule.reference"), ({"batch": 0}, 64, "schedule.reference"),
        ({"batch": "x"}, 64, "schedule.reference.batch=x"), ({"rate": 1}, 64, "schedule.reference.rate"),
        ({}, 0, "train.batch_size=0"), ({}, "x", "train.batch_size=x"),
    ],
)  # fmt: skip
def test_wrong_references_and_batches_are_named(wrong: dict[str, object], batch: int, name: str) -> None:
    options = {"base": None, "reference": {"base": 0.1, "batch": 256} | wrong}
    with pytest.raises(InputError, match=name):
        for_batch(options, batch, "sgd")


@pytest.mark.parametrize(
    "wrong", [{"base": 0.0}, {"factor": 0.0}, {"factor": 1.5}, {"patience": 0}, {"threshold": -1.0}], ids=str
)
def test_wrong_options_of_a_plateau_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"schedule.{next(iter(wrong))}="):
        Plateau(**wrong)  # type: ignore[arg-type]


def test_a_warm_up_beyond_the_training_is_told() -> None:
    schedule = Anneal(base=0.1, batch_ratio=4.0, warmup_epochs=10, warmup_batches=300)
    batches, epochs = schedule.idle_options(steps=20, epochs=5)
    assert batches == (
        "schedule.warmup_batches=300: training has 100 updates, so that the rate reaches 33% of schedule.base; set it "
        "to 10 or fewer"
    )
    assert epochs.startswith("schedule.warmup_epochs=10: training has 5 epochs, so that the rate reaches 0.25 of 0.4;")
    assert schedule.idle_options(steps=30, epochs=10) == []
    assert len(Newbob(warmup_batches=300).idle_options(steps=20, epochs=5)) == 1
