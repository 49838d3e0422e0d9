"""Options of Parallax. Each optimisation of section 5.3 of the paper can be switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from asr_am.errors import InputError
from asr_am.parallax.indexed_rows import WireDtype
from asr_am.parallax.placement import Method


@dataclass(frozen=True)
class Config:
    """Options of `get_runner`.

    Args:
        hybrid: Averages dense parameters by all-reduce. If False, they live on servers like the sparse ones (the
            paper's BASE).
        local_aggregation: Merges the gradients of a machine before they go to the servers.
        after_aggregation: Computes norms and clips on the servers. If False, the chief worker reads the merged
            gradient, clips it and returns it.
        gather_on_servers: Selects the rows of a lookup on their server. If False, the worker pulls all rows and
            selects them itself.
        wire: Dtype of rows (weights and gradients) between machines.
        path: Method for all sparse parameters. None selects the cheapest one for each.
        dense: Names of parameters that are never treated as sparse.
        servers: Number of servers. None starts one on each machine.
        clip_norm: Upper limit of the norm of the whole gradient. 0 means no clipping.
        moving_average: Decay of a moving average that is kept of the weights. 0 keeps none.
        merge_each: Servers add gradients one by one, as TensorFlow's accumulators do. If False, all at once.
        average_dense, average_sparse: Gradients are averaged over learners. If False, they are summed.

    Raises:
        InputError: A value is out of range or contradicts another one.
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
    average_dense: bool = True
    average_sparse: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("wire", WireDtype), ("path", Method)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known and not (name == "path" and value is None):
                raise InputError(f"parallax.{name}={value}: must be one of {', '.join(known)}")
        if not self.hybrid and self.path not in (None, "servers"):
            raise InputError(f"parallax.path={self.path}: must be servers (or unset) with hybrid=false")
        if not self.clip_norm >= 0:
            raise InputError(f"parallax.clip_norm={self.clip_norm}: must be at least 0 (0: no clipping)")
        if not 0 <= self.moving_average < 1:
            raise InputError(f"parallax.moving_average={self.moving_average}: must be at least 0 (0: none) and below 1")
