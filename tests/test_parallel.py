from __future__ import annotations

import threading

from asr_am.parallel import parallel_map


def test_workers_inherit_what_cannot_be_pickled() -> None:
    """Checks that items are inherited: models of gigabytes and memory maps must not be pickled."""
    lock = threading.Lock()
    items = [(lock, number) for number in range(5)]
    assert parallel_map(lambda item: (item[0].locked(), item[1] ** 2), items, 2, "squares") == [
        (False, number**2) for number in range(5)
    ]
