from __future__ import annotations

import threading

from asr_am.parallel import parallel_map


def test_workers_inherit_what_could_not_be_copied_to_them() -> None:
    """A model of gigabytes, or a memory map, is not pickled for each item."""
    lock = threading.Lock()
    items = [(lock, number) for number in range(5)]
    assert parallel_map(lambda item: (item[0].locked(), item[1] ** 2), items, 2, "squares") == [
        (False, number**2) for number in range(5)
    ]
