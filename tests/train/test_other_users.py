"""Two users of one host train at the same time, and each attacks the other's run: nothing can be reached."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.hostile_users import ALLOWED, HARMLESS, LEARNERS, duel, shared_folder, table
from tests.support.toy_runs import lease_log

LOOPBACK = "0100007F"
MAX_GROWTH = 128 << 10  # KiB of memory of a process while it is attacked, 60 MB of it numba for the first batch

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")


@pytest.mark.parametrize("strategy", ["dpsgd", "adpsgd"])
def test_another_user_of_the_host_reaches_nothing(strategy: str) -> None:
    """Prints the table with `pytest -s`."""
    with shared_folder() as folder:
        sides = duel(folder, strategy)
        print(f"\n{table({strategy: sides})}")
        for side in sides:
            assert {address for address, _ in side.ports} <= {LOOPBACK}
            assert strategy == "dpsgd" or not side.ports, "only torch's collectives listen on ports"
            assert not side.abstract
            gone_through = [row for row in side.rows if not row[1].startswith(HARMLESS) and row[0] not in ALLOWED]
            assert all("to a port" in what for what, _ in gone_through), gone_through
            assert len(side.rows) >= 50 and sum("Unix socket" in what for what, _ in side.rows) >= LEARNERS
            assert side.growth < MAX_GROWTH

            assert side.status == 0
            summary = json.loads((side.out / "summary.json").read_text())
            assert summary["restarts"] == 0 and summary["rejected"] == 0
            done = [(record["epoch"], batch) for record in lease_log(side.out) for batch in record["batch"]]
            assert len(done) == len(set(done)) == sum(summary["batches_per_learner"].values())
