"""Stage 2, features: MFCC for the GMMs and log-mel energies for the networks, in exp/<corpus>/features/<kind>."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.features.fusion import IVECTOR, base_of, stack_of
from asr_am.options import build, choices
from asr_am.stages.app import stage
from asr_am.stages.layout import layout
from asr_am.stages.sections import FeatureOptions, values
from asr_am.stages.target import Target

if TYPE_CHECKING:
    from asr_am.features.kinds import FeatureKind

ADAPTED = {"lda": "lda_mllt", "fmllr": "sat"}  # sections of align that these features need


def targets(cfg: DictConfig) -> list[Target]:
    """Returns a target per kind of features."""
    data_dir = layout(cfg).data
    made = []
    for kind, options in values(cfg.features.kinds).items():
        out = layout(cfg).features / kind
        options = {"sampling_rate": cfg.corpus.sampling_rate, "sets": list(cfg.corpus.sets)} | options
        build = partial(extract, data_dir, kind, options, cfg.nj, bool(cfg.corpus.prepare.get("allow_pipes")))
        size = partial(archive_bytes, data_dir, kind, options)
        made.append(Target(out, [data_dir], options, build, version=2, num_bytes=size, checked_in_parts=("*.ark",)))
    return made


def extract(data_dir: Path, kind: str, options: dict, jobs: int, allow_pipes: bool, out: Path) -> None:
    """Writes the features of every utterance and the CMVN statistics of every speaker."""
    from asr_am.features.extract import extract_features

    made, sets = made_kind(kind, options), options["sets"]
    extract_features(data_dir, out, kind, made, sets=sets, jobs=jobs, allow_commands=allow_pipes)


def made_kind(name: str, options: Mapping[str, Any]) -> FeatureKind:
    """Returns the options of a kind. Raises InputError if one is unknown, of another type or out of range."""
    from asr_am.features.kinds import feature_kind

    where = f"features.kinds.{name}"
    if name in (*ADAPTED, IVECTOR) or "+" in name or stack_of(name) > 1:
        raise InputError(f"{where}: is the name of features that are made of others; choose another name")
    made = feature_kind(where, **{key: value for key, value in options.items() if key != "sets"})
    if name == "mfcc" and getattr(made, "num_ceps", made) is None:
        raise InputError(f"{where}.num_ceps: is missing; GMMs and i-vectors take cepstra")
    return made


def archive_bytes(data_dir: Path, kind: str, options: Mapping[str, Any]) -> float:
    """Returns the size of the archives in bytes: float32, 100 frames per second."""
    from asr_am.data.manifests import read_supervisions

    segments = (segment for subset in options["sets"] for segment in read_supervisions(data_dir, subset))
    return 4 * 100 * sum(segment.duration for segment in segments) * made_kind(kind, options).dim


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    from asr_am.features.fusion import streams_of

    options = build(FeatureOptions, values(cfg.features), "features")
    for kind, given in options.kinds.items():
        made_kind(kind, {"sampling_rate": cfg.corpus.sampling_rate, **given})
    known = [*options.kinds, *ADAPTED, IVECTOR]
    for stream in streams_of(options.name):
        if base_of(stream) not in known:
            raise InputError(f"features.name={options.name}: there is no kind {stream}{choices(stream, known)}")
        section = ADAPTED.get(base_of(stream))
        if section and section not in cfg.align:
            raise InputError(
                f"features.name={options.name}: {stream} is made with align.{section}, which these options of align do "
                "not have; set align=sat, or features=logmel"
            )


main = stage("features", targets)

if __name__ == "__main__":
    main()
