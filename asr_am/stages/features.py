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
        build = partial(extract, data_dir, kind, options, cfg.nj, bool(cfg.corpus.prepare.get("allow_pipes")))
        made.append(Target(out, [data_dir], options, build, checked_in_parts=("*.ark",)))
    return made


def extract(data_dir: Path, kind: str, options: dict, jobs: int, allow_pipes: bool, out: Path) -> None:
    """Writes the features of every utterance and the CMVN statistics of every speaker.

    Args:
        data_dir: output of stage data.
        kind: kind of the features.
        options: options of `extract_features`.
        jobs: parallel jobs.
        allow_pipes: the user has allowed the commands in wav.scp.
        out: directory to write into.
    """
    from asr_am.features.extract import extract_features

    extract_features(data_dir, out, kind=kind, jobs=jobs, allow_commands=allow_pipes, **options)


main = stage("features", targets)

if __name__ == "__main__":
    main()
