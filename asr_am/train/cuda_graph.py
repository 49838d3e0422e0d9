"""The gradient of a batch as a CUDA graph.

Forward and backward pass of a bi-LSTM are some thousand kernels, and a batch of a usual size takes less time to compute
than they take to launch. A graph launches them at once. It is for one shape of a batch, and gives the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

AHEAD = 2  # batches that wait for the GPU. Each has memory for its inputs

Compute = Callable[..., tuple[Tensor, Tensor]]
"""Computes a gradient, whose place is always the same, from some tensors. Returns loss and correct frames."""


class GraphedGradient:
    """Replays `compute`.

    Args:
        compute: as above. Nothing in it may wait for the GPU.
        inputs: tensors on the GPU, for shapes and types.
        statistics: buffers that `compute` changes. They have their values again after this.

    Raises:
        RuntimeError: `compute` cannot be captured.
    """

    def __init__(self, compute: Compute, inputs: Sequence[Tensor], statistics: Sequence[Tensor]) -> None:
        self._inputs, self._graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
        self._ends: deque[torch.cuda.Event] = deque()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before, kept = generator.clone_state(), [x.clone() for x in statistics]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):  # libraries prepare themselves
                    compute(*self._inputs)
            torch.cuda.current_stream().wait_stream(stream)
            # other threads may use the GPU meanwhile
            with torch.cuda.graph(self._graph, _pool(), stream, capture_error_mode="thread_local"):
                self._outputs = compute(*self._inputs)
        except RuntimeError:
            generator.graphsafe_set_state(before)  # that of a capture that has failed is of no use
            raise
        finally:
            for x, value in zip(statistics, kept, strict=True):
                x.copy_(value)
        generator.set_state(before.get_state())

    def fits(self, *inputs: Tensor) -> bool:
        """Returns True if the graph is for inputs of these shapes."""
        return all(x.shape == own.shape for x, own in zip(inputs, self._inputs, strict=True))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what `compute` would. Waits if the GPU is some batches behind.

        Args:
            inputs: on the GPU, or in page-locked memory.
        """
        if len(self._ends) == AHEAD:
            self._ends.popleft().synchronize()
        for x, given in zip(self._inputs, inputs, strict=True):
            x.copy_(given, non_blocking=True)
        self._graph.replay()
        self._ends.append(torch.cuda.Event())
        self._ends[-1].record()
        loss, correct = self._outputs
        return loss.clone(), correct.clone()


@cache
def _pool() -> Any:
    """Memory of all graphs of this process, which run one after the other."""
    return torch.cuda.graph_pool_handle()
