"""Packages import only from those before them in ORDER, and only the stages and the tables of papers import Hydra."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    "errors", "disk", "options", "extensions", "progress", "signals", "compiled", "dask_jobs", "parallel", "data",
    "lang", "features", "hmm", "egs", "models", "distributed", "parallax", "train", "score", "decode", "report",
    "stages", "papers", "cluster",
)  # fmt: skip
ENTRY_POINTS = {
    "api",
    "kaldi_export",
    "lhotse_export",
    "network_export",
    "show",
    "transcribe",
}  # programs beside the stages


def imports(path: Path) -> set[str]:
    """Returns the full names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted((ROOT / "asr_am").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    package = path.relative_to(ROOT / "asr_am").with_suffix("").parts[0]
    assert package in {"__init__", *ORDER, *ENTRY_POINTS}, f"{package} is not in the layout"
    used = imports(path)
    own = {name.split(".")[1] for name in used if name.startswith("asr_am.")}
    if package in ORDER:
        above = own - set(ORDER[: ORDER.index(package) + 1])
        assert not above, f"imports from above: {above}"
    if package not in ("stages", "papers", "cluster"):
        assert not {name for name in used if name.split(".")[0] in ("hydra", "omegaconf", "local")}
    if package == "distributed":
        assert own <= {"errors", "disk", "options", "extensions", "signals", "compiled", "distributed"}, (
            "distributed must not import code for speech"
        )


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda path: path.name)
def test_scripts_import_what_there_is(path: Path) -> None:
    """mypy does not look at them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("asr_am"):
            module = import_module(str(node.module))
            for alias in node.names:
                found = hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}") is not None
                assert found, f"{path}:{node.lineno}: {alias.name}"


def test_no_module_imports_itself_through_others() -> None:
    """Imports within functions and for types count."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports(path)} & modules.keys()
        for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_every_stage_has_its_module() -> None:
    for recipe in (ROOT / "recipes").glob("*/run.sh"):
        for line in recipe.read_text().splitlines():
            if line.startswith("stage "):
                assert (ROOT / f"asr_am/stages/{line.split()[2]}.py").exists(), f"{recipe}: {line}"
