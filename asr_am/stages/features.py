"""Stage 2, features: MFCC for the GMMs and log-mel energies for the networks, in exp/<corpus>/features/<kind>."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.target import Target


def targets(cfg: DictConfig) -> list[Target]:
    """Returns a target per kind of features."""
    data_dir = corpus_dir(cfg) / "data"
    made = []
    for kind, options in values(cfg.features.kinds).items():
        out = corpus_dir(cfg) / "features" / kind
        options = {"sampling_rate": cfg.corpus.sampling_rate, "sets": list(cfg.corpus.sets)} | options
        made.append(Target(out, [data_dir], options, partial(extract, data_dir, out, kind, options, cfg.nj)))
    return made


def extract(data_dir: Path, final: Path, kind: str, options: dict, jobs: int, out: Path) -> None:
    """Writes the features of every utterance and the CMVN statistics of every speaker."""
    from asr_am.features.extract import extract_features

    extract_features(data_dir, out, final=final, kind=kind, jobs=jobs, **options)


main = stage("features", targets)

if __name__ == "__main__":
    main()
