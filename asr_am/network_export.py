"""Writes a trained network for other programs: `python -m asr_am.network_export --model best.pt --out network.pt2`.

The file maps windows of features x [B, T, F] to log-likelihoods [B, K, P] up to a constant per frame: log-posteriors
minus log-priors of the pdfs, for a chain model its outputs as they are. K is T, or ceil(T / n) for an output per n
frames. B is free. T is the chunk that the network was trained on, or `--frames`, because torch.export writes out the
steps of an LSTM. Features are those that the network was trained on, not normalised yet. asr_am/decode/scorer.py says
how overlapping windows are averaged.

A .pt2 file is read with `torch.export.load(path).module()`, a .onnx file by any ONNX runtime. Before a file gets its
name it is read back, and its scores are compared with the network's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asr_am import disk
from asr_am.data.ownership import refuse_output
from asr_am.egs.store import log_priors
from asr_am.errors import InputError
from asr_am.models.model_file import load_acoustic_model
from asr_am.score.cli import exit_code

TOLERANCE = 1e-4  # largest difference of a log-likelihood that is accepted
INFO = "asr_am.json"  # in a .pt2 file: kind of features, frames of a window and per output, dimensions
BATCHES = (2, 1, 7)  # of the inputs that scores are compared on; the first one is traced


class LogLikelihoods(nn.Module):
    """An acoustic model with its priors."""

    log_priors_P: Tensor

    def __init__(self, model: nn.Module, counts_P: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("log_priors_P", torch.from_numpy(log_priors(counts_P.numpy())))

    def forward(self, x_BTF: Tensor) -> Tensor:
        """Returns log-likelihoods [B, K, P]."""
        return torch.log_softmax(self.model(x_BTF), dim=-1) - self.log_priors_P


def export_network(model_path: Path, out: Path, frames: int | None = None) -> float:
    """Exports a network as .pt2 or .onnx, by the suffix of `out`, for windows of as many frames as a training chunk.

    Returns the largest difference of a score between the network and the file as its runtime computes it.

    Raises:
        InputError: the model is not readable, the suffix is unknown, ONNX's packages are missing, or scores differ.
    """
    formats = {".pt2": (_write_pt2, _load_pt2), ".onnx": (_write_onnx, _load_onnx)}
    if out.suffix not in formats:
        raise InputError(f"{out}: must end in .pt2 or .onnx")
    refuse_output(out.parent)
    model, info = load_acoustic_model(model_path)
    counts_P = info.get("pdf_counts")
    if counts_P is None:
        raise InputError(f"{model_path}: has no counts of its pdfs, so no priors; train the model again")
    network = model if info.get("chain") or info.get("ctc") else LogLikelihoods(model, counts_P).eval()
    write, load = formats[out.suffix]
    partial = out.with_name(f".{out.name}.partial{out.suffix}")
    frames = frames or int(info["chunk"])
    description = {"kind": info["kind"], "frames": frames, "dim": info["dim"], "num_pdfs": info["num_pdfs"]}
    description |= {"frames_per_output": model.subsampling, "chain": bool(info.get("chain"))}
    description["ctc"] = bool(info.get("ctc"))
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with torch.no_grad():
            write(network, torch.zeros(BATCHES[0], frames, info["dim"]), description, partial)
            difference = _difference(network, load(partial), frames, info["dim"])
        if not difference <= TOLERANCE:
            raise InputError(f"{out}: its scores differ from the network's by up to {difference:.3g}; not written")
        partial.replace(out)
    finally:
        disk.remove(partial)
    return difference


def _difference(network: nn.Module, exported: Callable[[Tensor], np.ndarray], frames: int, dim: int) -> float:
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for batch in BATCHES:
        x_BTF = torch.randn(batch, frames, dim, generator=generator)
        worst = max(worst, float(np.abs(network(x_BTF).numpy() - exported(x_BTF)).max()))
    return worst


def _write_pt2(network: nn.Module, x_BTF: Tensor, description: dict[str, Any], path: Path) -> None:
    free = {0: torch.export.Dim("batch")}
    program = torch.export.export(network, (x_BTF,), dynamic_shapes=(free,))
    with path.open("wb") as file:  # of a path, torch says RuntimeError where it cannot be written
        torch.export.save(program, file, extra_files={INFO: json.dumps(description)})


def _load_pt2(path: Path) -> Callable[[Tensor], np.ndarray]:
    module = torch.export.load(path).module()
    return lambda x_BTF: module(x_BTF).numpy()


def _write_onnx(network: nn.Module, x_BTF: Tensor, description: dict[str, Any], path: Path) -> None:
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"{path.suffix}: {error}; pip install onnx onnxscript onnxruntime") from error
    free = {0: torch.export.Dim("batch")}
    torch.onnx.export(
        network, (x_BTF,), str(path), input_names=["features"], output_names=["log_likelihoods"], dynamo=True,
        dynamic_shapes=(free,), external_data=False,
    )  # fmt: skip
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {name: str(value) for name, value in description.items()})
    onnx.save(model, str(path))


def _load_onnx(path: Path) -> Callable[[Tensor], np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x_BTF: session.run(None, {"features": x_BTF.numpy()})[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m asr_am.network_export", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="exp/<corpus>/train/<run>/best.pt")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, .pt2 or .onnx")
    parser.add_argument("--frames", type=int, metavar="N", help="frames of a window (default: those of a chunk)")
    options = parser.parse_args(arguments)
    if options.frames is not None and options.frames < 1:
        parser.error("--frames must be at least 1")

    def work() -> None:
        difference = export_network(options.model, options.out, options.frames)
        print(f"{options.out}: scores differ from the network's by at most {difference:.2g}")

    return exit_code("asr_am.network_export", work)


if __name__ == "__main__":
    sys.exit(main())
