"""Options from configuration files, whose values must have the types that a dataclass or a function says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from asr_am.errors import InputError

Options = TypeVar("Options")


def build(kind: type[Options], values: Mapping[str, Any], where: str) -> Options:
    """`kind(**values)`, a dataclass. where: the section of the configuration, as its user writes it; "": the top.

    InputError names an option that is unknown, missing or no number, or that has another type: a whole number will do
    for a float, never the reverse.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{where}={values}: must be a mapping of options to values")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise InputError(f"{_name(where, unknown[0])}: there is no such option; there are {', '.join(known)}")
    check_types(kind, values, where)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{_name(where, name)}: is missing")
    return kind(**values)


def check_types(signature: Callable[..., Any], values: Mapping[str, Any], where: str) -> None:
    """InputError unless values have the types of the annotations of their names."""
    types = get_type_hints(signature)
    for name, value in values.items():
        if name not in types:
            known = ", ".join(other for other in types if other != "return")
            raise InputError(f"{_name(where, name)}: there is no such option; there are {known}")
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place, given, said = _name(where, name, *first["loc"]), first["input"], first["msg"]
            said = said[0].lower() + said[1:]
            if first["type"] == "string_type" and given is not None:
                said += f"; quote it for Hydra and the shell: \"{place}='{given}'\""
            raise InputError(f"{place}={given}: {said}") from error
        if isinstance(value, float) and math.isnan(value):
            raise InputError(f"{_name(where, name)}={value}: must be a number")


def _name(*parts: str | int) -> str:
    return ".".join(str(part) for part in parts if part != "")
