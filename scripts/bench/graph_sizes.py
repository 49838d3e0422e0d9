"""Measures time and memory of building and loading decoding graphs for large vocabularies and language models.

    python scripts/bench/graph_sizes.py --root exp/libri20 --align sat --words 20000,60000 --ngrams 200000,1000000

The vocabulary is that of the recipe `--root`, filled up with invented words: halves of two of its words joined. The LM
is a trigram, estimated on sentences with Zipf-distributed words. It is pruned to `--max-ngrams` for the graph. Making
the LM, building the graph and loading both for a search run in processes of their own, whose peak memory is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from asr_am.data.textfile import write_lines
from asr_am.decode.graph import build_hclg
from asr_am.decode.loading import load_graph, load_lm_pair
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree
from asr_am.lang.prepare import prepare_lang, prepare_lm

SENTENCE = 12  # words


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Runs `work` in a process of its own. Returns its seconds and its peak memory in GB."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measured, (work,))


def _measured(work: Callable[[], object]) -> tuple[float, float]:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def write_lexicon(source: Path, count: int, out: Path) -> list[str]:
    """Writes `count` words, invented ones after those of `source`. Returns the words."""
    chosen = random.Random(0)
    entries = [line.split(maxsplit=1) for line in source.read_text(encoding="utf-8").splitlines()]
    known = {word: pronunciation.split() for word, pronunciation in entries if not word.startswith(("<", "!", "["))}
    words = dict(list(known.items())[:count])
    names = list(known)
    while len(words) < count:
        first, second = chosen.choice(names), chosen.choice(names)
        phones = known[first][: len(known[first]) // 2 + 1] + known[second][len(known[second]) // 2 :]
        words[f"{first}-{second}"] = phones
    fixed = [line for line in source.read_text(encoding="utf-8").splitlines() if line.startswith(("<", "!", "["))]
    write_lines(out, [*fixed, *(f"{word} {' '.join(phones)}" for word, phones in words.items())])
    return list(words)


def write_text(words: list[str], ngrams: int, out: Path) -> None:
    """Writes sentences of about `ngrams` different bigrams and trigrams in all."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, len(words) + 1)
    count = int(0.75 * ngrams)  # tokens: nearly all trigrams and a third of the bigrams are new
    ids = rng.choice(len(words), size=(count // SENTENCE, SENTENCE), p=share / share.sum())
    write_lines(out, [" ".join(words[word] for word in row) for row in ids])


def prepare(root: Path, words: int, ngrams: int, folder: Path) -> None:
    """Writes data directory and lang directory."""
    shutil.copytree(root / "data/dev", folder / "data/dev")
    for name in ("data/lm", "lang", "lm", "graph"):
        (folder / name).mkdir()
    if (root / "data/nonspeech.txt").exists():
        shutil.copy(root / "data/nonspeech.txt", folder / "data/nonspeech.txt")
    vocabulary = write_lexicon(root / "data/lexicon.txt", words, folder / "data/lexicon.txt")
    write_text(vocabulary, ngrams, folder / "data/lm/train.txt")
    prepare_lang(folder / "data", folder / "lang", position_dependent=True, silence_prob=0.5)


def make_lm(folder: Path, max_ngrams: int) -> None:
    prepare_lm(
        folder / "data", folder / "lang", folder / "lm", name="kn3", order=3, arpa=None, text="train",
        max_ngrams=max_ngrams or None,
    )  # fmt: skip


def make_graph(folder: Path, align: Path) -> None:
    states, tree = StateTable.load(align / "states.npz"), DecisionTree.load(align / "tree.json")
    build_hclg(folder / "lang", folder / "lm", states, tree, folder / "graph")


def load(folder: Path) -> None:
    load_graph(folder / "graph/HCLG.fst")
    load_lm_pair(folder / "graph/HCLG.fst")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of decoding graphs.")
    parser.add_argument("--root", type=Path, required=True, help="exp/<corpus> with stages 0 to 3")
    parser.add_argument("--align", default="sat")
    parser.add_argument("--words", default="20000,60000")
    parser.add_argument("--ngrams", default="200000,1000000")
    parser.add_argument("--max-ngrams", type=int, default=200_000, help="of the graph, 0: no limit")
    options = parser.parse_args()
    print("   words   n-grams |   LM s    GB | graph s    GB        arcs | load s    GB")
    for words in map(int, options.words.split(",")):
        for ngrams in map(int, options.ngrams.split(",")):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                prepare(options.root, words, ngrams, folder)
                lm = measure(partial(make_lm, folder, options.max_ngrams))
                graph = measure(partial(make_graph, folder, options.root / "align" / options.align))
                loading = measure(partial(load, folder))
                found = _counts(folder)
                print(
                    f"{words:8} {found[0]:9} | {lm[0]:6.0f} {lm[1]:5.1f} | {graph[0]:7.0f} {graph[1]:5.1f} "
                    f"{found[1]:11} | {loading[0]:6.1f} {loading[1]:5.1f}", flush=True,
                )  # fmt: skip


def _counts(folder: Path) -> tuple[int, int]:
    """Returns the n-grams of order 2 and above of the LM, and the arcs of the graph."""
    ngrams = json.loads((folder / "lm/lm.json").read_text())["ngrams"]
    return sum(ngrams[1:]), json.loads((folder / "graph/graph.json").read_text())["sizes"]["HCLG"]["arcs"]


if __name__ == "__main__":
    main()
