"""Which GPU of its host a learner computes on, and what carries the collectives of tensors on GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from asr_am.errors import InputError


def place(local_rank: int, gpus: int, share: bool) -> int:
    """Returns the number of a learner's GPU: the learners of a host take its GPUs in turn.

    Args:
        gpus: GPUs of the host, at least one.
        share: several learners may be on one GPU.

    Raises:
        InputError: there are more learners than GPUs, and they may not share.
    """
    if local_rank >= gpus and not share:
        raise InputError(
            f"learner {local_rank} of this host has no GPU, the host has {gpus}; use fewer learners per host, "
            "launcher.share_gpus=true to put several on a GPU, or train.device=cpu"
        )
    return local_rank % gpus


def gpu_name() -> str | None:
    """Returns a name of this process' GPU that no other GPU of any host has. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def collectives_by(gpu_names: Iterable[str | None]) -> Literal["nccl", "gloo"]:
    """Returns what carries collectives of tensors on GPUs. NCCL refuses two ranks on one GPU, and hosts without one.

    Args:
        gpu_names: `gpu_name` of each rank, the same on all ranks, so that all of them choose the same.
    """
    names = list(gpu_names)
    return "gloo" if None in names or len(set(names)) < len(names) else "nccl"
