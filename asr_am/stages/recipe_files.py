"""Where configurations and the code of recipes are: in the checkout, or in the installed package (see setup.py)."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from asr_am.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "recipe_files"
ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent  # holds conf/ and local/
CONF = ROOT / "conf"


def make_local_importable() -> None:
    """Lets Python find the package `local`, which prepares corpora, wherever the program was started.

    It has no __init__.py, so that Python would take any other package of that name first, from the current folder or
    PYTHONPATH.

    Raises:
        InputError: another package of that name has been imported already.
    """
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # for processes that are started with this path
    ours = str(ROOT / "local")
    if "local" not in sys.modules:
        spec = ModuleSpec("local", None, is_package=True)
        spec.submodule_search_locations = [ours]
        sys.modules["local"] = module_from_spec(spec)
    found = sys.modules["local"]
    folders = list(getattr(found, "__path__", ()))
    if ours not in folders:
        where = getattr(found, "__file__", None) or ", ".join(folders)
        raise InputError(f"{where}: Python has imported this package `local` before that of the recipes; rename it")
