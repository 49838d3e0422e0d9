"""Communication statistics in checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import CommStats
from asr_am.errors import InputError
from asr_am.train.comm_metrics import comm_stats_to_dict, load_comm_stats
from asr_am.train.run_setup import RunSetup
from asr_am.train.simulate import simulate_run
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, WORKLOAD, cluster


def test_statistics_are_restored() -> None:
    stats, restored = CommStats(), CommStats()
    stats.messages_sent, stats.waiting_seconds = 3, 1.5
    stats.bytes_sent[2] += 100
    load_comm_stats(restored, [comm_stats_to_dict(stats)])
    assert comm_stats_to_dict(restored) == comm_stats_to_dict(stats) and isinstance(restored.bytes_sent, Counter)


class Apart(Sync):
    """Learners that never average."""

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)
        self.optimizer.step()
        return step_result


def test_learners_that_differ_need_a_consensus(tmp_path: Path) -> None:
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 12)
    setup = RunSetup(egs_dir, tmp_path / "run", OPTIONS, Apart, learners=2)
    with pytest.raises(InputError, match=r"learners have different weights, and its `consensus`"):
        simulate_run(setup, cluster(), WORKLOAD, 0)
