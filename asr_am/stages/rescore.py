"""Stage 8, rescore: a recurrent LM in exp/<corpus>/lm/<name>; in exp/<corpus>/rescore/<run>_<lm>+<name> the words that
decoding runs have under its mixture with their n-gram LM. Does nothing unless rescore=true.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.systems import grid_of, language_models, plans, weightings
from asr_am.stages.target import KEY, Target, git_commit

log = logging.getLogger(__name__)


def units(cfg: DictConfig) -> list[Target]:
    """The LM's training, and one unit per system and n-gram LM."""
    if not cfg.rescore:
        log.info("rescoring is off; rescore=true trains lm=%s and rescores with it", cfg.lm.name)
        return []
    made = [lm_unit(cfg)]
    for system in plans(cfg):
        made += [rescore_unit(cfg, f"{system.name}_{lm}", lm) for lm in language_models(cfg)]
    return made


def mixture_name(cfg: DictConfig, lm: str) -> str:
    """What tables call the mixture of an n-gram LM and the recurrent one."""
    return f"{lm}+{cfg.lm.name}"


def lm_unit(cfg: DictConfig) -> Target:
    """The recurrent LM, trained on a text of the corpus or on any text file."""
    root = corpus_dir(cfg)
    if cfg.lm.name in cfg.corpus.lms:
        raise InputError(f"lm.name={cfg.lm.name}: is the name of an n-gram LM of this corpus; choose another")
    text = find_text(root / "data/lm", cfg.lm.text)
    inputs = [root / "data", root / "lang", text]
    config = {key: value for key, value in values(cfg.lm).items() if key != "nbest"}
    return Target(root / "lm" / cfg.lm.name, inputs, config, partial(train, root, config, text))


def find_text(folder: Path, text: str) -> Path:
    """A text of the corpus by its name, or any text file by its path."""
    candidates = folder / f"{text}.txt", Path(text).expanduser()
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise InputError(
        f"lm.text={text}: no such text, neither {candidates[0]} nor {candidates[1]}; give a text file, or the name of "
        "a text that stage 0 (data) leaves there"
    )


def rescore_unit(cfg: DictConfig, run: str, lm: str) -> Target:
    """Dev and test of one decoding run."""
    root = corpus_dir(cfg)
    decoded, out = root / "decode" / run, root / "rescore" / f"{run}+{cfg.lm.name}"
    arpa, recurrent = root / "lm" / lm, root / "lm" / cfg.lm.name
    options = {"nbest": cfg.lm.nbest, "grid": grid_of(cfg)}
    work = partial(rescore, root, decoded, arpa, recurrent, options, cfg.nj)
    return Target(out, [root / "data", decoded, arpa, recurrent], options, work)


def train(root: Path, config: dict, text: Path, out: Path) -> None:
    """Train the recurrent LM, or go on training it, into `out`."""
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
    """Choose the mixture on dev, and write what it makes of both sets."""
    from asr_am.decode.lm_rescore import rescore as rescore_run

    rescore_run(
        decoded, root / "data", arpa / "lm.arpa", recurrent / "best.pt", out, grid=weightings(options["grid"]),
        count=options["nbest"], jobs=jobs,
    )  # fmt: skip


main = stage("rescore", units)

if __name__ == "__main__":
    main()
