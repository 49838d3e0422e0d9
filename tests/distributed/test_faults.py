"""Scenarios of random faults for every strategy. `python -m scripts.soak.virtual` runs a thousand."""

from __future__ import annotations

import pytest

from tests.support.soak import KINDS, STRATEGIES, soak

# 6 seeds in place of 10
SLOW = ("adpsgd", "adpsgd-groups", "adpsgd-delayed", "ps_async", "psp")


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_hangs_and_every_batch_is_done_once(name: str) -> None:
    report = soak(name, range(6 if name in SLOW else 10))
    assert not report.failed, report.failed
    assert report.scenarios.keys() >= KINDS[name], f"a kind of fault was never seen: {report.scenarios}"
