"""Links, commands and experiments that Markdown, configuration, scripts and docstrings name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "exp"} & set(path.relative_to(ROOT).parts))
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:asr_am|scripts|tests)(?:\.[a-z0-9_]+)*)")
EXPERIMENT = re.compile(r"\+experiment=([a-z0-9_/]*[a-z0-9_])")
PLACEHOLDERS = {"asr_am.stages", "scripts.soak"}  # followed by <name> or PART
INVENTED = {"papers", "fussion", "papers/toy"}  # of tests and of mistakes on purpose


def named(pattern: re.Pattern[str]) -> dict[str, Path]:
    """Returns what a pattern finds in the text files of the project, each with a file that has it."""
    return {
        found: path
        for folder in ("asr_am", "conf", "local", "recipes", "scripts", "tests", ".")
        for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*")
        if path.suffix in {".md", ".py", ".sh", ".yaml"} and path != Path(__file__)
        for found in pattern.findall(path.read_text())
    }


def anchors(path: Path) -> set[str]:
    """Returns the anchors of the headings of a file, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")
        for head in HEADING.findall(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        if name.startswith("http"):
            continue
        target = path.parent / name if name else path
        assert target.exists(), f"{path.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_modules_exist() -> None:
    for name, where in named(MODULE).items():
        path = ROOT / name.replace(".", "/")
        runs = any(file.exists() for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"))
        assert runs or name in PLACEHOLDERS, f"{where}: {name}"


def test_experiments_exist() -> None:
    for name, where in named(EXPERIMENT).items():
        assert name in INVENTED or (ROOT / f"conf/experiment/{name}.yaml").exists(), f"{where}: {name}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1500
