"""Files of trained acoustic models: all that decoding needs, and nothing that is executed when loaded."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asr_am import disk
from asr_am.errors import InputError, is_disk_full
from asr_am.extensions import class_path
from asr_am.models.acoustic import AcousticModel, model_options

FORMAT = "asr_am acoustic model 1"


def write_torch(value: Any, path: Path) -> None:
    """Saves atomically and durably. Raises InputError if the disk is full or fails."""
    try:
        disk.replace(path, lambda file: torch.save(value, file))
    except (OSError, RuntimeError) as error:  # torch turns some errors of the disk into a RuntimeError
        if isinstance(error, RuntimeError) and not is_disk_full(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else "no space left"
        raise InputError(f"{path}: cannot be written ({reason}); free some disk space and start again") from error


def check_torch(path: Path, remedy: str) -> None:
    """Compares the checksums of a file. Raises InputError with `remedy` if it is missing or damaged."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a file in it, such as best.pt")
    try:
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():
                raise InputError(f"checksum of {damaged} is wrong")
    except Exception as error:  # zipfile raises many types for a damaged file
        raise InputError(f"{path}: not readable ({_first_line(error)}); {remedy}") from error


def read_torch(path: Path, remedy: str) -> Any:
    """Loads tensors and plain values only. Raises InputError with `remedy` if the file is missing or damaged."""
    check_torch(path, remedy)  # torch does not verify checksums
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many types for a damaged file
        raise InputError(f"{path}: not readable ({_first_line(error)}); {remedy}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def save_model(path: Path, model: AcousticModel, info: Mapping[str, Any]) -> None:
    """Writes a model, and `info` (plain values and tensors), which `load_acoustic_model` returns."""
    value = {
        "format": FORMAT,
        "model": class_path(model.options),
        "options": asdict(model.options),
        "inputs": model.inputs,
        "outputs": model.outputs,
        "weights": model.weights(),
        "info": dict(info),
    }
    write_torch(value, path)


def load_acoustic_model(path: Path) -> tuple[AcousticModel, dict[str, Any]]:
    """Loads a model in eval mode on the CPU. Raises InputError if the file is missing or damaged.

    Returns:
        The model, which maps x_BTF (float32) and lengths_B to logits_BTP, and its info: `dim`, `num_pdfs`, `kind` (of
        features), `chunk` (frames of a training chunk), `pdf_counts` (int64 tensor [P], for the priors), `epoch`,
        `heldout_loss`, `chain` (whether logits are scores as they are, without softmax and priors), `ctc` (whether they
        are those of `ctc_loss`).
    """
    remedy = "train the model again"
    value = read_torch(path, remedy)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise InputError(f"{path}: is not an acoustic model of this program; {remedy}")
    try:
        options = model_options(value["model"], **value["options"])
        model = options.make(int(value["inputs"]), int(value["outputs"]))
        model.load_state_dict(value["weights"])
        info = {"dim": model.inputs, "num_pdfs": model.outputs, **value["info"]}
    except InputError as error:  # of a class, which may be of a package that is not installed here, or of its options
        raise InputError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"{path}: is not a complete acoustic model ({str(error).splitlines()[0]}); {remedy}"
        ) from error
    if not all(torch.isfinite(weight).all() for weight in model.state_dict().values()):
        raise InputError(f"{path}: has weights that are not finite numbers; {remedy}")
    return model.eval(), info
