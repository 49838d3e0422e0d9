"""Tables of papers: ratios, gates and the count of predictions, on known measures."""

from __future__ import annotations

from typing import Any

import pytest

from asr_am.errors import InputError
from asr_am.papers.cells import PaperTable, count_predictions, format_rows, rows, unmet

CELLS: dict[str, Any] = {
    "sync": {"published": {"hours": 2.0, "speed_up": 8.0}, "fits": "a.rate"},
    "slow": {"published": {"hours": 10.0, "speed_up": 1.6}},
    "ratio": {"published": {"hours": 5.0}, "relative_to": "sync"},
    "figure": {"published": {"hours": None}},
}
FOUND = {
    "sync": [{"hours": 2.1, "speed_up": 7.9}, {"hours": 1.9, "speed_up": 8.1}],
    "slow": [{"hours": 12.0, "speed_up": 1.4}, {"hours": 13.0, "speed_up": 1.3}],
    "ratio": [{"hours": 4.2}, {"hours": 3.8}],
    "figure": [{"hours": 7.0}, {"hours": 7.0}],
}


def table(**changes: Any) -> PaperTable:
    return PaperTable.build({"title": "A table", "member": "epoch", "within": 1.3, "seeds": [1, 2],
                             "restates": ["speed_up"], "cells": CELLS, **changes})  # fmt: skip


def test_rows_have_means_ratios_and_limits() -> None:
    sync, sync_speed, slow, slow_speed, ratio, figure = rows(table(), FOUND)
    assert (sync.mean, sync.ratio, sync.met) == (2.0, 1.0, True)
    assert slow.ratio == pytest.approx(1.25) and slow.met and slow_speed.met
    assert (ratio.published, ratio.mean) == (2.5, 2.0)  # 5 hours to the 2 of sync, and seed by seed
    assert figure.published is None and figure.ratio is None and figure.met
    assert not sync_speed.independent and ratio.independent and not figure.independent
    assert count_predictions(rows(table(), FOUND)) == (3, 2)  # sync, slow and ratio; a constant was fitted on sync


@pytest.mark.parametrize(
    ("within", "far"), [(1.3, []), (1.24, ["slow, hours", "ratio, hours"]), (1.26, [])], ids=["loose", "tight", "exact"]
)
def test_values_too_far_from_the_published_ones_are_named(within: float, far: list[str]) -> None:
    messages = unmet(table(within=within), FOUND)
    assert [message.partition(":")[0] for message in messages] == far
    assert ("too far" in format_rows(rows(table(within=within), FOUND))) == bool(far)


def test_an_order_holds_only_beyond_the_spread_of_the_seeds() -> None:
    assert unmet(table(rising={"hours": [["sync", "ratio", "figure", "slow"]]}), FOUND) == []
    assert unmet(table(rising={"hours": [["slow", "figure"]]}), FOUND) == ["hours does not rise from slow to figure"]
    touching = {**FOUND, "ratio": [{"hours": 2.0}, {"hours": 3.8}]}
    assert unmet(table(within=9.0, rising={"hours": [["sync", "ratio"]]}), touching) == [
        "hours does not rise from sync to ratio"
    ]


def test_a_published_zero_must_be_met() -> None:
    cells = {"none": {"published": {"late": 0}}}
    assert unmet(table(cells=cells), {"none": [{"late": 0.0}, {"late": 0.0}]}) == []
    assert len(unmet(table(cells=cells), {"none": [{"late": 0.0}, {"late": 0.1}]})) == 1


def test_a_failed_run_leaves_dashes() -> None:
    found = {name: measures for name, measures in FOUND.items() if name != "sync"}
    made = rows(table(), found)
    assert [row.mean for row in made if row.cell in ("sync", "ratio")] == [None, None, None]
    assert "| sync | hours | 2 | – |  | – | constant fitted |" in format_rows(made)
    assert unmet(table(rising={"hours": [["slow", "sync"]]}), found) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"within": 0.9}, "table.within=0.9: must be above 1"),
        ({"first": ["nobody"]}, "there is no cell 'nobody'"),
        ({"rising": {"hours": [["sync", "nobody"]]}}, "there is no cell 'nobody'"),
        ({"cells": {"a": {"relative_to": "b"}}}, "there is no cell 'b'"),
        ({"cells": {"a": {"publishd": {}}}}, "table.cells.a.publishd: there is no such option"),
        ({"member": "epok"}, "table.member=epok"),
    ],
)
def test_wrong_tables_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        table(**changes)


def test_an_unknown_measure_is_named() -> None:
    with pytest.raises(InputError, match=r"table.cells.sync: its runs have no hours, only days"):
        rows(table(), {"sync": [{"days": 1.0}, {"days": 1.0}]})


@pytest.mark.parametrize("changes", [{"rising": {"loss": [["slow", "figure"]]}}, {"first": []}], ids=["rising", "base"])
def test_a_measure_that_another_cell_needs_is_named(changes: dict[str, Any]) -> None:
    cells = {"slow": {}, "figure": {"published": {"loss": 1.0}, "relative_to": "slow"}}
    found = {"slow": [{"hours": 2.0}], "figure": [{"loss": 3.0}]}
    with pytest.raises(InputError, match=r"table.cells.slow: its runs have no loss, only hours"):
        unmet(table(cells=cells, seeds=[1], **changes), found)


def test_nothing_is_divided_by_0() -> None:
    cells = {"base": {"published": {"late": 0}}, "other": {"published": {"late": 0.1}, "relative_to": "base"}}
    (_, other) = rows(table(cells=cells), {"base": [{"late": 0.0}, {"late": 0.2}], "other": [{"late": 0.1}] * 2})
    assert other.published is None and other.ours == [] and other.met
