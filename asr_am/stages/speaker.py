"""Stage 4, speaker: what later stages need to know of each speaker, as kinds of features in exp/<corpus>/features.

features/lda has the LDA+MLLT matrix; features/fmllr that matrix and a transform for each speaker, those of the training
set from stage align, the others from decoding their speech (see conf/speaker); features/ivector i-vectors of every
speaker with their UBM and extractor. Each is made where the configuration asks for it: the first two by sections of
`align`,
i-vectors as a part of features.name.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from asr_am.options import build
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.decode import graph_unit
from asr_am.stages.systems import SystemPlan, graph_dir
from asr_am.stages.target import Target

GMM = "sat"


def units(cfg: DictConfig) -> list[Target]:
    """The matrix, the graph of the first pass, the speakers' transforms, their i-vectors."""
    root = corpus_dir(cfg)
    made = []
    if "lda_mllt" in cfg.align:
        made.append(Target(root / "features/lda", [root / "align"], {}, partial(copy_matrix, root / "align/lda_mllt")))
    if GMM in cfg.align:
        plan, lm = SystemPlan(GMM, GMM, "fmllr", None, None), cfg.speaker.lm or next(iter(cfg.corpus.lms))
        graph = graph_dir(cfg, plan, lm)
        inputs = [root / "lang", root / "features/mfcc", root / "align", graph]
        options = values(cfg.speaker) | {"sets": [name for name in cfg.corpus.sets if name != "train"]}
        work = partial(adapt, root, graph, options, cfg.nj)
        made += [graph_unit(cfg, plan, lm), Target(root / "features/fmllr", inputs, options, work, version=2)]
    if "ivector" in cfg.features.name.split("+"):
        made.append(ivector_unit(cfg))
    return made


def copy_matrix(system: Path, out: Path) -> None:
    """The matrix of a system."""
    from asr_am.hmm.gmm_system import PROJECTION

    shutil.copyfile(system / PROJECTION, out / PROJECTION)


def adapt(root: Path, graph: Path, options: dict, jobs: int, out: Path) -> None:
    """Copy the matrix and the training speakers' transforms; two passes for the other sets."""
    from asr_am.decode.adapt import AdaptOptions, AdaptationPaths, adapt_set, save_adaptation
    from asr_am.decode.search import SearchOptions
    from asr_am.features.adapted import read_transforms, write_transforms
    from asr_am.hmm.adaptation import FmllrOptions
    from asr_am.hmm.gmm_system import TRANSFORMS

    final, system, work = root / "features/fmllr", root / "align" / GMM, out / "work"
    parts: dict[str, Any] = {name: options[name] for name in ("passes", "first_beam", "lm_weight")}
    parts["search"] = build(SearchOptions, options["search"], "speaker.search")
    parts["fmllr"] = build(FmllrOptions, options["fmllr"], "speaker.fmllr")
    how = build(AdaptOptions, parts, "speaker")
    copy_matrix(system, out)
    known = read_transforms(system / TRANSFORMS, "train")
    write_transforms(out, "train", known, final=final)
    place = AdaptationPaths(system, root / "features", root / "lang", graph / "HCLG.fst", work)
    for subset in options["sets"]:
        write_transforms(out, subset, adapt_set(place, subset, how, jobs), final=final)
    save_adaptation(out, place, how)
    shutil.rmtree(work)


def ivector_unit(cfg: DictConfig) -> Target:
    """UBM, extractor and i-vectors, from the MFCCs."""
    root = corpus_dir(cfg)
    options = {key: value for key, value in values(cfg.ivectors).items() if key not in ("name", "device")}
    out, sets = root / "features/ivector", list(cfg.corpus.sets)
    work = partial(extract_ivectors, root / "features", out, options, sets, cfg.nj, cfg.ivectors.device)
    return Target(out, [root / "features/mfcc"], options | {"sets": sets}, work)


def extract_ivectors(
    features_dir: Path, final: Path, options: dict, sets: list[str], jobs: int, device: str, out: Path
) -> None:
    """Train the models, write the i-vectors of all sets."""
    from asr_am.features.ivector.extract_ivectors import make_ivectors
    from asr_am.features.ivector.train_extractor import IvectorOptions

    how = build(IvectorOptions, options, "ivectors")
    make_ivectors(features_dir, out, how, sets=sets, jobs=jobs, device=device, final=final)


main = stage("speaker", units)

if __name__ == "__main__":
    main()
