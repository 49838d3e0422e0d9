"""The alignment graphs of a set on disk, as arrays of whole shards.

Graphs are compiled once per tree and used in every pass, with the transition probabilities of that moment. At self-loop
scale 0.1 their later changes have little effect compared with the likelihoods.

Shapes: U utterances of a shard, S states of all its graphs, A arcs, Q pdfs of one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kaldifst
import numpy as np

from asr_am import disk
from asr_am.data.npz import read_npz, write_npz
from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.hmm.frame_loops import AlignGraph
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable, Tree
from asr_am.hmm.training_graph import read_lexicon_fst, training_graph
from asr_am.parallel import parallel_map

ARC_FIELDS = "target", "label", "column", "weight"
NAMES = "start", "states", "first", *ARC_FIELDS, "final", "pdfs", "pdf"


def align_graph(arrays: FstArrays, column_A: np.ndarray) -> AlignGraph:
    """Converts an FST of graph labels. Arcs with a label read column `column_A` of the scores."""
    first_S1 = np.searchsorted(arrays.source_A, np.arange(arrays.num_states + 1)).astype(np.int32)
    return AlignGraph(
        arrays.start, first_S1, arrays.target_A, arrays.ilabel_A, column_A.astype(np.int32), arrays.weight_A,
        arrays.final_S,
    )  # fmt: skip


@dataclass(frozen=True)
class GraphShard:
    """The graphs of consecutive utterances.

    Attributes:
        arrays: the arrays of `AlignGraph` end to end, and the pdf of each column.
        state_bounds_U1: states of each utterance. `first_S1` has one more for each.
        arc_bounds_U1: arcs of each utterance.
        pdf_bounds_U1: columns of each utterance.
    """

    arrays: dict[str, np.ndarray]
    state_bounds_U1: list[int]
    arc_bounds_U1: list[int]
    pdf_bounds_U1: list[int]

    @classmethod
    def read(cls, path: Path) -> GraphShard:
        """Reads what `compile_graphs` wrote."""
        arrays = dict(zip(NAMES, read_npz(path, *NAMES, remedy=REMEDY), strict=True))
        state_bounds_U1 = _bounds(arrays["states"])
        last_arcs = arrays["first"][np.array(state_bounds_U1[1:]) + np.arange(len(arrays["states"]))]
        return cls(arrays, state_bounds_U1, _bounds(last_arcs), _bounds(arrays["pdfs"]))

    def graph(self, index: int) -> AlignGraph:
        """Returns the graph of an utterance, by its index in the shard."""
        states = slice(*self.state_bounds_U1[index : index + 2])
        arcs = slice(*self.arc_bounds_U1[index : index + 2])
        first_S1 = self.arrays["first"][states.start + index : states.stop + index + 1]
        target_A, label_A, column_A, weight_A = (self.arrays[name][arcs] for name in ARC_FIELDS)
        start, final_S = int(self.arrays["start"][index]), self.arrays["final"][states]
        return AlignGraph(start, first_S1, target_A, label_A, column_A, weight_A, final_S)

    def pdfs(self, index: int) -> np.ndarray:
        """Returns the pdf of each column of an utterance, int32 [Q]."""
        return self.arrays["pdf"][slice(*self.pdf_bounds_U1[index : index + 2])]

    def fst(self, index: int) -> kaldifst.StdVectorFst:
        """Returns the graph of an utterance as kaldifst has it, an acceptor."""
        graph = self.graph(index)
        source_A = np.repeat(np.arange(len(graph.final_S), dtype=np.int32), np.diff(graph.first_S1))
        arcs = source_A, graph.target_A, graph.label_A, graph.label_A, graph.weight_A
        return FstArrays(graph.start, *arcs, graph.final_S).to_fst()


@dataclass(frozen=True)
class Graphs:
    """Compiled graphs of a set.

    Attributes:
        folder: holds <shard>.npz.
        shards: (shard, first utterance, end) of each shard.
    """

    folder: Path
    shards: list[tuple[int, int, int]]

    def load(self, shard: int) -> GraphShard:
        """Reads the graphs of a shard."""
        return GraphShard.read(self.folder / f"{shard}.npz")


def compile_graphs(
    folder: Path, frames: FrameStore, words_U: Sequence[Sequence[int]], lexicon: Path, tree: Tree, states: StateTable,
    self_loop_scale: float, jobs: int,
) -> Graphs:  # fmt: skip
    """Compiles the graphs of all utterances of a set into `folder`, which is replaced.

    Args:
        lexicon: path of L.fst.
    """
    disk.remove(folder)
    folder.mkdir(parents=True)
    graphs = Graphs(folder, [(shard, first, end) for shard, (first, end) in enumerate(frames.ranges())])
    build = functools.partial(_compile_shard, folder, lexicon, tree, states, self_loop_scale)
    tasks = [(shard, frames.utterances[first:end], words_U[first:end]) for shard, first, end in graphs.shards]
    parallel_map(build, tasks, jobs, f"graphs {folder.name}")
    return graphs


def _compile_shard(
    folder: Path, lexicon_path: Path, tree: Tree, states: StateTable, self_loop_scale: float,
    task: tuple[int, Sequence[str], Sequence[Sequence[int]]],
) -> None:  # fmt: skip
    shard, utterances, words_U = task
    lexicon = read_lexicon_fst(lexicon_path)
    pdf_L1 = np.concatenate([[-1], states.pdf_L]).astype(np.int32)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("first", *ARC_FIELDS, "final", "pdf")}
    starts = []
    for utterance, words in zip(utterances, words_U, strict=True):
        try:
            arrays = FstArrays.from_fst(training_graph(words, lexicon, states, tree, self_loop_scale=self_loop_scale))
        except InputError as error:
            raise InputError(f"utterance {utterance}: {error}") from error
        pdf_A = pdf_L1[arrays.ilabel_A]
        pdf_Q = np.unique(pdf_A[pdf_A >= 0])
        graph = align_graph(arrays, np.searchsorted(pdf_Q, pdf_A))
        starts.append(graph.start)
        parts = graph.first_S1, graph.target_A, graph.label_A, graph.column_A, graph.weight_A, graph.final_S, pdf_Q
        for column, part in zip(columns.values(), parts, strict=True):
            column.append(part)
    counts = {"states": columns["final"], "pdfs": columns["pdf"]}
    lengths = {name: np.array([len(part) for part in parts]) for name, parts in counts.items()}
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    write_npz(folder / f"{shard}.npz", {"start": np.array(starts), **lengths, **joined})


def _bounds(count_U: np.ndarray) -> list[int]:
    return [0, *np.cumsum(count_U).tolist()]
