"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that both of two workers are busy to the end."""
    items.sort(key=lambda item: item.path.name != "test_recipe.py")
