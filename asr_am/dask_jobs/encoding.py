"""What is sent to workers of a cluster: pickles, which only Dask's authenticated connections carry."""

from __future__ import annotations

import dataclasses
import io
import pickle
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

MAX_BYTES = 1 << 28  # larger values belong in files


class NotSent(Exception):
    """A value cannot be sent, or should not be."""


class _Pickler(pickle.Pickler):
    """Pickles a dataclass as the arguments of its constructor, which opens files again and checks them."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.memmap):
            raise NotSent("a memory map is not sent")
        if isinstance(value, FunctionType | type):
            if value.__module__ == "__main__":
                raise NotSent(f"{value.__qualname__} is in the program itself, which workers do not import")
        elif dataclasses.is_dataclass(value):
            given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            kind: Any = type(value)
            return partial(kind, **given), ()
        return NotImplemented


def encode(value: object) -> bytes:
    """Returns the pickle of a value. Raises NotSent if it has none, refers to the main program, or is too large."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotSent(str(error)) from None
    if buffer.tell() > MAX_BYTES:
        raise NotSent(f"{buffer.tell()} bytes are too many")
    return buffer.getvalue()
