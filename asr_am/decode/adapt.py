"""Two passes for speakers without transcripts: decode, adapt to what was recognised, decode with that, adapt again.

The first pass uses the mixtures for features without adaptation, the later ones the speaker-adapted mixtures on
features that the pass before adapted (Kaldi's decode_fmllr.sh). Transforms come from the posteriors of whole lattices.

Shapes: T frames, D feature dimension, E = D + 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from asr_am.data.textfile import write_lines
from asr_am.decode.lattice import Lattice, LmScale, arc_posteriors, read_lattices
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
MIN_POSTERIOR = 0.01  # posterior below which a pdf is not taken to have been in a frame


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """passes: of decoding and estimating. first_beam: of the first, whose words need not be the best ones, in place of
    the beam of `search`. lm_weight: of search, in place of its acoustic scale, and posteriors. fmllr: see there.
    """

    passes: int
    first_beam: float
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

    def search_of(self, number: int) -> SearchOptions:
        """Of a pass, the first being 1."""
        beam = self.first_beam if number == 1 else self.search.beam
        return replace(self.search, beam=beam, acoustic_scale=1 / self.lm_weight)


@dataclass(frozen=True)
class AdaptationPaths:
    """system: folder of a speaker-adapted system. graph: HCLG.fst. work: folder for what a killed run goes on from."""

    system: Path
    features_dir: Path
    lang_dir: Path
    graph: Path
    work: Path


@dataclass(frozen=True)
class AdaptedSource:
    """Mixtures (gmm.npz of a system, or those for features without adaptation) on features with or without transforms.

    projection: the system's lda.mat. transforms: folder of those of this set; None: without.
    """

    gmms: Path
    projection: Path
    features_dir: Path
    subset: str
    transforms: Path | None

    def open(self) -> AdaptedReader:
        """The features."""
        projection = load_projection(self.features_dir, self.projection)
        transforms = self.transforms and read_transforms(self.transforms, self.subset, projection.dim)
        return AdaptedReader(self.features_dir, self.subset, projection, transforms or None)

    def load(self) -> GmmScorer:
        """The scorer, see `ScoreSource`."""
        return GmmScorer(DiagGmms.load(self.gmms), self.open().__getitem__)


@dataclass(frozen=True)
class DecodedGroup:
    """Speakers whose utterances were decoded.

    speaker_of: index of the speaker of each utterance. lattices: the archives that hold them. speech_P: whether a pdf
    counts. plain, seen: the features without transforms, and those that they were decoded with.
    """

    speakers: Sequence[str]
    speaker_of: Mapping[str, int]
    lattices: Sequence[Path]
    states: StateTable
    speech_P: np.ndarray
    unadapted: AdaptedReader
    current: AdaptedReader
    lm_weight: float

    def blocks(self) -> Iterator[Block]:
        """See `asr_am.hmm.adaptation.SpeakerGroup`: an utterance a block."""
        for path in self.lattices:
            for utterance, lattice in read_lattices(path):
                if utterance in self.speaker_of:
                    occupation = self._occupation(lattice)
                    yield Block(self.speaker_of[utterance], self.unadapted[utterance], self.current[utterance], occupation)

    def _occupation(self, lattice: Lattice) -> Occupation:
        """The posteriors of the pdfs of each frame."""
        posterior_A = arc_posteriors(lattice, [LmScale(self.lm_weight)])[:, 0]
        emitting = np.flatnonzero(lattice.label_A)
        pdf_A = self.states.pdf_L[lattice.label_A[emitting] - 1]
        key_A = lattice.frame_S[lattice.source_A[emitting]].astype(np.int64) * self.states.num_pdfs + pdf_A
        keys, where = np.unique(key_A, return_inverse=True)
        weight = np.bincount(where, posterior_A[emitting])
        frame, pdf = np.divmod(keys, self.states.num_pdfs)
        kept = (weight >= MIN_POSTERIOR) & self.speech_P[pdf]
        return Occupation(frame[kept], pdf[kept], weight[kept].astype(np.float32))


def save_adaptation(folder: Path, place: AdaptationPaths, options: AdaptOptions) -> None:
    """Note in `folder`, features/fmllr, how its speakers were adapted, for those that come later."""
    paths = {name: os.path.relpath(getattr(place, name), folder) for name in ("system", "lang_dir", "graph")}
    write_lines(folder / ADAPTATION_FILE, [json.dumps(paths | {"options": asdict(options)}, indent=1)])


def load_adaptation(folder: Path) -> tuple[AdaptationPaths, AdaptOptions]:
    """What `save_adaptation` noted; `work` and `features_dir` are the folder and the one above. InputError: damaged."""
    path = folder / ADAPTATION_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        options = value.pop("options")
        parts = {"search": SearchOptions(**options["search"]), "fmllr": FmllrOptions(**options["fmllr"])}
        paths = {name: Path(os.path.normpath(folder / value[name])) for name in ("system", "lang_dir", "graph")}
        return AdaptationPaths(features_dir=folder.parent, work=folder, **paths), AdaptOptions(**options | parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: missing or damaged ({error}); run stage 4 (speaker) again") from error


def adapt_set(place: AdaptationPaths, subset: str, options: AdaptOptions, jobs: int) -> dict[str, np.ndarray]:
    """The transform [D, E] of every speaker of a set, after `options.passes`. InputError where files are missing."""
    states, lang = StateTable.load(place.system / "states.npz"), Lang.load(place.lang_dir)
    adapted = DiagGmms.load(place.system / "gmm.npz")
    start = mean_transform(read_transforms(place.system / TRANSFORMS, "train"))
    source = AdaptedSource(place.system / UNADAPTED, place.system / PROJECTION, place.features_dir, subset, None)
    reader = source.open()
    utterances = sorted(reader.utterances, key=lambda utterance: (reader.speaker(utterance), utterance))
    speakers = {utterance: reader.speaker(utterance) for utterance in utterances}
    for number in range(1, options.passes + 1):
        folder, title = place.work / f"{subset}_{number}", f"{subset} pass {number}"
        how = DecodeOptions(options.search_of(number), (LmScale(options.lm_weight),), nbest=0)
        job = Job(source, place.graph, place.lang_dir, place.system / "states.npz", how)
        decode_shards(job, utterances, folder, jobs, f"{title}: decoding")
        current = source.open() if source.transforms else reader
        groups = _groups(speakers, folder, states, speech_pdfs(lang, states), reader, current, options.lm_weight)
        gmms = DiagGmms.load(source.gmms)
        transforms = adapt_speakers(groups, gmms, options.fmllr, jobs, title, adapted, start)
        write_transforms(folder, subset, transforms, final=folder)
        source = replace(source, gmms=place.system / "gmm.npz", transforms=folder)
    return transforms


def _groups(
    speakers: Mapping[str, str], folder: Path, states: StateTable, speech_P: np.ndarray, unadapted: AdaptedReader,
    current: AdaptedReader, lm_weight: float,
) -> list[DecodedGroup]:  # fmt: skip
    """Groups of speakers with the shards in `folder` that have their utterances, which are in the order of speakers."""
    groups = []
    for members in in_groups(sorted(set(speakers.values()))):
        index = {speaker: number for number, speaker in enumerate(members)}
        own = [number for number, speaker in enumerate(speakers.values()) if speaker in index]
        shards = range(own[0] // SHARD, own[-1] // SHARD + 1)
        lattices = [folder / f"{shard:05d}.lat" for shard in shards]
        speaker_of = {utterance: index[speaker] for utterance, speaker in speakers.items() if speaker in index}
        groups.append(DecodedGroup(members, speaker_of, lattices, states, speech_P, unadapted, current, lm_weight))
    return groups
