"""Builds options from configuration files and checks their types against annotations."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from asr_am.errors import InputError

Options = TypeVar("Options")


def build(kind: type[Options], values: Mapping[str, Any], where: str) -> Options:
    """Builds a dataclass from configuration values.

    Args:
        kind: The dataclass.
        values: Its fields by name.
        where: Section of the configuration for error messages, as users write it. "" is the top level.

    Raises:
        InputError: An option is unknown, missing, NaN or of the wrong type. An integer is accepted for a float, but not
            the reverse.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{where}={values}: must be a mapping of options to values")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise no_such_option(_name(where, unknown[0]), known)
    check_types(kind, values, where)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{_name(where, name)}: is missing; set it")
    return kind(**values)


def check_types(signature: Callable[..., Any], values: Mapping[str, Any], where: str) -> None:
    """Raises InputError unless each value has the type that `signature` annotates for its name.

    Args:
        signature: a dataclass, or a function whose parameters with a default are options.
        values: options by name.
        where: their section, for error messages.
    """
    types = get_type_hints(signature)
    if not isinstance(signature, type):
        options = [p.name for p in inspect.signature(signature).parameters.values() if p.default is not p.empty]
        if bare := [name for name in options if name not in types]:
            raise InputError(
                f"{_name(where, bare[0])}: its argument has no type; annotate it, as in `{bare[0]}: int = 1`"
            )
        types = {name: types[name] for name in options}
    for name, value in values.items():
        if name not in types:
            raise no_such_option(_name(where, name), types)
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            option, given, reason = _name(where, name, *first["loc"]), first["input"], _reason(first)
            if first["type"] == "string_type" and given is not None:
                reason += f"; quote it for Hydra and the shell: \"{option}='{given}'\""
            raise InputError(f"{option}={given}: {reason}") from error
        if isinstance(value, float) and math.isnan(value):
            raise InputError(f"{_name(where, name)}={value}: must be a number")


EXPECTED = {  # what a value must be, by the kind of pydantic's error
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "string_type": "text", "list_type": "a list, such as [1,2]",
    "dict_type": "a mapping, such as {a: 1}", "none_required": "null", "dataclass_type": "a section with options",
    "dataclass_exact_type": "a section with options", "is_instance_of": "a section with options",
}  # fmt: skip


def _reason(error: ErrorDetails) -> str:
    """Returns what is wrong with a value, in plain words."""
    if error["type"] == "literal_error":
        return f"must be {error['ctx']['expected']}"
    return f"must be {EXPECTED[error['type']]}" if error["type"] in EXPECTED else f"is wrong ({error['msg']})"


LONGEST_NAME = 120  # bytes: suffixes are added to it, and file systems take 255
RESERVED = re.compile(r"\.(partial|outdated|old|new\d*|unfinished\d*)$")  # asr_am/data/ownership.py


def check_name(option: str, name: object) -> str:
    """Returns the value of an option that becomes the name of a folder.

    Raises:
        InputError: it is no plain name, and so would lead to another folder.
    """
    if not isinstance(name, str):
        raise InputError(f"{option} is {name}, not text; quote it for Hydra and the shell: \"{option}='NAME'\"")
    plain = name.isprintable() and name.strip() == name and not set(name) & set("/\\") and name[:1] not in (".", "-")
    if not name or not plain or RESERVED.search(name):
        raise InputError(
            f"{option}={name}: becomes the name of a folder; give a plain name without / that neither starts with . or "
            "- nor ends like .new or .old"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(f"{option}={name}: longer than {LONGEST_NAME} bytes; give a shorter name")
    return name


def no_such_option(name: str, known: Iterable[str]) -> InputError:
    """Returns the error for an option that does not exist, with the nearest names and all of them.

    Args:
        name: full name of the option, as users write it.
        known: names of the options of its section.
    """
    return InputError(f"{name}: there is no such option{choices(name.rpartition('.')[2], known)}")


def choices(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean A? There are A, B", without the question if no name is similar to `name`."""
    known = list(known)
    near = nearest(name, known)
    return f"{near} There are {', '.join(known)}" if near else f"; there are {', '.join(known)}"


def nearest(name: str, known: Iterable[str], full: Mapping[str, str] | None = None) -> str:
    """Returns "; did you mean A or B?" with the most similar names, "" if there is none.

    Args:
        name: a misspelt name.
        known: the names that exist.
        full: what to write for each name, by default the name itself.
    """
    near = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join((full or {}).get(word, word) for word in near)}?" if near else ""


def _name(*parts: str | int) -> str:
    return ".".join(str(part) for part in parts if part != "")
