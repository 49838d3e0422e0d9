"""Speeds of this machine on one core, measured in a few seconds and kept with their date, for stage plan."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asr_am import disk
from asr_am.errors import InputError
from asr_am.features.spectral import SpectralExtractor, SpectralOptions
from asr_am.models.acoustic import AcousticModel, model_options
from asr_am.train.frame_loss import batch_loss

SECONDS = 1.0  # of each measurement, after a first call
CHUNKS = 32  # of a training step
AUDIO = 6  # seconds
DISK_BYTES = 1 << 27


@dataclass(frozen=True)
class MachineSpeeds:
    """Speeds of one core, and of the disk.

    Attributes:
        network: what was trained, as text.
        features: frames/s of MFCC extraction.
        training: frames/s of training steps of the network.
        disk: bytes/s written and synchronised.
    """

    date: str
    processor: str
    network: str
    features: float
    training: float
    disk: float


def speeds(path: Path, model: dict[str, Any], inputs: int, outputs: int, chunk: int) -> MachineSpeeds:
    """Returns the speeds in a file, measured now if it has none of this processor and network."""
    network = json.dumps([model, inputs, outputs, chunk], sort_keys=True)
    processor = processor_name()
    try:
        known = MachineSpeeds(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not readable ({error}); remove it, and the speeds are measured again") from error
    if known is not None and (known.processor, known.network) == (processor, network):
        return known
    path.parent.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = MachineSpeeds(
            datetime.now(UTC).isoformat(timespec="minutes"), processor, network, _feature_speed(),
            _training_speed(model_options(**model).make(inputs, outputs), inputs, outputs, chunk),
            _disk_speed(path.parent),
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    path.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")
    return measured


def processor_name() -> str:
    """Returns the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _rate(work: Callable[[], object], amount: float) -> float:
    """Returns `amount` per CPU second of `work`. CPU time, so that other work on the machine does not count."""
    work()
    begin, count = time.process_time(), 0
    while (spent := time.process_time() - begin) < SECONDS:
        work()
        count += 1
    return amount * count / spent


def _feature_speed() -> float:
    extractor = SpectralExtractor(SpectralOptions(8000, 23, 13))
    samples = np.random.default_rng(0).standard_normal(AUDIO * 8000).astype(np.float32) * np.float32(1000)
    return _rate(lambda: extractor(samples), 100.0 * AUDIO)


def _training_speed(model: AcousticModel, inputs: int, outputs: int, chunk: int) -> float:
    x_BTF = torch.randn(CHUNKS, chunk, inputs)
    targets_BT = torch.randint(0, outputs, (CHUNKS, chunk))
    lengths_B = torch.full((CHUNKS,), chunk)
    model.train()

    def step() -> None:
        model.zero_grad()
        (batch_loss(model, x_BTF, lengths_B, targets_BT)[0] / targets_BT.numel()).backward()

    return _rate(step, CHUNKS * chunk)


def _disk_speed(folder: Path) -> float:
    """Writes a file as large as a small shard, and removes it."""
    path, block = folder / ".disk_speed", bytes(1 << 20)
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - begin)
    finally:
        disk.remove(path)
