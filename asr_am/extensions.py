"""Finds the classes that a configuration or a file names: this project's, and those of installed packages.

A configuration is data: a run's config.yaml may come from somebody else. So `_target_` names a class of the expected
type that is in this project, or that an installed package declares as an entry point of the group. Nothing else is
imported or called.

    asr_am.strategies    a subclass of asr_am.distributed.strategy.Strategy
    asr_am.models        the options of an acoustic model, a subclass of asr_am.models.acoustic.ModelOptions
    asr_am.schedules     a subclass of asr_am.train.schedule.Schedule
    asr_am.features      the options of a feature kind, a subclass of asr_am.features.kinds.FeatureKind
    asr_am.corpora       a function that prepares a corpus, as local/<corpus>/prepare.py

asr_am/README.md shows one of each.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from asr_am.errors import InputError


@cache
def declared(group: str) -> dict[str, str]:
    """Returns what installed packages declare in a group of entry points: the full name of each by its short name."""
    return {point.name: f"{point.module}.{point.attr}" for point in entry_points(group=group)}


def find_class(target: str, option: str, package: str, base: type, group: str = "") -> type:
    """Returns the class that a configuration names.

    Args:
        package: package or module of this project that the class may be in.
        base: class or protocol that it must implement.
        group: group of entry points that may declare it. "": none.

    Raises:
        InputError: it is somewhere else, cannot be imported or is of another kind.
    """
    found = _find(target, option, package, group)
    if not inspect.isclass(found) or not issubclass(found, base) or inspect.isabstract(found) or found is base:
        name = re.sub("(?<!^)(?=[A-Z])", " ", base.__name__).lower()
        raise InputError(f"{option}={target}: is no {name}; correct it")
    return found


def find_function(target: str, option: str, package: str, group: str = "") -> Callable[..., Any]:
    """Returns the function that a configuration names. Raises InputError unless the module that it names defines it."""
    found = _find(target, option, package, group)
    if not inspect.isfunction(found) or found.__module__ != target.rpartition(".")[0]:
        raise InputError(f"{option}={target}: is no function of that module; correct it")
    return found


def class_path(value: object) -> str:
    """Returns the full name of an object's class, as `find_class` takes it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _find(target: object, option: str, package: str, group: str) -> object:
    module, _, name = str(target).rpartition(".")
    if not f"{module}.".startswith(f"{package}.") and target not in declared(group).values():
        where = f"{package}, or an entry point {group} of an installed package" if group else package
        raise InputError(f"{option}={target}: must be in {where}; a configuration runs no other code")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{option}={target}: cannot be imported ({error}); correct it") from error
