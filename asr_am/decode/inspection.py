"""Shows how a run decoded one utterance: its lattice, the words chosen from it, and the forced alignment.

Lattices of dev and test are those that stage decode has kept. An utterance of another set is decoded now, with the same
models and scales. Likewise the alignment is that of stage align where there is one, and else made now with the scores
of the run.

Shapes: L graph labels, P pdfs, T frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import numpy as np
from lhotse import SupervisionSegment

from asr_am.data.kaldi_archive import Entry, read_entry, read_scp, reason
from asr_am.data.manifests import SUPERVISIONS, read_supervisions
from asr_am.decode.aligned import aligned_phones, aligned_words
from asr_am.decode.ctm import CtmWord
from asr_am.decode.decode_set import reference_words
from asr_am.decode.hypotheses import hypotheses, nonspeech_words
from asr_am.decode.lattice import Lattice, read_lattices
from asr_am.decode.loading import load_graph, load_lang, load_lm_pair, load_states
from asr_am.decode.nbest import Sentence, nbest
from asr_am.decode.scorer import Scorer
from asr_am.decode.shards import DecodeOptions, Decoder
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.features.feature_archive import DAMAGE
from asr_am.hmm import REMEDY
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.train_chain import frame_labels
from asr_am.hmm.training_graph import read_lexicon_fst, training_graph
from asr_am.hmm.tree import DecisionTree
from asr_am.hmm.viterbi import AlignOptions, search
from asr_am.lang.lang_dir import Lang

NEAREST = 5  # ids that are named in place of an unknown one


@dataclass(frozen=True)
class Inspection:
    """One utterance under one decoding run.

    Attributes:
        run: exp/<corpus>/decode/<run>.
        system: its models and scales.
    """

    run: Path
    system: System
    subset: str
    segment: SupervisionSegment

    @property
    def lang(self) -> Lang:
        return load_lang(self.system.lang_dir)

    @cached_property
    def lattice(self) -> Lattice | None:
        """The raw lattice, None if no path survived the search."""
        archive = self.run / "lattices" / f"{self.subset}.ark"
        if archive.is_file():
            return next((lattice for _, lattice in read_lattices(archive, self.segment.id)), None)
        options = DecodeOptions(self.system.search, (self.system.lm_scale,), nbest=0)
        states = load_states(self.system.states)
        graph, lms = load_graph(self.system.graph), load_lm_pair(self.system.graph)
        decoder = Decoder(self._scorer, graph, lms, self.lang, states, options)
        _, data = decoder.decode(self.segment.id)
        return Lattice.from_arrays(FstArrays.from_lattice(data)[0]) if data else None

    @cached_property
    def words(self) -> list[CtmWord]:
        """The hypothesis: words with times and posteriors, as in the chosen CTM file."""
        if self.lattice is None:
            return []
        return hypotheses(self.lattice, [self.system.lm_scale], load_states(self.system.states), self.lang)[0]

    def best_paths(self, count: int) -> list[Sentence]:
        """Returns the best distinct word sequences of the lattice."""
        return nbest(self.lattice, self.system.lm_scale, count) if self.lattice is not None else []

    def cost(self, sentence: Sentence) -> float:
        """Returns the cost of a path under the chosen LM weight and insertion penalty."""
        scale = self.system.lm_scale
        return sentence.graph + sentence.acoustic / scale.lm + scale.insertion * len(sentence.words)

    @property
    def reference(self) -> list[str]:
        """The words of the transcript that are scored."""
        dropped = frozenset(self.lang.word_names[word] for word in nonspeech_words(self.lang))
        return reference_words(self.segment.text or "", dropped)

    @cached_property
    def labels_T(self) -> np.ndarray | None:
        """The graph label of each frame in the forced alignment, None without a path."""
        if self.is_aligned:
            entry = self._alignments[self.segment.id]
            try:
                return np.asarray(read_entry(entry))
            except DAMAGE as error:
                raise InputError(f"{entry}: damaged ({reason(error)}); {REMEDY}") from error
        states = load_states(self.system.states)
        tree = DecisionTree.load(self.system.align_dir / "tree.json")
        lexicon = read_lexicon_fst(self.system.lang_dir / "L.fst")
        graph = training_graph(self.lang.word_ids(self.segment.text or ""), lexicon, states, tree)
        options = AlignOptions()
        scores_TL = self._scorer.log_likelihoods(self.segment.id)[:, states.pdf_L]
        labels_T, _ = search(graph, np.ascontiguousarray(scores_TL * np.float32(options.acoustic_scale)), options)
        return labels_T if labels_T is None else frame_labels(labels_T, states)

    @property
    def is_aligned(self) -> bool:
        """True if stage align has aligned the utterance."""
        return self.segment.id in self._alignments

    @property
    def aligned_words(self) -> list[CtmWord]:
        """The words of the transcript with their times."""
        if self.labels_T is None:
            return []
        return aligned_words(self.segment.text or "", self.labels_T, load_states(self.system.states), self.lang)

    @property
    def aligned_phones(self) -> list[CtmWord]:
        """The phones of the alignment with their times."""
        if self.labels_T is None:
            return []
        return aligned_phones(self.labels_T, load_states(self.system.states), self.lang)

    @cached_property
    def _scorer(self) -> Scorer:
        return self.system.source(self.subset).load()

    @cached_property
    def _alignments(self) -> dict[str, Entry]:
        index = self.system.align_dir / "ali" / f"{self.subset}.scp"
        return read_scp(index, REMEDY) if index.is_file() else {}


def inspect(run: Path, data_dir: Path, utterance: str) -> Inspection:
    """Finds an utterance in any set.

    Args:
        run: exp/<corpus>/decode/<run>.

    Raises:
        InputError: there is no such utterance (names similar ones), or a file of the run is missing.
    """
    known: list[str] = []
    for subset, segment in all_segments(data_dir):
        if segment.id == utterance:
            return Inspection(run, System.load(run).of(subset), subset, segment)
        known.append(segment.id)
    near = [name for name in known if utterance in name] or get_close_matches(utterance, known, NEAREST, 0.0)
    raise InputError(f"utterance {utterance}: not in {data_dir}; the nearest are {' '.join(near[:NEAREST])}")


def all_segments(data_dir: Path) -> Iterator[tuple[str, SupervisionSegment]]:
    """Yields (name of the set, utterance) of every set. Raises InputError if there is none."""
    manifests = sorted(data_dir.glob(f"*/{SUPERVISIONS}"))
    if not manifests:
        raise InputError(f"{data_dir}: holds no utterances; run stage 0 (data)")
    for manifest in manifests:
        for segment in read_supervisions(data_dir, manifest.parent.name):
            yield manifest.parent.name, segment
