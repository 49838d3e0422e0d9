"""Files of trained language models: weights, units and spelling, and nothing that is executed when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asr_am.errors import InputError
from asr_am.lang.units import Units
from asr_am.models.lstm_lm import LstmLm, LstmLmOptions
from asr_am.models.model_file import read_torch, write_torch

FORMAT = "asr_am language model 1"
REMEDY = "remove its folder and run stage 8 (rescore) again"


def save_lm(path: Path, model: LstmLm, units: Units, info: Mapping[str, Any]) -> None:
    """Writes a model with its units, and `info` (plain values)."""
    value = {
        "format": FORMAT,
        "options": asdict(model.options),
        "names": list(units.names),
        "spelling": dict(units.spelling),
        "weights": model.state_dict(),
        "info": dict(info),
    }
    write_torch(value, path)


def load_lm(path: Path) -> tuple[LstmLm, Units, dict[str, Any]]:
    """Returns the model (in eval mode, on the CPU), its units and info. Raises InputError for a damaged file."""
    value = read_torch(path, REMEDY)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise InputError(f"{path}: is not a language model of this program; {REMEDY}")
    try:
        units = Units(value["names"], value["spelling"])
        options = {name: option for name, option in value["options"].items() if name != "sparse"}  # in earlier files
        model = LstmLm(LstmLmOptions(**options), len(units))
        model.load_state_dict(value["weights"])
        info = dict(value["info"])
    except (InputError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"{path}: is not a complete language model ({str(error).splitlines()[0]}); {REMEDY}"
        ) from error
    if not all(torch.isfinite(weight).all() for weight in model.state_dict().values()):
        raise InputError(f"{path}: has weights that are not finite numbers; {REMEDY}")
    return model.eval(), units, info
