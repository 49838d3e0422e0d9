"""Stage 0, data: the corpus as lhotse manifests, NIST references, lexicon and LM text in exp/<corpus>/data.

`corpus.prepare` names the function that prepares the corpus, in local/<corpus>/prepare.py or an installed package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.extensions import find_function
from asr_am.stages.app import stage
from asr_am.stages.layout import STAMP, layout
from asr_am.stages.recipe_files import make_local_importable
from asr_am.stages.sections import values
from asr_am.stages.target import Target

log = logging.getLogger(__name__)


def targets(cfg: DictConfig) -> list[Target]:
    """Returns exp/<corpus>/data."""
    if cfg.data_dir and "data_dir" not in cfg.corpus.prepare:
        raise InputError(f"data_dir={cfg.data_dir}: corpus {cfg.corpus.name} takes none; leave it out")
    out = layout(cfg).data
    speeds = copy_speeds(cfg)
    options = values(cfg.corpus.prepare)
    below = cfg.speed_perturb_below
    build = partial(prepare, dict(options), speeds, below, cfg.nj, list(cfg.corpus.sets), asked=cfg.speed_perturb)
    if "stamp" in cfg.corpus:
        options[STAMP] = corpus_function(cfg.corpus.stamp, "corpus.stamp")(**options)
    options |= {"speed_perturb": speeds} if speeds != [] else {}
    options |= {"speed_perturb_below": below} if speeds and below < inf else {}
    inputs = [Path(cfg.data_dir)] if cfg.data_dir else []
    inputs += [Path(path) for path in cfg.corpus.get("inputs", []) if path]  # the user's own files
    for path in inputs:
        if not path.exists():
            raise InputError(f"{path}: no such file or directory; corpus {cfg.corpus.name} is made from it")
        if out.resolve().is_relative_to(path.resolve()):
            raise InputError(
                f"exp={cfg.exp}: lies in {path}, of which the corpus is made, so each output would be part of it; give "
                "exp=DIR elsewhere"
            )
    return [Target(out, inputs, options, build)]


def copy_speeds(cfg: DictConfig) -> list[float]:
    """Returns the speeds of copies of the training speech: none with alignments by Kaldi, which lack them."""
    if cfg.align.system == "kaldi":
        return []
    return list(cfg.speed_perturb) if OmegaConf.is_list(cfg.speed_perturb) else cfg.speed_perturb


def prepare(
    target: dict, speeds: list[float], below: float, jobs: int, sets: list[str], out: Path, asked: object = ()
) -> None:
    """Runs the corpus' preparation, adds copies at other speeds, and validates the data.

    There are no copies from `below` hours of training speech on, nor of what Kaldi has aligned, whatever was `asked`.
    """
    from asr_am.data.manifests import read_supervisions
    from asr_am.data.speed import check_speeds, perturb_speed
    from asr_am.data.validate import validate_data_dir

    check_speeds(speeds)
    if asked and not speeds:
        log.info("speed_perturb=%s: left out, as align=kaldi has no alignments of copies", asked)
    options = {name: value for name, value in target.items() if name != "_target_"}
    corpus_function(target["_target_"], "corpus.prepare._target_")(out=out, jobs=jobs, **options)
    allow_commands = options.get("allow_pipes", False)
    if speeds:
        hours = sum(segment.duration for segment in read_supervisions(out, "train")) / 3600
        if hours < below:
            perturb_speed(out, "train", speeds, allow_commands=allow_commands)
        else:
            log.info("%.1f hours of training speech: no copies at other speeds (speed_perturb_below=%g)", hours, below)
    validate_data_dir(out, sets, jobs=jobs, allow_commands=allow_commands)


def corpus_function(target: str, option: str) -> Callable[..., Any]:
    """Returns a function of a corpus in `local`, or of an installed package. Raises InputError for any other."""
    make_local_importable()
    return find_function(target, option, "local", "asr_am.corpora")


main = stage("data", targets)

if __name__ == "__main__":
    main()
