"""The options of Parallax. The operations of section 5.3 that may move, each of which can be left where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from asr_am.errors import InputError
from asr_am.parallax.indexed_rows import WireDtype
from asr_am.parallax.placement import Method


@dataclass(frozen=True)
class Config:
    """hybrid: dense parameters by all-reduce, else on servers like the sparse ones (the paper's BASE).
    local_aggregation: the gradients of a machine are merged before they go to the servers. after_aggregation: norms
    and clipping happen on the servers, else at the chief worker, which reads and returns the merged gradient.
    gather_on_servers: a lookup's rows are taken out of the parameter on its server, else the worker pulls all rows and
    takes them. wire: what rows are cast to before they leave a machine, weights and gradients.

    path: of all sparse parameters, instead of the cheapest. dense: names of parameters to keep whole. servers: how
    many; None: one on each machine. clip_norm: upper limit of the whole gradient's norm, 0 = none. moving_average:
    decay of an average of the weights that is kept beside them, 0 = none. merge_each: servers add gradients one by
    one, as TensorFlow's accumulators do, else all at once.
    """

    hybrid: bool = True
    local_aggregation: bool = True
    after_aggregation: bool = True
    gather_on_servers: bool = True
    wire: WireDtype = "float32"
    path: Method | None = None
    dense: tuple[str, ...] = ()
    servers: int | None = None
    clip_norm: float = 0.0
    moving_average: float = 0.0
    merge_each: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("wire", WireDtype), ("path", Method)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known and not (name == "path" and value is None):
                raise InputError(f"parallax.{name}={value}: is one of {', '.join(known)}")
        if not self.hybrid and self.path not in (None, "servers"):
            raise InputError(f"parallax.path={self.path}: hybrid=false has everything on servers")
        if not self.clip_norm >= 0:
            raise InputError(f"parallax.clip_norm={self.clip_norm}: must be at least 0 (0: none)")
        if not 0 <= self.moving_average < 1:
            raise InputError(f"parallax.moving_average={self.moving_average}: a decay, 0 (none) or more, below 1")
