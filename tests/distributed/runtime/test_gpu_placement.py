"""Which GPU a learner has, and what carries collectives, from ranks, hosts and numbers of GPUs alone."""

from __future__ import annotations

import os

import pytest
import torch

from asr_am.distributed.runtime.gpu_placement import collectives_by, place
from asr_am.errors import InputError
from asr_am.train.run_setup import training_device
from asr_am.train.train_options import TrainOptions


def names(learners: int, gpus: tuple[int, ...]) -> list[str | None]:
    """Returns the GPU of each rank with `learners` learners on each host, whose numbers of GPUs are given."""
    return [
        f"{host}-{place(local_rank, count, share=True)}" if count else None
        for host, count in enumerate(gpus)
        for local_rank in range(learners)
    ]


@pytest.mark.parametrize(("learners", "gpus", "found", "by"), [
    (4, (1,), ["0-0"] * 4, "gloo"),
    (4, (4,), ["0-0", "0-1", "0-2", "0-3"], "nccl"),
    (2, (4, 2), ["0-0", "0-1", "1-0", "1-1"], "nccl"),
    (3, (3, 2), ["0-0", "0-1", "0-2", "1-0", "1-1", "1-0"], "gloo"),  # one crowded host decides for all
    (1, (1, 0), ["0-0", None], "gloo"),
    (2, (0,), [None, None], "gloo"),
])  # fmt: skip
def test_learners_take_gpus_in_turn(learners: int, gpus: tuple[int, ...], found: list[str | None], by: str) -> None:
    assert names(learners, gpus) == found
    assert collectives_by(names(learners, gpus)) == by


def test_a_gpu_is_shared_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(InputError, match=r"^learner 3 of this host has no GPU, the host has 2; .*launcher\.share_gpus"):
        training_device(TrainOptions())
    assert training_device(TrainOptions(), share_gpus=True) == torch.device("cuda", 1)
    assert training_device(TrainOptions(device="cpu")) == torch.device("cpu")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "the same bits in every run"
    assert torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert training_device(TrainOptions()) == torch.device("cuda", 1)
