"""Stage 3, align: GMM-HMMs from a flat start to speaker-adapted triphones; alignments that the network learns from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.unit import Unit


def units(cfg: DictConfig) -> list[Unit]:
    """One unit, exp/<corpus>/align, with a directory per GMM system in it."""
    root = corpus_dir(cfg)
    inputs = [root / "data", root / "lang", root / "features/mfcc"]
    options = values(cfg.align)
    out = root / "align"
    return [Unit(out, inputs, options, partial(align, root, out, options, cfg.nj))]


def align(root: Path, final: Path, options: dict, jobs: int, out: Path) -> None:
    """Train the systems that have a section, each from the one before; align train and dev with each."""
    from asr_am.hmm.adaptation import FmllrOptions
    from asr_am.hmm.align_corpus import LdaOptions, MonoOptions, SatOptions, TriOptions, align_corpus

    try:
        systems: dict[str, Any] = {"mono": MonoOptions(**options["mono"]), "tri": TriOptions(**options["tri"])}
        if "lda_mllt" in options:
            systems["lda_mllt"] = LdaOptions(**options["lda_mllt"])
        if "sat" in options:
            systems["sat"] = SatOptions(**options["sat"] | {"fmllr": FmllrOptions(**options["sat"]["fmllr"])})
    except TypeError as error:
        raise InputError(f"align: {error}; see conf/align") from error
    align_corpus(root / "data", root / "lang", root / "features", out, final=final, jobs=jobs, **systems)


main = stage("align", units)

if __name__ == "__main__":
    main()
