"""Imports what a configuration names in `_target_`, from the packages where such code may be.

A configuration is data: a run's config.yaml may come from somebody else. So `_target_` names a class or function of
this project that has the expected type, at the top of a section, and nothing else is imported or called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from asr_am.errors import InputError
from asr_am.stages.recipe_files import make_local_importable


def find_class(target: str, option: str, package: str, base: type) -> type:
    """Returns the class that a configuration names.

    Args:
        target: full name of the class.
        option: name of the option that has it, for messages.
        package: package or module that the class must be in.
        base: class or protocol that it must implement.

    Raises:
        InputError: it is somewhere else, cannot be imported or is of another kind.
    """
    found = _find(target, option, package)
    if not inspect.isclass(found) or not issubclass(found, base) or inspect.isabstract(found) or found is base:
        raise InputError(f"{option}={target}: is no {base.__name__.lower()}; correct it")
    return found


def find_function(target: str, option: str, package: str) -> Callable[..., Any]:
    """Returns the function that a configuration names. Raises InputError unless a module of `package` defines it."""
    found = _find(target, option, package)
    if not inspect.isfunction(found) or found.__module__ != target.rpartition(".")[0]:
        raise InputError(f"{option}={target}: is no function of that module; correct it")
    return found


def _find(target: object, option: str, package: str) -> object:
    module, _, name = str(target).rpartition(".")
    if not f"{module}.".startswith(f"{package}."):
        raise InputError(f"{option}={target}: must be in {package}; a configuration runs no other code")
    make_local_importable()
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{option}={target}: cannot be imported ({error}); correct it") from error
