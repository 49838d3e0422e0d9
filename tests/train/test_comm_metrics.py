"""Communication statistics in checkpoints."""

from __future__ import annotations

from collections import Counter

from asr_am.distributed.team import CommStats
from asr_am.train.comm_metrics import comm_stats_to_dict, load_comm_stats


def test_statistics_are_restored() -> None:
    stats, restored = CommStats(), CommStats()
    stats.messages_sent, stats.waiting_seconds = 3, 1.5
    stats.bytes_sent[2] += 100
    load_comm_stats(restored, [comm_stats_to_dict(stats)])
    assert comm_stats_to_dict(restored) == comm_stats_to_dict(stats) and isinstance(restored.bytes_sent, Counter)
