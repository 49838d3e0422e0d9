"""Compares Parallax in four processes on this host with one device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from asr_am.distributed.runtime.launcher import launch
from tests.support.toy_lm import BATCHES, EVERY, assert_close, make_batches, reference, rounds_of


@pytest.mark.parametrize("cases", [("all-gather", "on"), ("off",)], ids=str)
def test_real_learners_do_what_one_device_does(cases: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.parallax_worker", str(tmp_path), *cases]
    launch(command, 4, synchronous=True, env={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"})
    expected = reference("adam", rounds_of(make_batches(BATCHES)), 0.3)
    for case in cases:
        learners = [torch.load(tmp_path / f"{case}.{rank}.pt", weights_only=True) for rank in range(4)]
        for learner in learners:
            for k, weights in enumerate(learner["weights"], 1):
                assert_close(weights, expected[EVERY * k - 1])
            assert len(learner["weights"]) == 4 and learner["losses"] == learners[0]["losses"]
