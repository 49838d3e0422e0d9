"""Stage 3, align: GMM-HMMs from a flat start to triphones; the alignments that the network learns from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

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
    """Train monophones, then triphones; align train and dev with each."""
    from asr_am.hmm.align_corpus import MonoOptions, TriOptions, align_corpus

    mono, tri = MonoOptions(**options["mono"]), TriOptions(**options["tri"])
    align_corpus(root / "data", root / "lang", root / "features", out, final=final, mono=mono, tri=tri, jobs=jobs)


main = stage("align", units)

if __name__ == "__main__":
    main()
