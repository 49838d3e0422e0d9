"""Random word lattices and n-gram models of six words, and the costs of all paths by enumeration."""

from __future__ import annotations

import numpy as np

from asr_am.decode.lattice import Lattice
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.lang.arpa import Arpa
from asr_am.lang.ngram import estimate

WORDS = {name: number for number, name in enumerate(["<eps>", *"abcdef", "<s>", "</s>", "<unk>"])}
NAMES = {number: name for name, number in WORDS.items()}


def random_lm(order: int, rng: np.random.Generator) -> Arpa:
    sentences = [
        list(rng.choice(list("abcdef"), size=rng.integers(1, 9), p=[0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
        for _ in range(60)
    ]
    return estimate(sentences, list("abcdef"), order)


def random_lattice(small: Arpa, rng: np.random.Generator, num_states: int = 9) -> Lattice:
    """Returns a lattice whose graph costs are those of `small` along some path, plus a part that rescoring keeps."""
    arcs, weights = [], []
    for source in range(num_states - 1):
        for _ in range(3):
            target = int(rng.integers(source + 1, min(num_states, source + 4)))
            arcs.append((source, target, 1, int(rng.choice([0, 1, 2, 3, 4, 5, 6]))))
            weights.append((rng.uniform(0, 3), rng.uniform(-30, 30)))
    final_S2 = np.full((num_states, 2), np.inf)
    final_S2[num_states - 1] = 0.5, 2.0
    final_S2[num_states - 2] = 1.5, 1.0
    return Lattice.from_arrays(FstArrays.build(0, np.array(arcs), np.array(weights), final_S2))


def sentence_cost(arpa: Arpa, words: list[int], *, end: bool = True) -> float:
    """Returns the n-gram cost of words, and of the sentence end after them."""
    history, total = ["<s>"], 0.0
    for word in [*(NAMES[w] for w in words), *["</s>"] * end]:
        total -= np.log(10) * arpa.logprob(history, word)
        history.append(word)
    return total


def paths(lattice: Lattice) -> list[list[int]]:
    """Enumerates all paths as lists of arcs."""
    found, todo = [], [(0, [])]
    while todo:
        state, path = todo.pop()
        if state == lattice.num_states - 1:
            found.append(path)
        todo += [(int(lattice.target_A[a]), [*path, int(a)]) for a in np.flatnonzero(lattice.source_A == state)]
    return found


def cost_of(lattice: Lattice, path: list[int], lm_weight: float) -> tuple[tuple, float]:
    words = tuple(int(w) for w in lattice.word_A[path] if w)
    acoustic = tuple(np.round(lattice.acoustic_A[path], 4))
    return (words, acoustic), float((lattice.graph_A[path] + lattice.acoustic_A[path] / lm_weight).sum())
