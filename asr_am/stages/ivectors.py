"""Stage 4, i-vectors: UBM, extractor, and the i-vectors of every speaker, in exp/<corpus>/features/ivector."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.options import build
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.unit import Unit


def units(cfg: DictConfig) -> list[Unit]:
    """One unit, from the MFCCs."""
    root = corpus_dir(cfg)
    options = {key: value for key, value in values(cfg.ivectors).items() if key not in ("name", "device")}
    out, sets = root / "features/ivector", list(cfg.corpus.sets)
    work = partial(extract, root / "features", out, options, sets, cfg.nj, cfg.ivectors.device)
    return [Unit(out, [root / "features/mfcc"], options | {"sets": sets}, work)]


def extract(features_dir: Path, final: Path, options: dict, sets: list[str], jobs: int, device: str, out: Path) -> None:
    """Train the models, write the i-vectors of all sets."""
    from asr_am.features.ivector.make import make_ivectors
    from asr_am.features.ivector.options import IvectorOptions

    how = build(IvectorOptions, options, "ivectors")
    make_ivectors(features_dir, out, how, sets=sets, jobs=jobs, device=device, final=final)


main = stage("ivectors", units)

if __name__ == "__main__":
    main()
