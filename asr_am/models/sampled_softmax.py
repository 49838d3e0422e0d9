"""Sampled softmax: approximates the loss of a large vocabulary from the true word and a few sampled ones.

The method of Jozefowicz et al., "Exploring the limits of language modeling" (2016, section 3.1), which Parallax trains,
with TensorFlow's log-uniform candidate sampler:

    sample    words k (by falling frequency, from 0) with P(k) = log((k+2)/(k+1)) / log(V+1), until S are distinct
    expect    Q(k) = 1 - (1 - P(k))^n after n draws, the probability that k is among the S
    logits    o(k) - log Q(k) of the true word and of the samples, without samples that equal the true word
    loss      cross entropy of the true word among these

Given the candidates, exp(o(k)) / Q(k) is proportional to the probability that k is the true one. Hence the loss has its
minimum where softmax(o) is the true distribution, like the full softmax. Without Q, the model would underestimate
frequent words, which are often sampled. With S near V the loss is that of the full softmax.

Shapes: N positions, S samples, P projection, V words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.errors import InputError


class LogUniform:
    """Samples distinct words with a distribution close to Zipf's law, from torch's default CPU generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def log_expected(self, word: Tensor, draws: int) -> Tensor:
        """Returns log Q of words [...], the log-probability that `draws` draws include the word."""
        k = word.double()
        probability = torch.log1p(1.0 / (k + 1.0)) / math.log(self.size + 1.0)
        return torch.log(-torch.expm1(draws * torch.log1p(-probability))).float()

    def sample(self, count: int) -> tuple[Tensor, int]:
        """Returns `count` distinct words (int64) and the number of draws that this took."""
        if not 0 < count <= self.size:
            raise InputError(f"lm.model.samples={count}: must be from 1 to {self.size}, the number of units")
        drawn = torch.zeros(0, dtype=torch.int64)
        while True:
            drawn = torch.cat([drawn, self._draw(2 * count)])
            draw = torch.arange(len(drawn))
            first = torch.full((self.size,), len(drawn)).scatter_reduce_(0, drawn, draw, "amin")  # of each word
            new = (first[drawn] == draw).nonzero()[:count, 0]
            if len(new) == count:
                return drawn[new], int(new[-1]) + 1

    def _draw(self, count: int) -> Tensor:
        """Draws words by inverting their cumulative distribution, log(k+1) / log(V+1)."""
        uniform = torch.rand(count, dtype=torch.float64)
        word = torch.exp(uniform * math.log(self.size + 1.0)).long() - 1
        return word.clamp_(max=self.size - 1)


def sampled_loss(
    h_NP: Tensor, target_N: Tensor, weight: nn.Embedding, bias: nn.Embedding, sampled_S: Tensor, draws: int
) -> Tensor:
    """Computes the mean loss over positions, in nats.

    Args:
        h_NP: Hidden vectors.
        target_N: True words.
        weight: Output embedding [V, P]. Only looked up, so that its gradient can be sparse.
        bias: Biases [V, 1], likewise.
        sampled_S: Words from `LogUniform.sample`, shared by all positions.
        draws: Number of draws from `LogUniform.sample`.
    """
    sampler = LogUniform(weight.num_embeddings)
    rows = torch.cat([target_N, sampled_S.to(target_N.device)])
    sizes = [len(target_N), len(sampled_S)]
    true_NP, others_SP = weight(rows).split(sizes)  # split, because the gradient of a slice would be a full [N + S, P]
    true_bias_N, other_bias_S = (bias(rows)[:, 0] - sampler.log_expected(rows, draws)).split(sizes)
    true_N = (h_NP * true_NP).sum(dim=1) + true_bias_N
    others_NS = torch.addmm(other_bias_S, h_NP, others_SP.t())
    others_NS = others_NS.masked_fill(target_N[:, None] == rows[None, sizes[0] :], -math.inf)
    logits = torch.cat([true_N[:, None], others_NS], dim=1)
    return functional.cross_entropy(logits, torch.zeros_like(target_N))
