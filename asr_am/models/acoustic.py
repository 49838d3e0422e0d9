"""Base classes of acoustic models, which normalise features and map them to logits of pdfs, and of their options.

A model is a file with both. A configuration names the options (conf/model), and these make the model.

Shapes: B chunks or utterances, T frames, K outputs, F features, P pdfs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.errors import InputError
from asr_am.extensions import find_class
from asr_am.options import build

DEFAULT = "asr_am.models.blstm.BlstmOptions"


def model_options(_target_: str = DEFAULT, **options: Any) -> ModelOptions:
    """Returns the options of a model, given the values of a configuration.

    Args:
        _target_: full name of their class, in this package or an entry point `asr_am.models`.
        options: their values by name.

    Raises:
        InputError: the class is no such options, or an option is unknown, of another type or out of range.
    """
    found = find_class(_target_, "model._target_", "asr_am.models", ModelOptions, "asr_am.models")
    return build(found, options, "model")


@dataclass(frozen=True)
class ModelOptions(ABC):
    """Base class of the options of acoustic models. A subclass is a frozen dataclass of plain values."""

    @abstractmethod
    def make(self, inputs: int, outputs: int) -> AcousticModel:
        """Makes the model with random weights from torch's default generator.

        Args:
            inputs: dimension of the features, F.
            outputs: number of pdfs, P.
        """

    def activations(self) -> int:
        """Returns the values per frame that a training step keeps for the backward pass, for the plan. 0: not known."""
        return 0

    def check_least(self, **least: int) -> None:
        """Raises InputError if an option is below its least value."""
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least {value}")


def check_dropout(share: float) -> None:
    """Raises InputError unless the option `dropout` is a share below 1."""
    if not 0 <= share < 1:
        raise InputError(f"model.dropout={share}: must be at least 0 and below 1")


def check_subsampling(frames: int, possible: Sequence[int] = (1, 2, 3, 4)) -> None:
    """Raises InputError unless the option `subsampling` is possible."""
    if frames not in possible:
        raise InputError(f"model.subsampling={frames}: must be one of {', '.join(map(str, possible))}")


class AcousticModel(nn.Module):
    """Base class. Maps x_BTF and lengths_B (None: all T) to logits [B, K, P], without a softmax.

    K is T, or ceil(T / n) if the model has an output for every n frames. Output k is for frames n k to n k + n - 1.

    A subclass has all layers but the last in `hidden`. Training takes these and `output` apart, see `frame_loss`.
    Frames at or past a sequence's length do not influence others, and their own logits have no meaning.

    Attributes:
        subsampling: Frames per output, n.
        cuda_graph: Whether a GPU may compute gradients by a CUDA graph: nothing waits for the GPU, and `lengths_B` may
            be on it.
        fixed_buffers: Names of buffers that training does not change.
        options: Options that have made the model.
        inputs: Dimension of the features, F.
        outputs: Number of pdfs, P.
        mean_F: Buffer, subtracted from the features.
        scale_F: Buffer, multiplied with the features after that.
        output: The last layer, linear.
        xent: A second last layer, in training with `chain_loss` only.
    """

    subsampling = 1
    cuda_graph = False
    fixed_buffers = frozenset({"mean_F", "scale_F"})
    options: ModelOptions
    mean_F: Tensor
    scale_F: Tensor
    output: nn.Linear
    xent: nn.Linear | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs, self.xent = inputs, outputs, None
        self.register_buffer("mean_F", torch.zeros(inputs))
        self.register_buffer("scale_F", torch.ones(inputs))

    def set_normalisation(self, mean_F: Tensor, deviation_F: Tensor) -> None:
        """Sets mean and standard deviation of the features, so that inputs get zero mean and unit variance."""
        self.mean_F.copy_(mean_F)
        self.scale_F.copy_(1.0 / deviation_F.clamp_min(1e-5))

    def normalise(self, x_BTF: Tensor) -> Tensor:
        """Returns features of zero mean and unit variance [B, T, F]."""
        return (x_BTF - self.mean_F) * self.scale_F

    def hidden(self, x_BTF: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the inputs of the output layer [B, K, H], with matrix products in `dtype`. Weights stay float32."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers of the finished model, without `xent`."""
        return {name: weight for name, weight in self.state_dict().items() if not name.startswith("xent.")}

    def forward(self, x_BTF: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Returns logits [B, K, P]."""
        return self.output(self.hidden(x_BTF, lengths_B))


def padding_mask(x_BTF: Tensor, lengths_B: Tensor | None) -> Tensor | None:
    """Returns True for frames inside their sequence, bool [B, T, 1]. None if all are."""
    if lengths_B is None:
        return None
    frame_T1 = torch.arange(x_BTF.shape[1], device=x_BTF.device)[:, None]
    return frame_T1 < lengths_B.to(x_BTF.device, non_blocking=True)[:, None, None]


def lengths_of_outputs(lengths_B: Tensor | None, subsampling: int) -> Tensor | None:
    """Returns the number of outputs of each sequence, ceil(length / subsampling)."""
    return None if lengths_B is None else (lengths_B + subsampling - 1) // subsampling


def stack_frames(x_BTF: Tensor, lengths_B: Tensor | None, size: int) -> tuple[Tensor, Tensor | None]:
    """Returns `size` frames side by side as one, and the lengths of what results. Zeros fill the last one."""
    if size == 1:
        return x_BTF, lengths_B
    mask_BT1 = padding_mask(x_BTF, lengths_B)
    x_BTF = x_BTF if mask_BT1 is None else x_BTF * mask_BT1
    x_BTF = functional.pad(x_BTF, (0, 0, 0, -x_BTF.shape[1] % size))
    return x_BTF.unflatten(1, (-1, size)).flatten(2), lengths_of_outputs(lengths_B, size)


def subsample(x_BTF: Tensor, lengths_B: Tensor | None, subsampling: int) -> tuple[Tensor, Tensor | None]:
    """Returns the middle frame of each output, and the number of outputs of each sequence.

    Where a sequence ends before the middle, it is its last frame.

    Args:
        x_BTF: frames, or their targets [B, T].
        lengths_B: frames of each sequence, None: all T.
        subsampling: frames per output.
    """
    frames = x_BTF.shape[1]
    middle_K = torch.arange(0, frames, subsampling, device=x_BTF.device) + subsampling // 2
    if lengths_B is None:
        return x_BTF[:, middle_K.clamp(max=frames - 1)], None
    last_B1 = lengths_B.to(x_BTF.device, non_blocking=True)[:, None] - 1
    frame_BK = torch.minimum(middle_K, last_B1)
    index = frame_BK.view(*frame_BK.shape, *[1] * (x_BTF.dim() - 2))
    return x_BTF.take_along_dim(index, dim=1), lengths_of_outputs(lengths_B, subsampling)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Context in which torch's layers compute matrix products in bfloat16, or in the dtype of their weights.

    Args:
        device: where they compute.
        dtype: bfloat16, or any other for that of the weights.
    """
    if not torch.amp.is_autocast_available(device.type):  # the meta device
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
