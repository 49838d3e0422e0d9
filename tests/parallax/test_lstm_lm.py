"""Trains the LSTM LM with a plain loop on one device and, with the same model and loss, under Parallax's runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asr_am import parallax
from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.team import Team
from asr_am.lang.units import Units
from asr_am.models.lstm_lm import IGNORED, LstmLm, LstmLmOptions
from asr_am.parallax import Config
from asr_am.train.lm_text import Text, encode
from tests.support.toy_lm import Weights, assert_close, hardware

LEARNERS, STEPS, SENTENCES = 4, 6, 3  # of a learner's batch
WORDS = [f"w{n}" for n in range(78)]
UNITS = Units(["</s>", "<unk>", *WORDS], {word: (n,) for n, word in enumerate(WORDS, 2)})

Batch = tuple[Tensor, Tensor, int]
"""Input and target [B, T], and the step. It seeds the samples, so that all learners draw those of the single device."""


@dataclass(frozen=True)
class Case:
    samples: int
    tied: bool
    sparse: tuple[str, ...]  # parameters that Parallax must find to be sparse

    def model(self) -> LstmLm:
        torch.manual_seed(3)
        sizes = LstmLmOptions(embedding=6, cells=9, projection=6, samples=self.samples, tied=self.tied)
        return LstmLm(sizes, len(UNITS)).train()


CONFIG = Config(path="servers")
CASES = [
    Case(12, False, ("embedding.weight", "output.weight", "bias.weight")),
    Case(12, True, ("embedding.weight", "bias.weight")),
    Case(0, False, ("embedding.weight",)),
]


def make_text() -> Text:
    rng = np.random.default_rng(1)
    count = LEARNERS * STEPS * SENTENCES
    sentences = [[WORDS[int(79 ** rng.random()) - 1] for _ in range(rng.integers(1, 8))] for _ in range(count)]
    return encode(sentences, UNITS, longest=100)


def rows(step: int) -> np.ndarray:
    """Returns the rows of the text for a step, [learners, sentences]."""
    return np.arange(LEARNERS * SENTENCES).reshape(LEARNERS, SENTENCES) + step * LEARNERS * SENTENCES


def summed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    torch.manual_seed(batch[2])
    words = float((batch[1] != IGNORED).sum())
    return model(*batch[:2]) * words, words


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=1e-4)


def on_one_device(case: Case, text: Text) -> Weights:
    """Returns the weights after a plain training loop has done all steps, each on all rows of the step."""
    optimizer = make_optimizer(model := case.model())
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(*text.tensors(rows(step).ravel())).backward()
        optimizer.step()
    return dict(model.state_dict())


def on_a_team(case: Case, text: Text) -> tuple[Weights, tuple[str, ...]]:
    """Returns the weights after the same steps on four learners, and the names of the sparse parameters."""

    def run_learner(team: Team) -> tuple[Weights, tuple[str, ...]]:
        optimizer = make_optimizer(model := case.model())
        batches = [(*text.tensors(row_B), step) for step in range(STEPS) for row_B in rows(step)]
        with parallax.get_runner(model, summed_loss, optimizer, team, CONFIG) as runner:
            for batch in parallax.shard(batches, team):
                runner.run(batch)
            assert runner.plan is not None
            return runner.weights(), tuple(one.name for one in runner.plan.sparse)

    cluster = SimCluster(hardware(devices_per_host=2), Workload("lm", seconds_per_batch={"toy": 1.0}), LEARNERS, seed=1)
    return cluster.run(run_learner)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_program_for_one_device_needs_no_change(case: Case) -> None:
    text = make_text()
    weights, sparse = on_a_team(case, text)
    assert sparse == case.sparse
    expected = on_one_device(case, text)
    assert_close(weights, expected)
    begin = case.model().state_dict()
    moved = {name: float((expected[name] - begin[name]).abs().max()) for name in expected}
    assert all(distance > 5e-3 for distance in moved.values()), moved


def test_learners_may_leave_one_after_the_other() -> None:
    """A server that waits for the next push must not treat learners that have finished as lost."""
    text, case = make_text(), CASES[0]

    def run_learner(team: Team) -> float:
        model = case.model()
        with parallax.get_runner(model, summed_loss, make_optimizer(model), team, CONFIG) as runner:
            loss = runner.run((*text.tensors(rows(0)[team.rank]), 0))
        team.sleep(10.0 * team.rank)
        return loss

    cluster = SimCluster(hardware(devices_per_host=2), Workload("lm", seconds_per_batch={"toy": 1.0}), LEARNERS, seed=1)
    assert len(set(cluster.run(run_learner).values())) == 1
