"""Adds conf/ and local/ to the wheel, as asr_am/recipe_files. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the recipes' files beside the package. An editable installation finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in ("conf", "local"):
            target = Path(self.build_lib) / "asr_am/recipe_files" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithRecipes})
