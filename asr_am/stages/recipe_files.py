"""Where configurations and the code of recipes are: in the checkout, or in the installed package (see setup.py)."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "recipe_files"
ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent  # holds conf/ and local/
CONF = ROOT / "conf"


def make_local_importable() -> None:
    """Lets Python find the package `local`, which prepares corpora, wherever the program was started."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
