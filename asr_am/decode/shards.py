"""Parallel decoding of a set in shards of utterances. A killed run resumes from its finished shards.

A shard writes `<name>.lat` (lattices, see `asr_am.decode.lattice`) and then `<name>.json` (a line with the CRC-32 of
both files, and everything else).
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from asr_am.data.checksums import file_crc32
from asr_am.data.temporary import replacing
from asr_am.decode.ctm import CtmWord
from asr_am.decode.hypotheses import hypotheses
from asr_am.decode.lattice import Lattice, LmScale
from asr_am.decode.loading import load_graph, load_lang, load_lm_pair, load_network, load_states
from asr_am.decode.nbest import nbest
from asr_am.decode.ngram_rescore import rescore
from asr_am.decode.score_server import scores_from_gpu
from asr_am.decode.scorer import Scorer, ScoreSource
from asr_am.decode.search import SearchOptions, search
from asr_am.decode.search_graph import SearchGraph
from asr_am.errors import InputError
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang
from asr_am.lang.ngram_automaton import LmPair
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)

SHARD = 16  # utterances
FIRST, EARLY = "00000", 5  # the first shard, and its utterances after which a slow search is told
MANY_TOKENS = 3500  # in a frame. Systems that recognise have 200 to 2,000, those that guess up to max_active


@dataclass(frozen=True)
class DecodeOptions:
    """Options of decoding.

    Attributes:
        grid: LM scales to write words for, none if only lattices are needed.
        nbest: length of the n-best lists, which are made at LM weight 1 / acoustic_scale.
        device: where a network scores frames, see `scores_from_gpu`.
    """

    search: SearchOptions = field(default_factory=SearchOptions)
    grid: tuple[LmScale, ...] = (LmScale(10.0),)
    nbest: int = 20
    device: str = "auto"


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to decode utterances of a set, hashable and in plain values."""

    source: ScoreSource
    graph: Path
    lang_dir: Path
    states: Path
    options: DecodeOptions
    network: Path | None = None  # whose scores these are, for messages


@dataclass(frozen=True)
class NbestEntry:
    """A sentence with its graph cost and its unscaled acoustic cost."""

    graph: float
    acoustic: float
    words: list[str]


@dataclass(frozen=True)
class Decoded:
    """Result of one utterance.

    Attributes:
        complete: see `SearchResult`.
        density: lattice arcs per frame, 0 without a lattice.
        seconds: time of scoring, search and lattice processing.
        words: words under each scale of the grid.
        active: mean number of tokens that were expanded in a frame.
    """

    utterance: str
    frames: int
    complete: bool
    density: float
    seconds: float
    words: list[list[CtmWord]]
    nbest: list[NbestEntry] = field(default_factory=list)
    active: float = 0.0

    @property
    def empty(self) -> bool:
        """True if no path survived the search."""
        return self.density == 0.0


@dataclass(frozen=True)
class Decoder:
    """A job's files in memory."""

    scorer: Scorer
    graph: SearchGraph
    lms: LmPair | None  # models to rescore lattices with, see `load_lm_pair`
    lang: Lang
    states: StateTable
    options: DecodeOptions

    def decode(self, utterance: str) -> tuple[Decoded, bytes]:
        """Decodes an utterance. Returns the result and the lattice (empty bytes if there is none)."""
        begin = time.perf_counter()
        scores_TP = self.scorer.log_likelihoods(utterance)
        self._check(utterance, scores_TP)
        frames = len(scores_TP) * self.states.subsampling
        found = search(self.graph, scores_TP, self.states, self.options.search)
        no_words: list[list[CtmWord]] = [[] for _ in self.options.grid]
        result = Decoded(
            utterance, frames, found.complete, 0.0, time.perf_counter() - begin, no_words, [], found.active
        )
        if found.arrays is None:
            return result, b""
        arrays, lattice = found.arrays, Lattice.from_arrays(found.arrays)
        if self.lms is not None:
            how = self.options.search
            arrays = rescore(lattice, self.lms, LmScale(1 / how.acoustic_scale), how.lattice_beam)
            lattice = Lattice.from_arrays(arrays)
        words = hypotheses(lattice, self.options.grid, self.states, self.lang) if self.options.grid else []
        entries = self._nbest(lattice) if self.options.nbest else []
        seconds = time.perf_counter() - begin
        density = lattice.density
        result = Decoded(utterance, frames, found.complete, density, seconds, words, entries, found.active)
        return result, arrays.to_lattice_bytes()

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
    """Loads a job's files, once per worker process."""
    lang, states = load_lang(job.lang_dir), load_states(job.states)
    return Decoder(job.source.load(), load_graph(job.graph), load_lm_pair(job.graph), lang, states, job.options)


def decode_shards(job: Job, utterances: Sequence[str], folder: Path, jobs: int, description: str) -> None:
    """Decodes utterances in shards. Shards that an earlier run of the same job finished are reused."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [
        (folder / f"{begin // SHARD:05d}", tuple(utterances[begin : begin + SHARD]))
        for begin in range(0, len(utterances), SHARD)
    ]
    missing = [shard for shard in shards if not _finished(shard[0])]
    if len(missing) < len(shards):
        log.info(
            "%s: %d of %d shards were finished by an earlier run", description, len(shards) - len(missing), len(shards)
        )
    if missing:
        load_graph(job.graph)  # before the processes are forked, so that they share its memory
        sizes = [len(members) for _, members in missing]
        with scores_from_gpu(job.source, job.options.device) as source:
            function = partial(decode_shard, replace(job, source=source))
            served = source is not job.source  # by a process of this host
            parallel_map(function, missing, jobs, description, sizes=sizes, unit="utterances", here=served)


def read_shards(folder: Path) -> list[Decoded]:
    """Returns the results of all shards. Raises InputError if a file is missing or damaged."""
    return [decoded for path in sorted(folder.glob("*.json")) for decoded in read_shard(path.with_suffix(""))]


def _finished(path: Path) -> bool:
    """Returns whether both files of a shard exist and are as they were written.

    A kill during the removal of finished shards may leave one of the files, a power cut a part of one.
    """
    try:
        read_shard(path)
    except InputError:
        return False
    return True


def decode_shard(job: Job, shard: tuple[Path, tuple[str, ...]]) -> None:
    """Decodes the utterances of a shard. Writes the .json last and by a rename, as it marks the shard as finished."""
    path, utterances = shard
    decoder = load_decoder(job)
    results: list[Decoded] = []
    with replacing(path.with_suffix(".lat")) as temporary, temporary.open("wb") as lattices:
        for utterance in utterances:
            decoded, data = decoder.decode(utterance)
            results.append(decoded)
            if path.name == FIRST and len(results) == min(EARLY, len(utterances)):
                warn_of_slow_search(job, results)
            if data:
                lattices.write(utterance.encode() + b" " + data)
    content = json.dumps([asdict(decoded) for decoded in results]).encode()
    with replacing(path.with_suffix(".json")) as temporary:
        temporary.write_bytes(_checksums(path, content) + content)


def warn_of_slow_search(job: Job, results: Sequence[Decoded]) -> None:
    """Warns if the first results show that the network hardly guides the search, which makes it slow."""
    frames = sum(decoded.frames for decoded in results)
    active = sum(decoded.active * decoded.frames for decoded in results) / max(1, frames)
    if job.network is None or active < MANY_TOKENS:
        return
    info = load_network(job.network)[1]
    loss, guessing = info.get("heldout_loss"), math.log(info["num_pdfs"])
    by_paths = info.get("chain") or info.get("ctc") or "-mmi" in job.network.parent.name
    frame_loss = loss is not None and not by_paths
    quality = f" (held-out loss {loss:.2f}; equal scores for all senones have {guessing:.2f})" if frame_loss else ""
    log.warning(
        "%s: the search expands %.0f tokens in a frame of the first utterances, where 200 to 2000 are usual, so that "
        "decoding takes many times as long: the network tells the senones badly apart%s; end this by Ctrl-C and train "
        "it better (train.epochs, schedule.base), or lower decode.search.max_active", job.network, active, quality,
    )  # fmt: skip


def read_shard(path: Path) -> list[Decoded]:
    """Reads the results of a finished shard. Raises InputError if one of its files is missing or damaged."""
    try:
        head, _, content = path.with_suffix(".json").read_bytes().partition(b"\n")
        if head + b"\n" != _checksums(path, content):
            raise ValueError("wrong checksum")
        return [_decoded(item) for item in json.loads(content)]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}.json, .lat: damaged ({error}); start the same command again") from error


def _checksums(path: Path, content: bytes) -> bytes:
    """Returns the first line of a shard's .json."""
    return f"{zlib.crc32(content):08x} {file_crc32(path.with_suffix('.lat')):08x}\n".encode()


def _decoded(item: dict[str, Any]) -> Decoded:
    words = [
        [CtmWord(start, frames, intern(word), confidence) for start, frames, word, confidence in hypothesis]
        for hypothesis in item.pop("words")
    ]  # one copy of a word for all utterances and scales
    return Decoded(**item | {"words": words, "nbest": [NbestEntry(**entry) for entry in item["nbest"]]})
