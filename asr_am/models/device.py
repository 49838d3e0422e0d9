"""Where a model computes, by the option `train.device`."""

from __future__ import annotations

import os

import torch

from asr_am.errors import InputError


def choose_device(name: str) -> torch.device:
    """Returns the CPU, or the first GPU. Raises InputError if there is no GPU and the option asks for one.

    Call it before the GPU is used: it then computes the same bits in every run, and float32 products in TF32.

    Args:
        name: cpu, cuda, or auto, which takes a GPU if there is one.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device=cuda: this machine has no GPU that torch can use; use train.device=cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda", 0)
