"""Compares the sampled softmax with its definition and with the full softmax. Shapes: N positions, V words."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.errors import InputError
from asr_am.models import sampled_softmax
from asr_am.models.sampled_softmax import LogUniform, sampled_loss

V, P = 30, 4


def probability(word: int, size: int = V) -> float:
    return math.log((word + 2) / (word + 1)) / math.log(size + 1)


def tables(seed: int = 1) -> tuple[Tensor, nn.Embedding, nn.Embedding]:
    """Returns hidden vectors of V positions, output embeddings and biases."""
    torch.manual_seed(seed)
    weight, bias = nn.Embedding(V, P), nn.Embedding(V, 1)
    return torch.randn(V, P), weight, bias


def slow_sample(count: int) -> tuple[list[int], int]:
    """Draws one word after the other from the same random numbers."""
    found: list[int] = []
    draws = 0
    while True:
        for uniform in torch.rand(2 * count, dtype=torch.float64).tolist():
            draws += 1
            word = min(int(math.exp(uniform * math.log(V + 1))) - 1, V - 1)
            if word not in found:
                found.append(word)
            if len(found) == count:
                return found, draws


@pytest.mark.parametrize("count", [1, 7, V])
def test_samples_are_those_of_one_draw_after_another(count: int) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        sampled_S, draws = LogUniform(V).sample(count)
        torch.manual_seed(seed)
        assert (sampled_S.tolist(), draws) == slow_sample(count)


def test_words_are_sampled_as_often_as_expected() -> None:
    torch.manual_seed(1)
    sampler, trials = LogUniform(V), 1500
    seen_V, expected_V = torch.zeros(V), torch.zeros(V)
    for _ in range(trials):
        sampled_S, draws = sampler.sample(8)
        seen_V[sampled_S] += 1 / trials
        expected_V += sampler.log_expected(torch.arange(V), draws).exp() / trials
    assert (seen_V - expected_V).abs().max() < 0.04
    assert seen_V[0] > 0.8 > 0.3 > seen_V[-1]


@pytest.mark.parametrize("count", [0, V + 1])
def test_a_number_of_samples_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InputError, match="samples"):
        LogUniform(V).sample(count)


def test_loss_is_the_definition_written_out() -> None:
    h_NP, weight, bias = tables()
    target = [0, 3, 29, 3]
    sampled, draws = [5, 3, 1, 12], 9  # 3 is also a target: an accidental hit
    total = 0.0
    for n, true in enumerate(target):
        corrected = {}
        for word in [true, *sampled]:
            logit = (h_NP[n] @ weight.weight[word] + bias.weight[word, 0]).item()
            corrected[word] = logit - math.log(1 - (1 - probability(word)) ** draws)
        total -= corrected[true] - math.log(sum(math.exp(value) for value in corrected.values()))
    loss = sampled_loss(h_NP[:4], torch.tensor(target), weight, bias, torch.tensor(sampled), draws)
    assert loss.item() == pytest.approx(total / 4, rel=1e-5)


def gradient_at_the_truth(trials: int = 500) -> Tensor:
    """Returns the expected d loss / d bias [V] at the distribution of the targets. The full softmax has 0 there."""
    torch.manual_seed(3)
    count_V = torch.randint(1, 20, (V,))
    target_N = torch.repeat_interleave(torch.arange(V), count_V)
    weight, bias = nn.Embedding(V, P), nn.Embedding(V, 1)
    nn.init.zeros_(weight.weight)
    bias.weight.data[:, 0] = (count_V / count_V.sum()).log()
    gradient_V = torch.zeros(V)
    for _ in range(trials):
        loss = sampled_loss(torch.zeros(len(target_N), P), target_N, weight, bias, *LogUniform(V).sample(10))
        gradient_V += torch.autograd.grad(loss, bias.weight)[0][:, 0] / trials
    return gradient_V


def test_the_expected_gradient_vanishes_at_the_true_distribution() -> None:
    assert gradient_at_the_truth().norm() < 0.02


def without_correction(self: LogUniform, word: Tensor, draws: int) -> Tensor:
    return torch.zeros(word.shape)


def with_replacement(self: LogUniform, word: Tensor, draws: int) -> Tensor:
    """Returns the log of the expected number of draws of a word, as in sampling with replacement."""
    return torch.log(draws * torch.log1p(1.0 / (word + 1.0)) / math.log(self.size + 1.0))


@pytest.mark.parametrize("mutant", [without_correction, with_replacement])
def test_other_corrections_are_biased(mutant: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogUniform, "log_expected", mutant)
    assert gradient_at_the_truth().norm() > 0.04


def distance_from_full(loss_of: Callable[..., Tensor]) -> float:
    """Returns the relative distance of the sampled loss's gradients, with all words as samples, from the full one's."""
    h_NP, weight, bias = tables()
    logits_NV = h_NP @ weight.weight.T + bias.weight[:, 0]
    target_N = logits_NV.argmax(dim=1)  # here an accidental hit changes the loss most
    full = functional.cross_entropy(logits_NV, target_N)
    exact = torch.cat(torch.autograd.grad(full, (weight.weight, bias.weight)), dim=1)
    found, trials = torch.zeros_like(exact), 20
    for _ in range(trials):
        loss = loss_of(h_NP, target_N, weight, bias, *LogUniform(V).sample(V))
        found += torch.cat(torch.autograd.grad(loss, (weight.weight, bias.weight)), dim=1) / trials
    return float((found - exact).norm() / exact.norm())


def test_with_all_words_it_is_the_full_softmax() -> None:
    assert distance_from_full(sampled_loss) < 0.05


def test_unmasked_accidental_hits_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "masked_fill", lambda self, mask, value: self)
    assert distance_from_full(sampled_softmax.sampled_loss) > 0.2


def test_gradients_can_be_sparse() -> None:
    h_NP, _, _ = tables()
    weight, bias = nn.Embedding(V, P, sparse=True), nn.Embedding(V, 1, sparse=True)
    sampled_loss(h_NP[:2], torch.tensor([4, 9]), weight, bias, torch.tensor([0, 2]), 2).backward()
    for table in (weight, bias):
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        assert table.weight.grad.coalesce().indices()[0].tolist() == [0, 2, 4, 9]
