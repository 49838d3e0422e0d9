"""An encoding of functions and values for other processes and for files, which can name only our own code.

A value is JSON and the arrays that it refers to, as one .npz. Reading it calls the constructors of dataclasses and
imports their modules, nothing else: there are no pickles.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path, PosixPath
from types import FunctionType
from typing import Any

import numpy as np

FUNCTIONS = ("asr_am", "local")  # packages whose functions may be called
CLASSES = (*FUNCTIONS, "lhotse")  # packages whose dataclasses and named tuples may be made
MAX_ARRAY = 1 << 28  # bytes. Larger arrays belong in files
TREE = "tree"  # the JSON among the arrays


class NotPlain(Exception):
    """A value has no encoding."""


def encode(value: object) -> bytes:
    """Encodes None, numbers, text, paths, arrays, CPU tensors, collections, dataclasses, and functions of modules.

    A dataclass is the arguments of its constructor. Functions may be in `functools.partial`. Equal values have equal
    encodings.

    Raises:
        NotPlain: the value, or a part of it, is something else.
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_tree(value, arrays))
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{TREE: np.frombuffer(text.encode(), np.uint8)}, **arrays)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """Returns what was encoded.

    Raises:
        NotPlain: a function or class is not ours.
        Exception: the data are damaged, or a constructor raises an error.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return _value(json.loads(arrays.pop(TREE).tobytes()), arrays)


def _tree(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Returns the JSON of a value, in which all but the simplest are `{kind: content}`. Adds its arrays to `arrays`."""
    kind = type(value)

    def each(values: Any) -> list[Any]:
        return [_tree(one, arrays) for one in values]

    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return each(value)
    if kind is tuple:
        return {"tuple": each(value)}
    if kind is dict:
        return {"dict": [each(pair) for pair in value.items()]}
    if kind is frozenset:
        return {"frozenset": each(sorted(value))}
    if kind is PosixPath:
        return {"path": str(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        return {"array" if kind is np.ndarray else "scalar": _add(np.asarray(value), arrays)}
    if kind.__module__ == "torch" and kind.__name__ == "Tensor" and value.device.type == "cpu":
        return {"tensor": _add(value.detach().numpy(), arrays)}
    if kind is partial:
        return {"partial": [_tree(value.func, arrays), each(value.args), _tree(dict(value.keywords), arrays)]}
    if kind is FunctionType:
        return {"function": _name_of(value, FUNCTIONS)}
    if dataclasses.is_dataclass(value):
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {"dataclass": [*_name_of(kind, CLASSES), _tree(given, arrays)]}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return {"named": [*_name_of(kind, CLASSES), each(value)]}
    raise NotPlain(f"{kind.__module__}.{kind.__qualname__} has no plain encoding")


def _add(array: np.ndarray, arrays: dict[str, np.ndarray]) -> str:
    if array.dtype.hasobject or array.nbytes > MAX_ARRAY:
        raise NotPlain(f"an array of {array.nbytes} bytes and type {array.dtype} is too large or holds objects")
    name = str(len(arrays))
    arrays[name] = array
    return name


def _name_of(thing: Any, packages: tuple[str, ...]) -> list[str]:
    """Returns module and name of a function or class. Raises NotPlain unless `_find` finds it."""
    module, name = thing.__module__, thing.__qualname__
    if _find(module, name, packages) is not thing:
        raise NotPlain(f"{module}.{name} is not in a module of {', '.join(packages)}")
    return [module, name]


def _find(module: str, name: str, packages: tuple[str, ...]) -> Any:
    """Returns what a module of `packages` defines by this name."""
    found = None
    if module.partition(".")[0] in packages:
        found = getattr(sys.modules.get(module) or import_module(module), name, None)
    if getattr(found, "__module__", None) != module or getattr(found, "__qualname__", None) != name:
        raise NotPlain(f"{module}.{name} is not defined in a module of {', '.join(packages)}")
    return found


def _value(tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Returns the value of a tree."""
    if isinstance(tree, list):
        return [_value(one, arrays) for one in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind in ("array", "scalar", "tensor"):
        return _array(kind, arrays[content])
    if kind == "path":
        return Path(content)
    if kind == "dict":
        return {_value(key, arrays): _value(value, arrays) for key, value in content}
    if kind == "partial":
        function, arguments, options = _value(content, arrays)
        return partial(function, *arguments, **options)
    if kind in ("tuple", "frozenset"):
        return (tuple if kind == "tuple" else frozenset)(_value(content, arrays))
    module, name, *arguments = content
    found = _find(module, name, FUNCTIONS if kind == "function" else CLASSES)
    if kind == "function" and isinstance(found, FunctionType):
        return found
    if kind == "dataclass" and isinstance(found, type) and dataclasses.is_dataclass(found):
        return found(**_value(arguments[0], arrays))
    if kind == "named" and isinstance(found, type) and issubclass(found, tuple):
        return found(*_value(arguments[0], arrays))
    raise NotPlain(f"{module}.{name} is no {kind}")


def _array(kind: str, array: np.ndarray) -> Any:
    if kind == "scalar":
        return array[()]
    if kind == "array":
        return array
    import torch

    return torch.from_numpy(array)
