"""Stage 2, features: MFCC for the GMMs and log-mel energies for the networks, in exp/<corpus>/features/<kind>."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.features.fusion import base_of
from asr_am.options import build, choices
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.target import Target


@dataclass(frozen=True)
class FeatureOptions:
    """The options of group `features`. They are explained in its files.

    Attributes:
        name: kind of the network's features.
        kinds: options of each kind that this stage makes.
        random_phase: whether stacks of frames begin at different frames of an utterance.
    """

    name: str
    kinds: Mapping[str, Any]
    random_phase: bool = False


@dataclass(frozen=True)
class KindOptions:
    """The options of one kind: those of `extract_features`."""

    num_bins: int
    num_ceps: int | None = None
    low_freq: float = 20.0
    high_freq: float = 0.0
    resample: bool = False


def targets(cfg: DictConfig) -> list[Target]:
    """Returns a target per kind of features."""
    data_dir = corpus_dir(cfg) / "data"
    made = []
    for kind, options in values(cfg.features.kinds).items():
        out = corpus_dir(cfg) / "features" / kind
        options = {"sampling_rate": cfg.corpus.sampling_rate, "sets": list(cfg.corpus.sets)} | options
        build = partial(extract, data_dir, kind, options, cfg.nj, bool(cfg.corpus.prepare.get("allow_pipes")))
        size = partial(archive_bytes, data_dir, options)
        made.append(Target(out, [data_dir], options, build, num_bytes=size, checked_in_parts=("*.ark",)))
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


def archive_bytes(data_dir: Path, options: Mapping[str, Any]) -> float:
    """Returns the size of the archives in bytes: float32, 100 frames per second.

    Args:
        data_dir: output of stage data.
        options: options of `extract_features`.
    """
    from asr_am.data.manifests import read_supervisions

    segments = (segment for subset in options["sets"] for segment in read_supervisions(data_dir, subset))
    return 4 * 100 * sum(segment.duration for segment in segments) * (options.get("num_ceps") or options["num_bins"])


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    from asr_am.features.extract import KINDS
    from asr_am.features.fusion import streams_of
    from asr_am.features.spectral import SpectralOptions

    options = build(FeatureOptions, values(cfg.features), "features")
    for kind, given in options.kinds.items():
        if kind not in KINDS:
            raise InputError(f"features.kinds.{kind}: there is no such kind{choices(kind, KINDS)}")
        made = build(KindOptions, given, f"features.kinds.{kind}")
        SpectralOptions(cfg.corpus.sampling_rate, made.num_bins, made.num_ceps, made.low_freq, made.high_freq)
    known = [*options.kinds, "lda", "fmllr", "ivector"]
    for stream in streams_of(options.name):
        if base_of(stream) not in known:
            raise InputError(f"features.name={options.name}: there is no kind {stream}{choices(stream, known)}")


main = stage("features", targets)

if __name__ == "__main__":
    main()
