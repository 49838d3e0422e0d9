"""Makes acoustic models from a configuration or a file."""

from __future__ import annotations

from typing import Any

from asr_am.errors import InputError
from asr_am.model.acoustic import AcousticModel
from asr_am.model.blstm import Blstm, BlstmOptions
from asr_am.model.lstm_lookahead import Lstm, LstmOptions
from asr_am.options import build

Options = BlstmOptions | LstmOptions


def model_options(kind: str = "blstm", **sizes: Any) -> Options:
    """Returns the options of a model of `kind` (blstm or lstm). Raises InputError for an unknown option."""
    if kind not in ("blstm", "lstm"):
        raise InputError(f"model.kind={kind}: must be blstm or lstm")
    return build(LstmOptions, sizes, "model") if kind == "lstm" else build(BlstmOptions, sizes, "model")


def kind_of(options: Options) -> str:
    """Returns the kind of model that has these options."""
    return "lstm" if isinstance(options, LstmOptions) else "blstm"


def make_model(options: Options, inputs: int, outputs: int) -> AcousticModel:
    """Makes a model with random weights from torch's default generator."""
    if isinstance(options, LstmOptions):
        return Lstm(options, inputs, outputs)
    return Blstm(options, inputs, outputs)
