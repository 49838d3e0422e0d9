"""Which acoustic model a configuration or a file means."""

from __future__ import annotations

from typing import Any

from asr_am.errors import InputError
from asr_am.model.acoustic import AcousticModel
from asr_am.model.blstm import Blstm, BlstmOptions
from asr_am.model.lstm_lookahead import Lstm, LstmOptions
from asr_am.options import build

Options = BlstmOptions | LstmOptions


def model_options(kind: str = "blstm", **sizes: Any) -> Options:
    """The options of a model of `kind` (blstm, lstm); InputError for a size that it does not have."""
    if kind not in ("blstm", "lstm"):
        raise InputError(f"model.kind={kind}: is blstm or lstm")
    return build(LstmOptions, sizes, "model") if kind == "lstm" else build(BlstmOptions, sizes, "model")


def kind_of(options: Options) -> str:
    """The `kind` that makes these options."""
    return "lstm" if isinstance(options, LstmOptions) else "blstm"


def make_model(options: Options, inputs: int, outputs: int) -> AcousticModel:
    """The model with random weights, of torch's generator."""
    if isinstance(options, LstmOptions):
        return Lstm(options, inputs, outputs)
    return Blstm(options, inputs, outputs)
