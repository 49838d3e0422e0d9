from __future__ import annotations

import logging

import pytest

from asr_am import compiled


def test_what_cannot_be_kept_is_compiled_anyway(caplog: pytest.LogCaptureFixture) -> None:
    compiled._tell.cache_clear()
    names: dict = {}
    exec("def double(n):\n    return 2 * n", names)  # of no file, so numba finds no folder for it, as without a HOME
    with caplog.at_level(logging.WARNING, "asr_am"):
        functions = [compiled.compiled(names["double"]), compiled.compiled(boundscheck=True)(names["double"])]
    assert [function(4) for function in functions] == [8, 8]
    assert caplog.text.count("compiled code cannot be kept") == 1 and "NUMBA_CACHE_DIR" in caplog.text
