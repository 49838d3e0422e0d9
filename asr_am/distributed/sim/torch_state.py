"""What torch keeps per operating-system thread, saved and put back so that each virtual task has its own.

All tasks share one thread. Without this, a task that blocks under `no_grad` would turn off another's gradients, one
inside autocast would lower another's precision, and the tasks would draw from one random stream, in an order that
depends on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TorchState:
    """grad: whether gradients are recorded. autocast: (enabled, dtype) by device. nesting: autocast contexts entered
    and not left: the cache of weights in low precision is cleared when the last one is left. random: of the CPU.
    """

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    nesting: int
    random: Tensor

    @classmethod
    def of_new_task(cls, seed: int) -> TorchState:
        """What a thread starts with, and a random stream of its own."""
        types = tuple((False, torch.get_autocast_dtype(device)) for device in DEVICES)
        return cls(True, types, 0, torch.Generator().manual_seed(seed).get_state())

    @classmethod
    def capture(cls) -> TorchState:
        types = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)
        return cls(torch.is_grad_enabled(), types, _nesting(), torch.get_rng_state())

    def restore(self) -> None:
        torch.set_grad_enabled(self.grad)
        for device, (enabled, dtype) in zip(DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        _set_nesting(self.nesting)
        torch.set_rng_state(self.random)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(wanted: int) -> None:
    """A task that was inside autocast finds the cache empty, never full of weights that changed meanwhile."""
    now = _nesting()
    if now or wanted:
        torch.clear_autocast_cache()
    for _ in range(now, wanted):
        torch.autocast_increment_nesting()
    for _ in range(wanted, now):
        torch.autocast_decrement_nesting()
