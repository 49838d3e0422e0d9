"""A small word model with two embeddings, its batches, and a reference that trains it on one device.

The reference uses float64 and plain tensors, and shares no code with the library.

Shapes: V words, D elements of an embedding, B words of a batch, C candidates of a sampled softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_am import parallax
from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.team import Team
from asr_am.parallax import Config, Runner

V, D, C = 60, 6, 7


@dataclass(frozen=True)
class Batch:
    """Words of one batch. Inputs and candidates both contain words twice.

    Attributes:
        inputs: Input words [B].
        candidates: Candidates of the softmax [C], the target words among them.
        targets: Positions of the target words in `candidates`, [B].
    """

    inputs: Tensor
    candidates: Tensor
    targets: Tensor


@cache
def make_batches(count: int, seed: int = 0) -> tuple[Batch, ...]:
    """Draws batches of 1 to 12 words. Frequent words have small numbers."""
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        size = int(torch.randint(1, 13, (), generator=rng))
        inputs, candidates = ((V ** torch.rand(n, generator=rng)).long() - 1 for n in (size, C))
        batches.append(Batch(inputs, candidates, torch.randint(C, (size,), generator=rng)))
    return tuple(batches)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Embedding(V, D)
        self.hidden = nn.Linear(D, D)
        self.outputs = nn.Parameter(torch.empty(V, D).normal_())
        self.bias = nn.Parameter(torch.zeros(V))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, C]."""
        hidden = torch.tanh(self.hidden(self.inputs(batch.inputs)))
        return hidden @ self.outputs[batch.candidates].T + self.bias.index_select(0, batch.candidates)


def make_model() -> Words:
    torch.manual_seed(3)
    return Words()


def summed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    return F.cross_entropy(model(batch), batch.targets, reduction="sum"), float(len(batch.inputs))


# Optimizers of torch, and the same rules written out.

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.9, 0.98), eps=1e-3),
}


class ReferenceOptimizer:
    """Optimizer of one parameter. Updates weights and state of `touched` elements only."""

    def __init__(self, kind: str) -> None:
        self._kind, self._t = kind, 0
        self._m = self._v = torch.zeros(())

    def __call__(self, w: Tensor, g: Tensor, touched: Tensor) -> Tensor:
        self._t += 1
        if self._t == 1:
            self._m, self._v = torch.zeros_like(w), torch.full_like(w, 0.1 if self._kind == "adagrad" else 0.0)
        update = self._update(g, touched)
        return torch.where(touched, w - update, w)

    def _update(self, g: Tensor, touched: Tensor) -> Tensor:
        if self._kind == "sgd":
            return 0.2 * g
        if self._kind in ("momentum", "nesterov"):
            self._m = torch.where(touched, 0.9 * self._m + g, self._m)
            return 0.05 * (g + 0.9 * self._m if self._kind == "nesterov" else self._m)
        if self._kind == "adagrad":
            self._v = torch.where(touched, self._v + g**2, self._v)
            return 0.1 * g / (self._v.sqrt() + 1e-10)
        self._m = torch.where(touched, 0.9 * self._m + 0.1 * g, self._m)
        self._v = torch.where(touched, 0.98 * self._v + 0.02 * g**2, self._v)
        return 0.02 * (self._m / (1 - 0.9**self._t)) / ((self._v / (1 - 0.98**self._t)).sqrt() + 1e-3)


Weights = dict[str, Tensor]


def touched_rows(name: str, shape: torch.Size, batches: Sequence[Batch]) -> Tensor:
    """Returns a mask of the elements of a parameter that are updated."""
    if name.startswith("hidden"):
        return torch.ones(shape, dtype=torch.bool)
    words = torch.cat([batch.inputs if name.startswith("inputs") else batch.candidates for batch in batches])
    rows = torch.zeros(V, dtype=torch.bool)
    rows[words] = True
    return rows.view(V, *[1] * (len(shape) - 1)).expand(shape)


def reference(
    kind: str, rounds: Sequence[Sequence[Batch]], clip: float = 0.0, decay: float = 0.0, half: bool = False,
    dense_factor: float = 1.0, sparse_factor: float = 1.0,
) -> list[Weights]:  # fmt: skip
    """Trains on one device.

    Args:
        kind: Optimizer, a key of `MAKE`.
        rounds: Batches of all learners, for each step.
        clip: Limit of the gradient's norm. 0 means no clipping.
        decay: Decay of a moving average of the weights.
        half: Casts rows to bfloat16 like messages do, and their gradients after summing those of two learners each.
        dense_factor: Factor on the gradients of dense parameters, before clipping.
        sparse_factor: The same for sparse ones.

    Returns:
        The weights after each step, or their moving averages with a decay.
    """
    w = {name: value.double() for name, value in make_model().state_dict().items()}
    average, rules, saved = dict(w), {name: ReferenceOptimizer(kind) for name in w}, []
    for batches in rounds:
        g = gradient_in_halves(w, batches) if half else gradient(w, batches)
        g = {name: x * (dense_factor if name.startswith("hidden") else sparse_factor) for name, x in g.items()}
        norm = math.sqrt(sum(float(x.square().sum()) for x in g.values()))
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        w = {name: rules[name](w[name], scale * g[name], touched_rows(name, w[name].shape, batches)) for name in w}
        average = {name: decay * average[name] + (1 - decay) * w[name] for name in w}
        saved.append(average if decay else w)
    return saved


def cast(w: Weights) -> Weights:
    return {name: x if name.startswith("hidden") else x.bfloat16().double() for name, x in w.items()}


def gradient_in_halves(w: Weights, batches: Sequence[Batch]) -> Weights:
    words = sum(len(batch.inputs) for batch in batches)
    total = {name: torch.zeros_like(x) for name, x in w.items()}
    for pair in (batches[:2], batches[2:]):
        for name, g in cast(gradient(cast(w), pair, words)).items():
            total[name] = total[name] + g
    return total


def gradient(w: Weights, batches: Sequence[Batch], words: int | None = None) -> Weights:
    """Returns the gradient of the loss summed over all words and divided by `words` (None: by their number)."""
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        hidden = torch.tanh(leaves["inputs.weight"][batch.inputs] @ leaves["hidden.weight"].T + leaves["hidden.bias"])
        logits = hidden @ leaves["outputs"][batch.candidates].T + leaves["bias"][batch.candidates]
        total = total - logits.log_softmax(dim=1).gather(1, batch.targets[:, None]).sum()
    words = words or sum(len(batch.inputs) for batch in batches)
    if not batches:
        return {name: torch.zeros_like(x) for name, x in w.items()}
    return dict(zip(leaves, torch.autograd.grad(total / words, list(leaves.values())), strict=True))


# Training on a team.


def hardware(**changes: Any) -> Cluster:
    """Returns a cluster of two hosts. A batch takes a second, a message a few milliseconds."""
    plain = {
        "name": "words", "hosts": 2, "devices_per_host": 4, "device": "toy", "nic_bandwidth": 4e5, "nic_latency": 0.002,
        "host_bandwidth": 8e5, "host_latency": 0.001, "all_reduce_efficiency": 0.5,
        "overlap_speed": 0.8, "update_bandwidth": 4e5, "averaging_bandwidth": 4e5, "jitter": 0.2,
    }  # fmt: skip
    return Cluster.build(plain | changes)


@dataclass
class Trained:
    """Results of one learner.

    Attributes:
        weights: Weights after every `EVERY` steps.
        averages: Moving averages at the same steps.
        counts: Bytes by kind, see `Runner.counts`.
        plan: The placement plan as text.
    """

    weights: list[Weights] = field(default_factory=list)
    averages: list[Weights] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    plan: str = ""


EVERY = 13
STEPS = 52
BATCHES = 4 * STEPS - 2  # two learners have none in the last step

Make = Callable[..., Runner]


def train(
    team: Team, kind: str, config: Config, batches: Sequence[Batch], get_runner: Make = parallax.get_runner
) -> Trained:
    model = make_model()
    trained = Trained()
    with get_runner(model, summed_loss, MAKE[kind](model.parameters()), team, config) as runner:
        for step, batch in enumerate(parallax.shard(batches, team), 1):
            trained.losses.append(runner.run(batch))
            if step % EVERY == 0:
                trained.weights.append(runner.weights())
                if config.moving_average:
                    trained.averages.append(runner.weights(average=True))
        trained.counts, trained.sent = dict(runner.counts), dict(team.comm_stats.bytes_sent)
        trained.plan = str(runner.plan)
    return trained


def train_virtually(kind: str, config: Config, learners: int = 4, steps: int = STEPS, **changes: Any) -> list[Trained]:
    """Trains on a virtual cluster of two hosts. Returns the results of all learners by rank."""
    make = changes.pop("get_runner", parallax.get_runner)
    hosts = {"hosts": 2, "devices_per_host": max(1, learners // 2)}
    cluster = SimCluster(
        hardware(**hosts | changes), Workload("words", seconds_per_batch={"toy": 1.0}), learners, seed=1
    )
    batches = make_batches(learners * steps - (2 if learners > 2 else 0))
    return list(cluster.run(lambda team: train(team, kind, config, batches, make)).values())


def rounds_of(batches: Sequence[Batch], learners: int = 4) -> list[Sequence[Batch]]:
    return [batches[k : k + learners] for k in range(0, len(batches), learners)]


def on_cluster(main: Any, learners: int = 4, wire: WireDtype = "float32") -> dict[int, Any]:
    workload = Workload("words", seconds_per_batch={"toy": 1.0})
    return SimCluster(hardware(), workload, learners, seed=1, wire=wire).run(main)


def assert_close(ours: Weights, theirs: Weights, tolerance: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), theirs[name].double(), rtol=tolerance, atol=tolerance, msg=name)
