"""Gradient Threshold Compression (GTC): synchronous SGD in which learners send only large gradient elements.

Strom (Interspeech 2015) and Ladkat et al. (2019), section 2.1. At learner i of N,

    r_i <- r_i + g_i
    s_i  = τ sign(r_i) where |r_i| > τ, else 0      sent: an index and a sign in a 32-bit word per element
    r_i <- r_i - s_i                                what remains is kept for later steps
    W   <- W - α u(Σ_i s_i)

W weights, g_i gradient of learner i, r_i its residual, τ threshold, α learning rate, u the optimizer's rule. Staleness
is 0, apart from what waits in the residuals. What was sent and what remains add up to the gradients.

Here g_i, r_i and s_i are means over frames. α then means the same as in `sync`, and a round with fewer frames leaves a
residual of the same weight as others. A τ for sums is divided by the frames of the round instead. All learners apply
the same bits: sums of ±τ are exact in any order and encoding (`round_to_exact`). With one learner there is nothing to
compress, and GTC is plain SGD.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any, Literal

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.threshold_codec import MAX_ELEMENTS, decode, encode, round_to_exact
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Gather, Team, Work
from asr_am.errors import InputError

log = logging.getLogger(__name__)

THRESHOLD_FACTOR = 1.05  # τ is multiplied or divided by it after a step that sent too much or too little


class Gtc(Strategy):
    """Synchronous SGD with threshold compression.

    `metrics` counts the elements that were `sent`, all `elements`, and the buckets that were sent `dense`.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule.
        team: this learner's end of the team.
        threshold: τ.
        frames: what τ is compared with, gradients that are a sum over a learner's frames (as in the papers) or a mean.
        density: share of all elements to send, which τ is adapted to. None: τ is constant.
        momentum: after: the optimizer's rule is applied to the decoded sum. before: to each learner's gradient before
            it enters the residual.
        dense_above: mean density above which a bucket is sent as an all-reduce of all its elements. This changes no
            value: where `launcher.wire` would round the sums of N signs (bfloat16 above 256 learners), no bucket is.
            None: 2/N, above which it takes fewer bytes.
        bucket: elements that are encoded and sent together.
    """

    name = "gtc"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team,
        threshold: float = 8.0, frames: Literal["sum", "mean"] = "sum", density: float | None = None,
        momentum: Literal["after", "before"] = "after", dense_above: float | None = None, bucket: int = 1 << 22,
    ) -> None:  # fmt: skip
        super().__init__(params, optimizer, team)
        _check(optimizer, threshold, frames, density, momentum, dense_above, bucket)
        self._tau, self._density = threshold, density
        self._sums, self._momentum_first = frames == "sum", momentum == "before"
        self._dense_above = 2 / self.team.size if dense_above is None else dense_above
        sums = torch.arange(team.size + 1.0)
        if not torch.equal((team.as_sent(sums / team.size) * team.size).round(), sums):
            self._dense_above = 1.0
        ends = [*range(bucket, len(params), bucket), len(params)]
        self._buckets = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.equal_replicas, self.continues_at_blocks = not self._momentum_first, self._momentum_first
        self.residuals = ("residual", "optimizer") if self._momentum_first else ("residual",)
        self.residual = torch.zeros_like(params.w) if self.team.size > 1 else params.w.new_empty(0)
        self._next = self.residual if self._momentum_first else torch.empty_like(self.residual)  # after this step

    def step(self, gradient: GradientFn) -> StepResult | None:
        self.at_block_end()
        step_result = gradient(None)  # g_i = calGrad(W)
        if step_result is None:
            return None
        if self.team.size == 1:
            self.optimizer.step()
        else:
            self._compressed_step(step_result.lease.loss_denominator if self._sums else 1.0)
        self.staleness[0] += 1
        return step_result

    def _compressed_step(self, frames: float) -> None:
        """Updates W from the compressed gradients of all learners. τ is divided by `frames`."""
        w, g, rate = self.params.w, self.params.g, self.optimizer.lr
        if self._momentum_first:
            self.optimizer.lr = -1.0
            self.optimizer.step(self.residual)  # r_i <- r_i + u(g_i)
            self.optimizer.lr = rate
            g.zero_()
        self._exchange(round_to_exact(self._tau / (frames * self.team.size), self.team.size))
        if self._momentum_first:
            w.add_(g, alpha=-rate)
        else:
            self.optimizer.step()

    def _exchange(self, unit: float) -> None:
        """Sets g to the mean of s_j, where an element sent by one learner contributes ±unit.

        Encoding a bucket overlaps with the exchange of the message lengths of those before it.
        """
        messages: list[tuple[Tensor, Gather]] = []
        pending: list[Gather | Work] = []
        threshold = unit * self.team.size  # exact, so that what is sent and what remains add up
        for part in self._buckets:
            g = None if self._momentum_first else self.params.g[part]
            packed = encode(self.residual[part], threshold, g, self._next[part])
            length = torch.tensor([len(packed)], dtype=torch.int32, device=packed.device)
            messages.append((packed, self.team.start_all_gather(length)))
        total, counts = 0, Counter[str](elements=len(self.params))
        for part, (packed, length_gather) in zip(self._buckets, messages, strict=True):
            lengths = torch.cat(length_gather.wait()).tolist()
            total += sum(lengths)
            counts["sent"] += len(packed)
            g = self.params.g[part]
            if sum(lengths) <= self._dense_above * len(g) * self.team.size:  # alike at all, as all know all lengths
                pending.append(self.team.start_all_gather(packed, lengths))
            else:
                counts["dense"] += 1
                decode(packed, g, 1.0)
                pending.append(self.team.start_all_reduce_mean(g))
        for part, work in zip(self._buckets, pending, strict=True):
            self._receive(self.params.g[part], work, unit)
        self.residual, self._next = self._next, self.residual  # as nothing can fail any more
        self.metrics.update(counts)
        self._adapt(total / (len(self.params) * self.team.size))

    def _receive(self, g: Tensor, work: Gather | Work, unit: float) -> None:
        messages = work.wait()
        if messages is None:
            g.mul_(self.team.size).round_().mul_(unit)  # the sum of signs is a whole number
            return
        decode(torch.cat(messages), g, unit)  # in rank order, with this learner's own

    def _adapt(self, density: float) -> None:
        """Adapts τ, equally at all learners of the group: `density` is their mean."""
        if self._density is not None:
            self._tau *= THRESHOLD_FACTOR if density > self._density else 1 / THRESHOLD_FACTOR

    def drain(self) -> None:
        self.at_block_end()

    def consensus(self) -> Tensor:
        self._report()
        return self.params.w

    def _report(self) -> None:
        """Logs density, threshold and residual. Raises InputError for NaN or Inf, which a threshold hides."""
        norm = float(torch.linalg.vector_norm(self.residual))
        if not math.isfinite(norm):
            raise InputError(f"strategy={self.name}: a gradient is NaN or Inf: lower schedule.base")
        if self.team.rank == self.team.ranks[0] == 0 and self.team.size > 1:  # of groups the first
            share = self.metrics["sent"] / max(self.metrics["elements"], 1)
            log.info("%s: density %.3g, threshold %.3g, norm of the residual %.3g", self.name, share, self._tau, norm)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "residual": self.residual, "threshold": self._tau}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.residual.copy_(state["residual"])
        self._tau = state["threshold"]


def _check(
    optimizer: Optimizer, threshold: float, frames: str, density: float | None, momentum: str,
    dense_above: float | None, bucket: int,
) -> None:  # fmt: skip
    """Raises InputError for an option that is out of range or does not fit the optimizer."""
    if not 0 < threshold < math.inf:
        raise InputError(f"strategy.threshold={threshold}: must be above 0")
    if frames not in ("sum", "mean"):
        raise InputError(f"strategy.frames={frames}: must be sum or mean")
    if momentum not in ("after", "before"):
        raise InputError(f"strategy.momentum={momentum}: must be after or before")
    if density is not None and not 0 < density < 1:
        raise InputError(f"strategy.density={density}: must be a share, above 0 and below 1, or null")
    if dense_above is not None and not 0 <= dense_above <= 1:
        raise InputError(f"strategy.dense_above={dense_above}: must be a share, from 0 to 1, or null")
    if not 0 < bucket <= MAX_ELEMENTS:
        raise InputError(f"strategy.bucket={bucket}: must be 1 to {MAX_ELEMENTS}, as a word has 31 bits for the index")
    if momentum == "before" and optimizer.options.weight_decay:
        raise InputError(
            "strategy.momentum=before: weight decay would decay the residual: set train.optimizer.weight_decay=0"
        )
