from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.errors import InputError
from asr_am.models.blstm import BlstmOptions
from asr_am.train.schedule import Anneal, Newbob
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainer import train
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import final_state, lines, virtually

TARGET = "asr_am.train.schedule.Newbob"
NEWBOB = Newbob(base=0.4, minimum=0.05)


def rates(losses: list[float], newbob: Newbob = NEWBOB) -> list[float | None]:
    """Returns the rates of the epochs of a run with these held-out losses, and of the epoch after them."""
    schedules = [newbob.after(losses[:epoch]) for epoch in range(len(losses) + 1)]
    return [schedule.rate(0, 0.0, 1000) if schedule else None for schedule in schedules]


def test_constant_until_the_gain_is_below_five_percent_then_halved_to_the_minimum() -> None:
    losses = [4.0, 3.0, 2.86, 2.0, 1.0, 0.5]  # 4.7 % in the third epoch; the large gains after it change nothing
    assert rates(losses) == pytest.approx([0.4, 0.4, 0.4, 0.2, 0.1, 0.05, None])


def test_a_gain_of_exactly_the_threshold_is_enough_and_a_loss_that_grows_is_not() -> None:
    assert rates([4.0, 3.0], Newbob(base=0.4, minimum=0.05, threshold=0.25)) == [0.4, 0.4, 0.4]
    assert rates([4.0, 5.0]) == [0.4, 0.4, 0.2]


def test_a_loss_of_zero_ends_nothing() -> None:
    assert rates([4.0, 0.0, 0.0]) == [0.4] * 4


@pytest.mark.parametrize("criterion", [{"mmi": {"ce_weight": 0.1}}, {"chain": {"l2": 0.0}}])
def test_losses_that_may_be_negative_are_refused(criterion: dict[str, dict[str, float]]) -> None:
    with pytest.raises(InputError, match=r"^schedule=newbob: .* may be negative"):
        TrainOptions.build(criterion | {"epochs": 1}, {}, {"_target_": TARGET, "base": 0.4}, seed=1)


def test_the_minimum_itself_is_trained_with() -> None:
    """Rounding must not end the training: 0.01 x 0.7 = 0.006999999999999999."""
    assert rates([1.0] * 3, Newbob(base=0.01, minimum=0.007, factor=0.7)) == [0.01, 0.01, pytest.approx(0.007), None]


def test_values_out_of_range() -> None:
    for wrong in ({"minimum": 0.5}, {"minimum": 0.0}, {"factor": 1.0}, {"threshold": 1.0}, {"warmup_batches": -1}):
        with pytest.raises(InputError, match=f"schedule.{next(iter(wrong))}"):
            TrainOptions.build({}, {}, {"_target_": TARGET, "base": 0.4, **wrong}, seed=1)
    with pytest.raises(InputError, match=r"^schedule\._target_=asr_am\.train\.schedule\.Cosine: cannot be imported"):
        TrainOptions.build({}, {}, {"_target_": TARGET.replace("Newbob", "Cosine")}, seed=1)


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs")


def options(epochs: int = 30) -> TrainOptions:
    return TrainOptions(
        epochs=epochs, batch_size=4, model=BlstmOptions(1, 8, 6), schedule=NEWBOB, threads=1, report_every=1,
        checkpoint_every=2, device="cpu",
    )  # fmt: skip


def test_a_run_ends_itself_and_a_resumed_one_has_the_same_bits(egs_dir: Path, tmp_path: Path) -> None:
    train(egs_dir, tmp_path / "whole", options())
    records = lines(tmp_path / "whole")
    losses = [record["heldout_loss"] for record in records if "heldout_loss" in record]
    used = [
        next(record["lr"] for record in records if record.get("epoch") == 1 + epoch) for epoch in range(len(losses))
    ]
    assert [*used, None] == rates(losses) and used[-1] == 0.05 and len(losses) < 30
    for epochs in (2, len(losses) - 1, 30, 30):
        train(egs_dir, tmp_path / "parts", options(epochs))
    assert lines(tmp_path / "parts") == records
    assert str(final_state(tmp_path / "parts")["strategy"]) == str(final_state(tmp_path / "whole")["strategy"])


def test_all_learners_have_the_same_rates(egs_dir: Path, tmp_path: Path) -> None:
    summary = virtually(egs_dir, tmp_path, Bmuf, options())
    assert rates(summary["heldout_loss"])[-1] is None and summary["epochs_done"] < 30
    assert summary["schedule"]["minimum"] == NEWBOB.minimum and isinstance(NEWBOB.after([]), Anneal)
