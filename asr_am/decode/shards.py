"""Decoding a set in parallel: shards of utterances, each finished one kept on disk, so that a killed run goes on.

A shard leaves `<name>.lat` (lattices, see `asr_am.decode.lattice`) and then `<name>.json` (everything else).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np

from asr_am.decode.ctm import CtmWord
from asr_am.decode.hypotheses import hypotheses
from asr_am.decode.lattice import Lattice, LmScale
from asr_am.decode.loading import load_graph, load_lang, load_states
from asr_am.decode.nbest import nbest
from asr_am.decode.scorer import Scorer, ScoreSource
from asr_am.decode.search import SearchOptions, search
from asr_am.errors import InputError
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)

SHARD = 16  # utterances


@dataclass(frozen=True)
class DecodeOptions:
    """grid: LM weights and insertion penalties to give words for. nbest: sentences kept, at LM weight 1 / scale."""

    search: SearchOptions = field(default_factory=SearchOptions)
    grid: tuple[LmScale, ...] = (LmScale(10.0),)
    nbest: int = 20


@dataclass(frozen=True)
class Job:
    """All that a worker needs to decode any utterance of a set; hashable, in plain values."""

    source: ScoreSource
    graph: Path
    lang_dir: Path
    states: Path
    options: DecodeOptions


@dataclass(frozen=True)
class NbestEntry:
    """A sentence with its graph cost and its unscaled acoustic cost."""

    graph: float
    acoustic: float
    words: list[str]


@dataclass(frozen=True)
class Decoded:
    """One utterance. words: for each weighting of the grid. complete: see `SearchResult`. density: arcs per frame."""

    utterance: str
    frames: int
    complete: bool
    density: float
    seconds: float
    words: list[list[CtmWord]]
    nbest: list[NbestEntry] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether the search ended without any path at all."""
        return self.density == 0.0


@dataclass(frozen=True)
class Decoder:
    """A job's files in memory."""

    scorer: Scorer
    graph: kaldifst.StdVectorFst
    lang: Lang
    states: StateTable
    options: DecodeOptions

    def decode(self, utterance: str) -> tuple[Decoded, bytes]:
        """One utterance and its lattice, empty bytes where there is none."""
        begin = time.perf_counter()
        scores_TP = self.scorer.log_likelihoods(utterance)
        self._check(utterance, scores_TP)
        found = search(self.graph, scores_TP, self.states, self.options.search)
        no_words: list[list[CtmWord]] = [[] for _ in self.options.grid]
        result = Decoded(utterance, len(scores_TP), found.complete, 0.0, time.perf_counter() - begin, no_words)
        if not found.data:
            return result, b""
        lattice = Lattice.from_arrays(found.arrays)
        words = hypotheses(lattice, self.options.grid, self.states, self.lang)
        entries = self._nbest(lattice) if self.options.nbest else []
        seconds = time.perf_counter() - begin
        result = Decoded(utterance, len(scores_TP), found.complete, lattice.density, seconds, words, entries)
        return result, found.data

    def _check(self, utterance: str, scores_TP: np.ndarray) -> None:
        problem = f"scores of {scores_TP.shape[1]} pdfs for {self.states.num_pdfs}"
        if scores_TP.shape[1] == self.states.num_pdfs:
            if np.isfinite(scores_TP).all():
                return
            problem = "scores that are not finite"
        raise InputError(f"utterance {utterance}: {problem}; train the model again, on the alignments of this graph")

    def _nbest(self, lattice: Lattice) -> list[NbestEntry]:
        sentences = nbest(lattice, LmScale(1.0 / self.options.search.acoustic_scale), self.options.nbest)
        names = self.lang.word_names
        return [NbestEntry(round(s.graph, 4), round(s.acoustic, 4), [names[w] for w in s.words]) for s in sentences]


@lru_cache(maxsize=1)
def load_decoder(job: Job) -> Decoder:
    """Load a job's files, once per worker process."""
    lang, states = load_lang(job.lang_dir), load_states(job.states)
    return Decoder(job.source.load(), load_graph(job.graph), lang, states, job.options)


def decode_shards(job: Job, utterances: Sequence[str], folder: Path, jobs: int, description: str) -> list[Decoded]:
    """Decode utterances; `folder` keeps the shards. What another run of the same job left there is taken over."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [
        (folder / f"{begin // SHARD:05d}", tuple(utterances[begin : begin + SHARD]))
        for begin in range(0, len(utterances), SHARD)
    ]
    missing = [shard for shard in shards if not _finished(shard[0])]
    if len(missing) < len(shards):
        log.info("%s: %d of %d shards are there already", description, len(shards) - len(missing), len(shards))
    parallel_map(partial(decode_shard, job), missing, jobs, description)
    return [decoded for path, _ in shards for decoded in read_shard(path)]


def _finished(path: Path) -> bool:
    """Both files, because a kill while finished shards were being removed may have left one of them; and a power cut
    half of one.
    """
    try:
        json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return path.with_suffix(".lat").exists()


def decode_shard(job: Job, shard: tuple[Path, tuple[str, ...]]) -> None:
    """Decode the utterances of one shard and write its two files, the .json last and by a rename."""
    path, utterances = shard
    decoder = load_decoder(job)
    path.with_suffix(".json").unlink(missing_ok=True)  # of a shard whose lattices are gone
    results = []
    with path.with_suffix(".lat").open("wb") as lattices:
        for utterance in utterances:
            decoded, data = decoder.decode(utterance)
            results.append(asdict(decoded))
            if data:
                lattices.write(utterance.encode() + b" " + data)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results), encoding="utf-8")
    temporary.rename(path.with_suffix(".json"))


def read_shard(path: Path) -> list[Decoded]:
    """The results of a finished shard."""
    return [_decoded(item) for item in json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))]


def _decoded(item: dict[str, Any]) -> Decoded:
    words = [[CtmWord(*word) for word in hypothesis] for hypothesis in item.pop("words")]
    return Decoded(**item | {"words": words, "nbest": [NbestEntry(**entry) for entry in item["nbest"]]})
