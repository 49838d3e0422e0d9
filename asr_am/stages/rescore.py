"""Stage 8, rescore: decoding runs rescored with a mixture of their n-gram LM and a recurrent LM.

The recurrent LM is in exp/<corpus>/lm/<name>, the words in exp/<corpus>/rescore/<run>_<lm>+<name>. Does nothing unless
rescore=true.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.options import build
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.systems import language_models, lm_scale_grid, plans, scales_to_try
from asr_am.stages.target import KEY, Target, git_commit

log = logging.getLogger(__name__)


def targets(cfg: DictConfig) -> list[Target]:
    """Returns the recurrent LM, and a target per system and n-gram LM."""
    if not cfg.rescore:
        log.info("rescoring is off: rescore=true trains lm=%s and rescores with it", cfg.lm.name)
        return []
    made = [lm_target(cfg)]
    for system in plans(cfg):
        made += [rescore_target(cfg, f"{system.name}_{lm}", lm) for lm in language_models(cfg)]
    return made


def mixture_name(cfg: DictConfig, lm: str) -> str:
    """Returns the name of the mixture of an n-gram LM and the recurrent LM."""
    return f"{lm}+{cfg.lm.name}"


def lm_target(cfg: DictConfig) -> Target:
    """Returns the recurrent LM, trained on a text of the corpus or on any text file."""
    root = corpus_dir(cfg)
    if cfg.lm.name in cfg.corpus.lms:
        raise InputError(f"lm.name={cfg.lm.name}: is the name of an n-gram LM of this corpus; choose another name")
    text = find_text(root / "data/lm", cfg.lm.text)
    inputs = [root / "data", root / "lang", text]
    config = {key: value for key, value in values(cfg.lm).items() if key not in ("rescore", "lattice", "nbest")}
    return Target(root / "lm" / cfg.lm.name, inputs, config, partial(train, root, config, text))


def find_text(folder: Path, text: str) -> Path:
    """Returns the path of a text of the corpus, given by its name, or of any text file."""
    candidates = folder / f"{text}.txt", Path(text).expanduser()
    if not folder.exists():
        return candidates[0]  # the target will name the stage that has not run
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise InputError(
        f"lm.text={text}: no such text, neither {candidates[0]} nor {candidates[1]}; give a text file, or the name of "
        "a text that stage 0 (data) leaves there"
    )


def rescore_target(cfg: DictConfig, run: str, lm: str) -> Target:
    """Returns the rescoring of dev and test of one decoding run."""
    root = corpus_dir(cfg)
    decoded, out = root / "decode" / run, root / "rescore" / f"{run}+{cfg.lm.name}"
    arpa, recurrent = root / "lm" / lm, root / "lm" / cfg.lm.name
    method = cfg.lm.rescore
    options = {"rescore": method, method: values(cfg.lm)[method], "grid": lm_scale_grid(cfg)}
    rescored = partial(rescore, root, decoded, arpa, recurrent, options, cfg.nj)
    return Target(out, [root / "data", decoded, arpa, recurrent], options, rescored)


def train(root: Path, config: dict, text: Path, out: Path) -> None:
    """Trains the recurrent LM in `out`, or continues there."""
    from asr_am.lang.lang_dir import read_symbols, vocabulary
    from asr_am.lang.transcripts import read_transcripts
    from asr_am.train.lm import HeldOutText, LmOptions, finish, prepare

    words = vocabulary(read_symbols(root / "lang/words.txt"))
    dev, test = (
        HeldOutText([sentence for _, sentence in read_transcripts(root / "data", subset)], words)
        for subset in ("dev", "test")
    )
    options = LmOptions.build(config["model"], config["train"])
    run = prepare(out, options, text, words, dev, kind=config["units"], pieces=config["pieces"])
    run.train()
    provenance = {"commit": git_commit(), "config_hash": (out / KEY).read_text()}
    finish(run, config["name"], text, test, provenance)


def rescore(root: Path, decoded: Path, arpa: Path, recurrent: Path, options: dict, jobs: int, out: Path) -> None:
    """Chooses the weights of the mixture on dev, and writes the words of dev and test under it."""
    from asr_am.decode.lattice_rescore import LatticeOptions
    from asr_am.decode.lm_rescore import rescore as rescore_run

    how = LatticeOptions(**options["lattice"]) if options["rescore"] == "lattice" else options["nbest"]
    rescore_run(
        decoded, root / "data", arpa / "lm.arpa", recurrent / "best.pt", out, grid=scales_to_try(arpa, options["grid"]),
        how=how, jobs=jobs,
    )  # fmt: skip


@dataclass(frozen=True)
class LmSection:
    """The options of group `lm`. They are explained in its files."""

    name: str
    text: str
    units: Literal["word", "sentencepiece"]
    pieces: int
    rescore: Literal["lattice", "nbest"]
    lattice: Mapping[str, Any]
    nbest: int
    model: Mapping[str, Any]
    train: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        for name in ("pieces", "nbest"):
            if getattr(self, name) < 1:
                raise InputError(f"lm.{name}={getattr(self, name)}: must be at least 1")


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    from asr_am.decode.lattice_rescore import LatticeOptions
    from asr_am.train.lm import LmOptions

    section = build(LmSection, values(cfg.lm), "lm")
    build(LatticeOptions, section.lattice, "lm.lattice")
    LmOptions.build(section.model, section.train)


main = stage("rescore", targets)

if __name__ == "__main__":
    main()
