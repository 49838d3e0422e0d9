"""Fills a folder with wheels of what the GPU check imports beside torch, and installs from it what a Python lacks.

    python wheels.py collect FOLDER [--python 3.12] [--without NAME ...]
    python wheels.py install FOLDER TARGET

Imports nothing but the standard library, as nothing else may be there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"
NEEDED = (
    "annotated-types", "audioread", "cffi", "charset-normalizer", "click", "cytoolz", "greenlet", "intervaltree",
    "kaldifst", "kaldiio", "lhotse", "llvmlite", "markdown-it-py", "mdurl", "numba", "numpy", "packaging", "pycparser",
    "pydantic", "pydantic-core", "pygments", "pyyaml", "pyzmq", "rich", "scipy", "sortedcontainers", "soundfile",
    "tabulate", "toolz", "tqdm", "typing-extensions", "typing-inspection", "urllib3",
)  # fmt: skip


def pins() -> dict[str, str]:
    """Returns the version of each needed package in the lock file."""
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text("utf-8"), re.MULTILINE))
    return {name: found[name] for name in NEEDED}


def has(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def pip(*arguments: str) -> None:
    """Runs pip. Ends the program in one line if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if status := subprocess.run(command).returncode:
        sys.exit(f"gpu_check: {' '.join(command[1:4])} has failed with exit status {status}, see above")


def collect(folder: Path, python: str, without: list[str]) -> None:
    chosen = [f"{name}=={pin}" for name, pin in pins().items() if name not in without]
    target = ["--only-binary=:all:", "--no-deps", "--python-version", python, "--implementation", "cp"]
    pip("download", *target, "--dest", str(folder), *chosen)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"gpu_check: {len(chosen)} packages for Python {python} in {folder}, {size / 2**20:.0f} MiB")


def install(folder: Path, target: Path) -> None:
    missing = [f"{name}=={pin}" for name, pin in pins().items() if not has(name)]
    if not has("torch"):
        sys.exit(f"gpu_check: {sys.executable} has no torch; name another Python: PYTHON=/path/to/python3")
    if not missing:
        return
    if not folder.is_dir():
        sys.exit(
            f"gpu_check: {sys.executable} lacks {', '.join(missing)}, and there is no folder {folder} with their "
            "wheels; make it with scripts/gpu_check.sh --collect where there is a network"
        )
    pip(
        "install",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--find-links",
        str(folder),
        "--target",
        str(target),
        *missing,
    )
    print(f"gpu_check: {len(missing)} packages from {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for command in ("collect", "install"):
        part = commands.add_parser(command)
        part.add_argument("folder", type=Path)
        if command == "collect":
            part.add_argument("--python", default=own, help="version of the Python that will install them")
            part.add_argument("--without", nargs="+", default=[], help="packages that it has already")
        else:
            part.add_argument("target", type=Path)
    options = parser.parse_args()
    if options.command == "collect":
        collect(options.folder, options.python, options.without)
    else:
        install(options.folder, options.target)


if __name__ == "__main__":
    main()
