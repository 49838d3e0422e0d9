"""Tests which runs are compared, and the data of the figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asr_am.report.comparisons import Timed, by_batch, by_strategy, fault_kinds, single_learner, speeds, widest
from asr_am.report.plot_style import Style
from asr_am.report.runs import RunGroup, group_runs, read_training_runs
from asr_am.report.strategy_plots import draw_batches, draw_loss, draw_speedup
from tests.support.report_files import write_distributed, write_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOUR = 3600.0


def groups_of(corpus_dir: Path) -> list[RunGroup]:
    return group_runs(read_training_runs(corpus_dir))


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the labelled lines of an axes: label to (x, y)."""
    return {
        str(line.get_label()): (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    """Writes part of IBM's table 3: 9.47 h for one learner, 1.09 and 0.87 h for 16, 6.24 and 0.91 h with one slowed
    10x.
    """
    corpus = tmp_path / "exp" / "swb"
    for seed in (1, 2):
        write_distributed(corpus, "local", 1, 2 * 9.47 * HOUR, [2.0, 1.0 + seed / 10], seed=seed)
        for strategy, hours in (("sync", 1.09), ("adpsgd", 0.87)):
            write_distributed(corpus, strategy, 16, 2 * hours * HOUR, [2.5, 1.2 + seed / 10], seed=seed)
    write_distributed(corpus, "sync", 4, 3 * HOUR, [2.5])
    slow = {"slow": {"3": 10}}
    counts = {str(rank): 1 if rank == 3 else 11 for rank in range(16)}
    write_distributed(corpus, "sync", 16, 6.24 * HOUR, [2.5], faults=slow, name="slow-sync")
    write_distributed(
        corpus, "adpsgd", 16, 0.91 * HOUR, [2.5], faults=slow, name="slow-adpsgd", batches_per_learner=counts
    )
    return corpus


def test_accuracy_is_compared_at_one_batch_and_number_of_epochs(corpus_dir: Path) -> None:
    write_distributed(corpus_dir, "sync", 16, 1.0, [2.0, 1.0], batch=640)
    write_distributed(corpus_dir, "local", 1, 1.0, [2.0, 1.0], name="other", model="tdnn")
    once, twice = by_strategy(groups_of(corpus_dir))
    assert [(group.config.strategy, group.config.learners) for group in twice] == [
        ("local", 1), ("adpsgd", 16), ("sync", 16)
    ]  # fmt: skip
    assert {group.config.epochs for group in once} == {1} and single_learner(once) is None
    baseline = single_learner(twice)
    assert baseline is twice[0]
    assert [group.config.learners for group in widest(once)] == [4]  # groups with faults are left out
    faulty = [group for group in once if group.config.faults]
    assert len(faulty) == 2 and widest(faulty) == faulty  # except if all have faults


def test_one_learner_alone_is_no_comparison_of_strategies(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, f"blstm-s{seed}", seed, [1.0, 0.5])
    groups = groups_of(tmp_path)
    assert by_strategy(groups) == by_batch(groups) == speeds(groups) == []


def test_batches_are_compared_over_common_seeds(tmp_path: Path) -> None:
    for batch, seeds in ((64, (1, 2, 3)), (640, (2, 3, 4))):
        for seed in seeds:
            write_distributed(tmp_path, "sync", 4, 1.0, [3.0, batch / 64 + seed], seed=seed, batch=batch)
    write_distributed(tmp_path, "sync", 8, 1.0, [1.0, 1.0], batch=640, seed=2)
    write_distributed(tmp_path, "hybrid", 4, 1.0, [1.0, 1.0], batch=640, seed=2)
    (part,) = by_batch(groups_of(tmp_path))
    assert [(group.config.batch, group.seeds) for group in part] == [(64, [2, 3]), (640, [2, 3])]
    figure = draw_loss(part, ["batch 64", "batch 640"], [Style.of(0), Style.of(1)], "an4: held-out loss")
    drawn = lines(figure.axes[0])
    assert drawn == {
        "batch 64 (seeds 2-3, best 3.0000)": ([1, 2], [3, 3.5]),
        "batch 640 (seeds 2-3, best 3.0000)": ([1, 2], [3, 12.5]),
    }
    faint = [list(line.get_ydata()) for line in figure.axes[0].get_lines() if line.get_alpha() is not None]
    assert faint == [[3, 3], [3, 4], [3, 12], [3, 13]]
    assert figure.axes[0].get_xlabel() == "epoch" and "nats per frame" in figure.axes[0].get_ylabel()
    title = figure.get_suptitle()
    assert title.startswith("an4: held-out loss\n") and "sync, 4 learners" in title and "cluster ibm_a" in title


def test_a_run_that_diverged_leaves_the_figure(tmp_path: Path) -> None:
    for strategy, losses in (("adpsgd", [3.0, 1.0]), ("sync", [3.2, 1.1]), ("ps_async", [230.0, 700.0])):
        write_distributed(tmp_path, strategy, 4, 1.0, losses, batch=64)
    groups = groups_of(tmp_path)
    axes = draw_loss(groups, ["a", "b", "c"], [Style.of(n) for n in range(3)], "an4").axes[0]
    assert axes.get_ylim() == (0, 2 * 3.2) and len(lines(axes)) == 3


def test_losses_of_a_figure_may_be_negative(tmp_path: Path) -> None:
    for strategy, losses in (("adpsgd", [-0.1, -0.2]), ("sync", [-0.1, -0.2]), ("ps_async", [230.0, 700.0])):
        write_distributed(tmp_path, strategy, 4, 1.0, losses, batch=64)
    groups = groups_of(tmp_path)
    axes = draw_loss(groups, ["a", "b", "c"], [Style.of(n) for n in range(3)], "an4").axes[0]
    assert axes.get_ylim() == pytest.approx((-0.2, 0))


def test_batches_without_common_seeds_are_not_compared(tmp_path: Path) -> None:
    write_distributed(tmp_path, "sync", 4, 1.0, [3.0], seed=1, batch=64)
    write_distributed(tmp_path, "sync", 4, 1.0, [3.0], seed=2, batch=640)
    assert by_batch(groups_of(tmp_path)) == []


def test_speed_is_against_the_single_learner(corpus_dir: Path) -> None:
    (part,) = speeds(groups_of(corpus_dir))
    assert part.reference == Timed("local", 1, "")
    ups = {timed: round(part.speedup(timed) or 0, 2) for timed in part.seconds}
    assert ups == {
        Timed("local", 1, ""): 1.0, Timed("sync", 16, ""): 8.69, Timed("adpsgd", 16, ""): 10.89,
        Timed("sync", 4, ""): 3.16, Timed("sync", 16, "learner 3 slowed 10x"): 1.52,
        Timed("adpsgd", 16, "learner 3 slowed 10x"): 10.41,
    }  # fmt: skip
    assert part.speedup(Timed("hybrid", 16, "")) is None
    figure = draw_speedup(part, ["local", "adpsgd", "sync"], "swb: speed-up")
    assert figure is not None
    drawn = lines(figure.axes[0])
    assert drawn["ideal"] == ([1, 16], [1, 16])
    assert drawn["sync"][0] == [4, 16] and drawn["sync"][1] == pytest.approx([9.47 / 3, 9.47 / 1.09])
    assert drawn["adpsgd"][0] == [16] and drawn["adpsgd"][1] == pytest.approx([9.47 / 0.87])
    assert set(drawn) == {"ideal", "sync", "adpsgd"}
    assert "local with 1 learner, 9.47 h per epoch" in figure.get_suptitle()


@pytest.mark.parametrize(
    "other", [{"clock": "wall"}, {"cluster": "ibm_b"}, {"workload": "self"}, {"batch": 128}, {"model": "tdnn"}]
)
def test_speed_is_compared_of_runs_timed_alike_only(tmp_path: Path, other: dict) -> None:
    write_distributed(tmp_path, "local", 1, 100.0, [1.0], **other)
    write_distributed(tmp_path, "sync", 4, 20.0, [1.0])
    (part,) = speeds(groups_of(tmp_path))
    assert set(part.seconds) == {Timed("sync", 4, "")} and part.reference == Timed("sync", 4, "")
    assert draw_speedup(part, ["sync"], "x") is None


def test_without_one_learner_speed_is_against_the_fewest(tmp_path: Path) -> None:
    for strategy, learners, seconds in (("sync", 2, 60), ("hybrid", 2, 50), ("sync", 64, 5)):
        write_distributed(tmp_path, strategy, learners, seconds, [1.0])
    write_distributed(tmp_path, "sync", 2, 1.0, [1.0], faults={"slow": {"0": 2}}, name="slow")
    (part,) = speeds(groups_of(tmp_path))
    assert part.reference == Timed("hybrid", 2, "")
    figure = draw_speedup(part, ["hybrid", "sync"], "x")
    assert figure is not None and "hybrid with 2 learners, 50 s per epoch" in figure.get_suptitle()
    assert lines(figure.axes[0]) == {"sync": ([2, 64], [50 / 60, 10]), "ideal": ([2, 64], [1, 32])}
    assert figure.axes[0].get_xscale() == "log"


def test_untimed_and_faulty_runs_have_no_reference(tmp_path: Path) -> None:
    write_distributed(tmp_path, "sync", 2, 0.0, [1.0])
    write_distributed(tmp_path, "hybrid", 2, 5.0, [1.0], faults={"lost_share": 0.1})
    (part,) = speeds(groups_of(tmp_path))
    assert part.reference is None and list(part.seconds) == [Timed("hybrid", 2, "10 % of messages lost")]
    assert draw_speedup(part, ["hybrid", "sync"], "x") is None


def test_bars_are_the_batches_of_each_learner(corpus_dir: Path) -> None:
    (part,) = speeds(groups_of(corpus_dir))
    sixteen = [group for group in part.groups if group.config.learners == 16]
    assert fault_kinds(sixteen) == ["", "learner 3 slowed 10x"]
    figure = draw_batches(sixteen, "swb: batches per learner")
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels[:2]] == ["no faults", "learner 3 slowed 10x"]
    assert [panels[0].get_ylabel(), panels[2].get_ylabel()] == ["adpsgd\nbatches", "sync\nbatches"]
    heights = [[bar.get_height() for bar in axes.patches] for axes in panels]
    assert heights[1] == [1 if rank == 3 else 11 for rank in range(16)]
    assert heights[0] == heights[2] == heights[3] == [10] * 16  # per epoch, mean over seeds
    hatched = [rank for rank, bar in enumerate(panels[1].patches) if bar.get_hatch()]
    assert hatched == [3]


def test_a_missing_cell_of_the_bars_says_so(tmp_path: Path) -> None:
    write_distributed(tmp_path, "sync", 2, 1.0, [1.0])
    write_distributed(tmp_path, "adpsgd", 2, 1.0, [1.0], faults={"slow": {"0": 2}})
    panels = draw_batches(groups_of(tmp_path), "x").axes
    assert [len(axes.patches) for axes in panels] == [0, 2, 2, 0]
    assert panels[0].texts[0].get_text() == "no such run"


def test_faults_are_ordered_by_how_much_they_slow(tmp_path: Path) -> None:
    for factor in (100, 2, 10):
        write_distributed(tmp_path, "sync", 2, 1.0, [1.0], faults={"slow": {"0": factor}}, name=f"slow{factor}")
    write_distributed(tmp_path, "sync", 2, 1.0, [1.0])
    assert [faults.split()[-1:] for faults in fault_kinds(groups_of(tmp_path))] == [[], ["2x"], ["10x"], ["100x"]]
