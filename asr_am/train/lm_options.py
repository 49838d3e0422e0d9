"""What decides a recurrent language model: its sizes and its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from asr_am.errors import InputError
from asr_am.model.lstm_lm import LstmLmOptions
from asr_am.options import build


@dataclass(frozen=True)
class LmOptions:
    """batch_size: sentences. longest: units of a sentence before it is cut. rate: to begin with; it is multiplied by
    `decay` after each epoch that did not lower dev perplexity, and `patience` such epochs in a row end the training.
    accumulator: what Adagrad's sums begin with. clip_norm: upper limit of the norm of the LSTM's gradient; 0: none.
    checkpoint_every: batches, beside the checkpoint after each epoch.
    """

    model: LstmLmOptions = field(default_factory=LstmLmOptions)
    epochs: int = 30
    batch_size: int = 32
    longest: int = 100
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
    rate: float = 0.003
    decay: float = 0.5
    patience: int = 3
    accumulator: float = 1e-6
    clip_norm: float = 1.0
    seed: int = 1
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        """InputError where a value is out of range."""
        for name in ("epochs", "batch_size", "longest", "patience", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"lm.train.{name}={getattr(self, name)}: must be at least 1")
        if self.model.sparse and self.optimizer == "adam":
            raise InputError("lm.model.sparse: Adam takes no sparse gradients; set lm.train.optimizer=adagrad or sgd")
        if self.rate <= 0 or not 0 < self.decay <= 1 or self.clip_norm < 0 or self.accumulator < 0:
            raise InputError("lm.train: rate must be above 0, decay above 0 and at most 1, clip_norm not negative")

    @classmethod
    def build(cls, model: Mapping[str, Any], train: Mapping[str, Any]) -> LmOptions:
        """From plain values, as configuration files hold them; InputError for an unknown name or another type."""
        return build(cls, {"model": build(LstmLmOptions, model, "lm.model"), **train}, "lm.train")

    def plain(self) -> dict[str, Any]:
        """As nested plain values."""
        return asdict(self)
