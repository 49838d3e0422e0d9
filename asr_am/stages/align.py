"""Stage 3, align: GMM-HMMs from a flat start to speaker-adapted triphones, and the alignments for the network."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from asr_am.options import build
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.target import Target


def targets(cfg: DictConfig) -> list[Target]:
    """Returns exp/<corpus>/align, with a directory per GMM system."""
    root = corpus_dir(cfg)
    inputs = [root / "data", root / "lang", root / "features/mfcc"]
    options = values(cfg.align)
    out = root / "align"
    return [Target(out, inputs, options, partial(align, root, options, cfg.nj))]


def align(root: Path, options: dict, jobs: int, out: Path) -> None:
    """Trains the systems that have a section in `align`, each from the one before. Aligns train and dev with each.

    Args:
        root: exp/<corpus>.
        options: the group `align`.
        jobs: parallel jobs.
        out: directory to write into.
    """
    from asr_am.hmm.adaptation import FmllrOptions
    from asr_am.hmm.align_corpus import LdaOptions, MonoOptions, SatOptions, TriOptions, align_corpus

    sections = dict(options)
    if "sat" in sections:
        fmllr = build(FmllrOptions, sections["sat"]["fmllr"], "align.sat.fmllr")
        sections["sat"] = sections["sat"] | {"fmllr": fmllr}
    kinds: dict[str, type[Any]] = {"mono": MonoOptions, "tri": TriOptions, "lda_mllt": LdaOptions, "sat": SatOptions}
    systems = {name: build(kind, sections[name], f"align.{name}") for name, kind in kinds.items() if name in sections}
    align_corpus(root / "data", root / "lang", root / "features", out, jobs=jobs, **systems)


main = stage("align", targets)

if __name__ == "__main__":
    main()
