"""Speaker adaptation without transcripts: decode, estimate fMLLR from the lattices, decode with it, estimate again.

The first pass uses the mixtures for unadapted features. Later passes use the speaker-adapted mixtures on the features
that the previous pass adapted (Kaldi's decode_fmllr.sh). Transforms are estimated from posteriors of whole lattices.

Shapes: T frames, D feature dimension, E = D + 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from asr_am.data.textfile import load_json, write_lines
from asr_am.decode.lattice import Lattice, LmScale, arc_posteriors, read_lattices
from asr_am.decode.loading import load_gmms, load_lang, load_states
from asr_am.decode.scorer import GmmScorer
from asr_am.decode.search import SearchOptions
from asr_am.decode.shards import SHARD, DecodeOptions, Job, decode_shards
from asr_am.errors import InputError
from asr_am.features.adapted import AdaptedReader, load_projection, mean_transform, read_transforms, write_transforms
from asr_am.hmm.adaptation import Block, FmllrOptions, adapt_speakers, in_groups
from asr_am.hmm.expectations import Occupation
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.gmm_system import PROJECTION, TRANSFORMS, UNADAPTED
from asr_am.hmm.states import StateTable
from asr_am.hmm.training import speech_pdfs
from asr_am.lang.lang_dir import Lang

ADAPTATION_FILE = "adaptation.json"
MIN_POSTERIOR = 0.01  # a pdf with a lower posterior in a frame is ignored there


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """Options of adaptation without transcripts.

    Attributes:
        passes: how often to decode and estimate.
        first_beam, first_max_active: those of the first pass, in place of those of `search` (its words need not be the
            best ones).
        lm_weight: LM weight of search, in place of its acoustic scale, and of the lattice posteriors.
    """

    passes: int
    first_beam: float
    first_max_active: int = 2000
    lm_weight: float
    search: SearchOptions
    fmllr: FmllrOptions

    def __post_init__(self) -> None:
        for name in ("first_beam", "lm_weight"):
            value = getattr(self, name)
            if not value > 0:
                raise InputError(f"speaker: {name} is {value!r}; it must be a number above 0")
        if self.passes < 1:
            raise InputError(f"speaker: passes is {self.passes!r}; it must be a whole number, at least 1")
        self.search_options(1)

    def search_options(self, number: int) -> SearchOptions:
        """Returns the search options of pass `number`, counted from 1."""
        search = replace(self.search, acoustic_scale=1 / self.lm_weight)
        return replace(search, beam=self.first_beam, max_active=self.first_max_active) if number == 1 else search


@dataclass(frozen=True)
class AdaptationPaths:
    """Files and folders of adaptation.

    Attributes:
        system: folder of a speaker-adapted GMM system.
        graph: HCLG.fst.
        work: scratch folder from which a killed run resumes.
    """

    system: Path
    features_dir: Path
    lang_dir: Path
    graph: Path
    work: Path


@dataclass(frozen=True)
class AdaptedSource:
    """Gaussian mixtures on features with or without speaker transforms.

    Attributes:
        gmms: mixtures of a system (gmm.npz), or its mixtures for unadapted features.
        projection: the system's lda.mat.
        transforms: folder with the transforms of this set, or None for features without transforms.
    """

    gmms: Path
    projection: Path
    features_dir: Path
    subset: str
    transforms: Path | None

    def open(self) -> AdaptedReader:
        """Opens the features."""
        projection = load_projection(self.features_dir, self.projection)
        transforms = self.transforms and read_transforms(self.transforms, self.subset, projection.dim)
        return AdaptedReader(self.features_dir, self.subset, projection, transforms or None)

    def load(self) -> GmmScorer:
        """Loads the scorer, see `ScoreSource`."""
        return GmmScorer(load_gmms(self.gmms), self.open().__getitem__)


@dataclass(frozen=True)
class DecodedGroup:
    """A `SpeakerGroup` whose utterances were decoded.

    Attributes:
        speaker_of: index of the speaker of each utterance.
        lattices: lattice archives that contain the utterances.
        states: graph labels and their pdfs.
        speech_P: whether a pdf counts as speech.
        base: features without transforms.
        current: features that the lattices were made from.
        lm_weight: LM weight of the posteriors.
    """

    speakers: Sequence[str]
    speaker_of: Mapping[str, int]
    lattices: Sequence[Path]
    states: StateTable
    speech_P: np.ndarray
    base: AdaptedReader
    current: AdaptedReader
    lm_weight: float

    def blocks(self) -> Iterator[Block]:
        """Yields one block per utterance."""
        for path in self.lattices:
            for utterance, lattice in read_lattices(path):
                if utterance in self.speaker_of:
                    occupation = self._occupation(lattice)
                    yield Block(self.speaker_of[utterance], self.base[utterance], self.current[utterance], occupation)

    def _occupation(self, lattice: Lattice) -> Occupation:
        """Returns the pdf posteriors of every frame."""
        posterior_A = arc_posteriors(lattice, [LmScale(self.lm_weight)])[:, 0]
        emitting = np.flatnonzero(lattice.label_A)
        pdf_A = self.states.pdf_L[lattice.label_A[emitting] - 1]
        key_A = lattice.frame_S[lattice.source_A[emitting]].astype(np.int64) * self.states.num_pdfs + pdf_A
        keys, index_A = np.unique(key_A, return_inverse=True)
        posterior = np.bincount(index_A, posterior_A[emitting])
        frame, pdf = np.divmod(keys, self.states.num_pdfs)
        kept = (posterior >= MIN_POSTERIOR) & self.speech_P[pdf]
        return Occupation(frame[kept], pdf[kept], posterior[kept].astype(np.float32))


def save_adaptation(folder: Path, paths: AdaptationPaths, options: AdaptOptions) -> None:
    """Records in `folder` (features/fmllr) how its speakers were adapted, so that new speakers are adapted alike."""
    relative = {name: os.path.relpath(getattr(paths, name), folder) for name in ("system", "lang_dir", "graph")}
    write_lines(folder / ADAPTATION_FILE, [json.dumps(relative | {"options": asdict(options)}, indent=1)])


def load_adaptation(folder: Path) -> tuple[AdaptationPaths, AdaptOptions]:
    """Reads what `save_adaptation` recorded, with `folder` as `work` and its parent as `features_dir`.

    Raises:
        InputError: the record is missing or damaged.
    """
    path = folder / ADAPTATION_FILE
    try:
        value = load_json(path)
        options = value.pop("options")
        fmllr = FmllrOptions(**options["fmllr"] | {"device": "cpu"})  # this host may have no GPU
        parts = {"search": SearchOptions(**options["search"]), "fmllr": fmllr}
        paths = {name: Path(os.path.normpath(folder / value[name])) for name in ("system", "lang_dir", "graph")}
        return AdaptationPaths(features_dir=folder.parent, work=folder, **paths), AdaptOptions(**options | parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: missing or damaged ({error}); run stage 4 (speaker) again") from error


@lru_cache(maxsize=1)
def _load_models(system: Path, lang_dir: Path) -> tuple[StateTable, Lang, DiagGmms, np.ndarray]:
    """Returns states, lang, adapted mixtures and the mean transform [D, E] of the training speakers."""
    states, lang = load_states(system / "states.npz"), load_lang(lang_dir)
    start = mean_transform(read_transforms(system / TRANSFORMS, "train"))
    return states, lang, load_gmms(system / "gmm.npz"), start


def adapt_set(paths: AdaptationPaths, subset: str, options: AdaptOptions, jobs: int) -> dict[str, np.ndarray]:
    """Decodes a set `options.passes` times and estimates a transform per speaker after each pass.

    Returns:
        The transform [D, E] of every speaker.

    Raises:
        InputError: a file is missing or damaged.
    """
    states, lang, adapted, start = _load_models(paths.system, paths.lang_dir)
    source = AdaptedSource(paths.system / UNADAPTED, paths.system / PROJECTION, paths.features_dir, subset, None)
    base = source.open()
    utterances = sorted(base.utterances, key=lambda utterance: (base.speaker(utterance), utterance))
    speakers = {utterance: base.speaker(utterance) for utterance in utterances}
    for number in range(1, options.passes + 1):
        folder, title = paths.work / f"{subset}_{number}", f"{subset} pass {number}"
        decode_options = DecodeOptions(options.search_options(number), grid=(), nbest=0)  # only lattices
        job = Job(source, paths.graph, paths.lang_dir, paths.system / "states.npz", decode_options)
        decode_shards(job, utterances, folder, jobs, f"{title}: decoding")
        current = source.open() if source.transforms else base
        groups = _groups(speakers, folder, states, speech_pdfs(lang, states), base, current, options.lm_weight)
        gmms = load_gmms(source.gmms)
        transforms = adapt_speakers(groups, gmms, options.fmllr, jobs, title, adapted, start)
        write_transforms(folder, subset, transforms)
        source = replace(source, gmms=paths.system / "gmm.npz", transforms=folder)
    return transforms


def _groups(
    speakers: Mapping[str, str], folder: Path, states: StateTable, speech_P: np.ndarray, base: AdaptedReader,
    current: AdaptedReader, lm_weight: float,
) -> list[DecodedGroup]:  # fmt: skip
    """Groups the speakers, each group with the shards in `folder` that hold its utterances.

    `speakers` maps utterances to speakers in the order of the shards, which is by speaker.
    """
    groups = []
    for members in in_groups(sorted(set(speakers.values()))):
        index = {speaker: number for number, speaker in enumerate(members)}
        positions = [number for number, speaker in enumerate(speakers.values()) if speaker in index]
        shards = range(positions[0] // SHARD, positions[-1] // SHARD + 1)
        lattices = [folder / f"{shard:05d}.lat" for shard in shards]
        speaker_of = {utterance: index[speaker] for utterance, speaker in speakers.items() if speaker in index}
        groups.append(DecodedGroup(members, speaker_of, lattices, states, speech_P, base, current, lm_weight))
    return groups
