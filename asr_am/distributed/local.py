"""One learner, no communication: the reference that every other algorithm is compared with.

    W <- W - alpha u(g)        Zhang et al. (ICASSP 2019), equation (1c)

W weights, g gradient (the mean over the frames of a batch), alpha learning rate, u the optimizer's rule (momentum).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asr_am.distributed.strategy import Gradient, Stats, Strategy


class Local(Strategy):
    """Staleness 0, nothing sent, nobody waited for."""

    name = "local"

    def step(self, gradient: Gradient) -> Stats | None:
        stats = gradient(None)
        if stats is None:
            return None
        self.optimizer.step()
        self.traffic.staleness[0] += 1
        return stats

    def end_epoch(self) -> None:
        pass

    def consensus(self) -> Tensor:
        return self.params.w

    def serve(self) -> None:
        raise RuntimeError("strategy local has no servers")

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self.params.w,
            "optimizer": self.optimizer.state_dict(),
            "staleness": dict(self.traffic.staleness),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.params.w.copy_(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.traffic.staleness.clear()
        self.traffic.staleness.update(state["staleness"])

    def close(self) -> None:
        pass
