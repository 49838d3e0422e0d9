"""Communication statistics in checkpoints, also in those of earlier versions."""

from __future__ import annotations

from collections import Counter

from asr_am.distributed.team import CommStats
from asr_am.train.comm_metrics import comm_stats_to_dict, load_comm_stats


def test_statistics_are_restored() -> None:
    stats, restored = CommStats(), CommStats()
    stats.messages_sent, stats.idle_seconds = 3, 1.5
    stats.bytes_sent[2] += 100
    load_comm_stats(restored, comm_stats_to_dict(stats))
    assert comm_stats_to_dict(restored) == comm_stats_to_dict(stats) and isinstance(restored.bytes_sent, Counter)


def test_names_of_earlier_versions_are_known() -> None:
    stats = CommStats()
    old = {"letters": 3, "refused": 1, "superseded": 2, "pull_seconds": {"0.1": 4}, "waiting_seconds": 1.5}
    load_comm_stats(stats, old)
    assert (stats.messages_sent, stats.rejected, stats.overwritten, stats.idle_seconds) == (3, 1, 2, 1.5)
    assert stats.pull_latency == {"0.1": 4} and stats.pull_latency["0.2"] == 0
