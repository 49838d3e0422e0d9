"""Forty scenarios of random faults for every strategy; `scripts/soak.sh` runs a thousand of them."""

from __future__ import annotations

import pytest

from tests.support.soak import KINDS, STRATEGIES, soak


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_hangs_and_every_batch_is_done_once(name: str) -> None:
    tally = soak(name, range(40))
    assert not tally.failed, tally.failed
    assert tally.scenarios.keys() >= KINDS[name], f"a kind of fault was never seen: {tally.scenarios}"
