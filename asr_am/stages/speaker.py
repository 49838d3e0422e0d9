"""Stage 4, speaker: speaker adaptation as kinds of features in exp/<corpus>/features.

- features/lda: the LDA+MLLT matrix, if `align` has a section lda_mllt.
- features/fmllr: that matrix and a transform per speaker, if `align` has a section sat. Transforms of the training set
  are from stage align, the others from decoding (see `speaker` in conf/config.yaml).
- features/ivector: i-vectors of every speaker, with UBM and extractor, if features.name has a part ivector.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from asr_am import disk
from asr_am.errors import InputError
from asr_am.options import build, choices
from asr_am.stages.align import kaldi_extractor, kaldi_ivectors, on_cpu
from asr_am.stages.app import stage
from asr_am.stages.decode import graph_targets
from asr_am.stages.layout import Layout, layout
from asr_am.stages.sections import values
from asr_am.stages.systems import SystemPlan
from asr_am.stages.target import Target

if TYPE_CHECKING:
    from asr_am.decode.adapt import AdaptOptions

GMM = "sat"


def targets(cfg: DictConfig) -> list[Target]:
    """Returns the matrix, the graph of the first pass, the speakers' transforms and their i-vectors."""
    paths = layout(cfg)
    made = []
    if "lda_mllt" in cfg.align:
        made.append(Target(paths.features / "lda", [paths.align], {}, partial(copy_matrix, paths.align / "lda_mllt")))
    if GMM in cfg.align:
        plan, lm = SystemPlan(GMM, GMM, "fmllr", None, None), cfg.speaker.lm or next(iter(cfg.corpus.lms))
        graph, dev_graph = paths.graph(GMM, lm), paths.dev_graph(GMM, lm)
        inputs = [paths.lang(), paths.features / "mfcc", paths.align, *sorted({graph, dev_graph})]
        options = values(cfg.speaker) | {"sets": [name for name in cfg.corpus.sets if name != "train"]}
        build_fmllr = partial(adapt, paths, graph, dev_graph, options, cfg.nj)
        made += graph_targets(cfg, plan, lm)
        made.append(Target(paths.features / "fmllr", inputs, on_cpu(options), build_fmllr, version=2))
    if "ivector" in cfg.features.name.split("+"):
        made.append(ivector_target(cfg))
    return made


def copy_matrix(system: Path, out: Path) -> None:
    """Copies the LDA+MLLT matrix of a system."""
    from asr_am.hmm.gmm_system import PROJECTION

    shutil.copyfile(system / PROJECTION, out / PROJECTION)


def adapt(paths: Layout, graph: Path, dev_graph: Path, options: dict, jobs: int, out: Path) -> None:
    """Copies the matrix and the training speakers' transforms, and estimates those of the other sets in two passes.

    An LM that knows dev would adapt to its speakers as well as with transcripts, so dev has a graph of its own.
    """
    from asr_am.decode.adapt import AdaptationPaths, adapt_set, save_adaptation
    from asr_am.features.adapted import read_transforms, write_transforms
    from asr_am.hmm.gmm_system import TRANSFORMS

    system, work = paths.align / GMM, out / "work"
    how = adapt_options({name: value for name, value in options.items() if name not in ("lm", "sets")})
    copy_matrix(system, out)
    known = read_transforms(system / TRANSFORMS, "train")
    write_transforms(out, "train", known)
    place = AdaptationPaths(system, paths.features, paths.lang(), graph / "HCLG.fst", work)
    for subset in options["sets"]:
        there = replace(place, graph=dev_graph / "HCLG.fst") if subset == "dev" else place
        write_transforms(out, subset, adapt_set(there, subset, how, jobs))
    save_adaptation(out, place, how)
    disk.remove(work)


def ivector_target(cfg: DictConfig) -> Target:
    """Returns UBM, extractor and i-vectors, made from the MFCCs. Or i-vectors of Kaldi's or of its extractor."""
    paths, sets = layout(cfg), list(cfg.corpus.sets)
    out, inputs = paths.features / "ivector", [paths.features / "mfcc"]
    options = {key: value for key, value in values(cfg.ivectors).items() if key not in ("name", "device")}
    if folders := kaldi_ivectors(values(cfg.align)):
        if missing := [subset for subset in sets if subset not in folders]:
            raise InputError(f"align.ivectors: lacks the set {missing[0]}; give a directory for each set")
        build_import = partial(import_kaldi_ivectors, paths.features, folders)
        return Target(out, [*inputs, *folders.values()], {"kaldi": sorted(folders)}, build_import)
    if folder := kaldi_extractor(values(cfg.align)):
        restarts = {subset: options["online_utterances"] if subset in options["online"] else 0 for subset in sets}
        build_extract = partial(extract_by_kaldi, folder, paths.features, restarts, cfg.nj)
        return Target(out, [*inputs, folder], {"extractor": restarts}, build_extract)
    build_ivectors = partial(extract_ivectors, paths.features, options, sets, cfg.nj, cfg.ivectors.device)
    return Target(out, inputs, options | {"sets": sets}, build_ivectors)


def import_kaldi_ivectors(features_dir: Path, folders: dict[str, Path], out: Path) -> None:
    """Takes over the i-vectors of Kaldi's extractor."""
    from asr_am.features.ivector.kaldi_ivectors import import_ivectors

    import_ivectors(folders, features_dir, out)


def extract_by_kaldi(folder: Path, features_dir: Path, restarts: dict[str, int], jobs: int, out: Path) -> None:
    """Extracts i-vectors by an extractor of Kaldi's."""
    from asr_am.features.ivector.kaldi_ivectors import extract_ivectors

    extract_ivectors(folder, features_dir, out, restarts, jobs)


def extract_ivectors(features_dir: Path, options: dict, sets: list[str], jobs: int, device: str, out: Path) -> None:
    """Trains UBM and extractor, and writes the i-vectors of all sets."""
    from asr_am.features.ivector.extract_ivectors import make_ivectors
    from asr_am.features.ivector.train_extractor import IvectorOptions

    how = build(IvectorOptions, options, "ivectors")
    make_ivectors(features_dir, out, how, sets=sets, jobs=jobs, device=device)


def adapt_options(options: Mapping[str, Any]) -> AdaptOptions:
    """Returns the options of section `speaker` without `lm`, as the adaptation takes them."""
    from asr_am.decode.adapt import AdaptOptions
    from asr_am.decode.search import SearchOptions
    from asr_am.hmm.adaptation import FmllrOptions

    parts = dict(options)
    parts["search"] = build(SearchOptions, parts.get("search", {}), "speaker.search")
    parts["fmllr"] = build(FmllrOptions, parts.get("fmllr", {}), "speaker.fmllr")
    return build(AdaptOptions, parts, "speaker")


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    from asr_am.features.ivector.train_extractor import IvectorOptions

    options = values(cfg.speaker)
    if (lm := options.pop("lm", None)) is not None and lm not in cfg.corpus.lms:
        raise InputError(f"speaker.lm={lm}: is no LM of this corpus{choices(lm, cfg.corpus.lms)}")
    adapt_options(options)
    ivectors = {name: value for name, value in values(cfg.ivectors).items() if name not in ("name", "device")}
    build(IvectorOptions, ivectors, "ivectors")


main = stage("speaker", targets)

if __name__ == "__main__":
    main()
