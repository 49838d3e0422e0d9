"""Section `versions`: the software that is there, and the ceilings of the device."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from scripts.gpu_check.check import Check

LOCK = Path(__file__).parents[1] / "requirements.lock"
CUDNN = 91300  # the first version whose LSTM computes in bfloat16


def section(check: Check) -> None:
    check.row("Python, torch", None, f"{platform.python_version()}, {torch.__version__}", torch=torch.__version__)
    other = other_versions()
    check.row("packages of other versions", None, ", ".join(other) or "none", packages=other)
    if check.device == "cuda":
        properties, cudnn = torch.cuda.get_device_properties(0), torch.backends.cudnn.version() or 0
        check.row(
            "GPU", True, f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )
        check.row("cuDNN computes in bfloat16", cudnn >= CUDNN, f"{cudnn}, needs {CUDNN}", cudnn=cudnn)
    ceilings(check)


def other_versions() -> list[str]:
    """Returns the packages that are installed in another version than scripts/requirements.lock has."""
    found = []
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text("utf-8"), re.MULTILINE):
        try:
            if version(name) != pinned:
                found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            pass  # a package that nothing here imports
    return found


def ceilings(check: Check) -> None:
    """Measures large matrix products and copies."""
    size = 256 if check.small else 8192
    for name, dtype, tf32 in (
        ("bfloat16", torch.bfloat16, False), ("float16", torch.float16, False), ("TF32", torch.float32, True),
        ("float32", torch.float32, False),
    ):  # fmt: skip
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a, b = (torch.randn(size, size, device=check.device).to(dtype) for _ in range(2))
        rate = 2 * size**3 / seconds(check, lambda a=a, b=b: torch.mm(a, b))
        check.row(f"matrix product, {name}", None, f"{rate / 1e12:.3g} TFLOP/s", flops=rate)
    torch.backends.cuda.matmul.allow_tf32 = False
    count = 2**16 if check.small else 2**31
    source = torch.zeros(count, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    rate = 2 * count / seconds(check, lambda: target.copy_(source))
    check.row("copy on the device", None, f"{rate / 1e9:.3g} GB/s read and written", rate=rate)
    host = torch.zeros(count // 8, dtype=torch.uint8, pin_memory=check.device == "cuda")
    part = target[: count // 8]
    rate = count // 8 / seconds(check, lambda: part.copy_(host, non_blocking=True))
    check.row("copy from the host", None, f"{rate / 1e9:.3g} GB/s", rate=rate)


def seconds(check: Check, work: Callable[[], object], repeats: int = 10) -> float:
    """Returns the mean seconds of `work` after three calls to warm up."""
    for _ in range(3):
        work()
    check.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    check.synchronize()
    return (time.perf_counter() - begin) / repeats
