"""Checks every option of a configuration, also those of other stages and of outputs that are up to date.

A stage checks its options when it makes something. That leaves out a misspelt `+key`, options that change no result,
and options of stages that do not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.options import build, choices, nearest
from asr_am.stages.layout import layout
from asr_am.stages.overrides import jobs_of, other_keys, values_of_outputs
from asr_am.stages.recipe_files import CONF
from asr_am.stages.sections import RecipeOptions, Suits, check, job_options, values
from asr_am.stages.train_config import with_schedule

GROUPS = ("align", "cluster", "corpus", "features", "ivectors", "jobs", "launcher", "lm", "logger", "model", "schedule",
          "strategy", "train", "workload")  # fmt: skip
SECTIONS = (*GROUPS, "chain", "decode", "egs", "final", "mmi", "score", "second", "speaker")
TABLE = "table"  # of a paper, which only asr_am.papers.table reads
CHECKED = ("corpus", "exp", "nj", "seed")  # overrides that need no further check
SHARED_STAGES = ("data", "lang", "features", "align", "speaker", "egs")  # whose outputs are not named by the run
STAGES_WITH_OPTIONS = ("lang", "features", "align", "speaker", "egs", "train", "decode", "rescore", "score")


def check_options(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Checks every option. Imports torch unless all of them are sure to be right.

    Raises:
        InputError: an option is unknown, missing, of another type, out of range or does not fit another one.
    """
    check(cfg)
    if not str(cfg.exp).strip():
        raise InputError("exp=: is empty; give the folder for all results (is a variable of the shell unset?)")
    if "experiment" in cfg:
        raise InputError(
            "experiment: a file of conf/experiment lacks its first line, `# @package _global_`, or is empty; begin it "
            "with this line"
        )
    check_names("", cfg, [*(field.name for field in fields(RecipeOptions)), *SECTIONS, TABLE, "suits"])
    for section in SECTIONS:
        if not OmegaConf.is_dict(cfg.get(section)):
            raise InputError(f"{section}={cfg.get(section)}: must be a section with options")
    check_names("corpus.", cfg.corpus, corpus_options())
    for where, suits in (("suits", cfg.suits), ("second.suits", cfg.second.suits)):
        check_names(f"{where}.", suits, [field.name for field in fields(Suits)])
        build(Suits, values(suits), where)
    job_options(cfg)
    given = {override.lstrip("+~").partition("=")[0] for override in overrides}
    if not given <= set(CHECKED) and not trained_with(cfg):
        for name in STAGES_WITH_OPTIONS:
            import_module(f"asr_am.stages.{name}").check_options(cfg)


def changed_output(cfg: DictConfig, stage: str, first: int) -> tuple[Path, str] | None:
    """Returns an output of a stage before `stage`, and the name of a value that is not that of this configuration.

    Args:
        cfg: the configuration.
        stage: name of a stage.
        first: number of the first stage to look at.
    """
    earlier = SHARED_STAGES[first : SHARED_STAGES.index(stage) if stage in SHARED_STAGES else None]
    found = values_of_outputs([import_module(f"asr_am.stages.{name}").targets for name in earlier], cfg)
    different = ((out, other_keys(out, config)) for configs in found for out, config in configs.items())
    return next(((out, names[0]) for out, names in different if names), None)


def check_jobs(overrides: Sequence[str]) -> None:
    """Raises InputError for a wrong option of any job of a command. Call it where configurations can be composed."""
    for job in jobs_of(overrides):
        check_options(compose_job(job), job)


def compose_job(overrides: list[str]) -> DictConfig:
    """Returns the configuration of a job, as Hydra gives it to a stage."""
    cfg = compose("config", overrides=overrides, return_hydra_config=True)
    plain = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])
    if HydraConfig.initialized():
        return plain
    HydraConfig.instance().set_config(cfg)  # for ${experiment_or:NAME}
    try:
        OmegaConf.resolve(plain)
    finally:
        HydraConfig.instance().cfg = None
    return plain


def check_names(prefix: str, node: DictConfig, known: Iterable[str]) -> None:
    """Raises InputError if a section has an option that is not among the known ones."""
    known = set(known)
    for name in map(str, node):
        if name not in known:
            near = nearest(name, known) or choices(name, sorted(known))
            raise InputError(f"{prefix}{name}: there is no such option{near}")


def corpus_options() -> set[str]:
    """Returns the names of the options of `corpus` in all files that set some."""
    paths = [*(CONF / "corpus").glob("*.yaml"), CONF / "sizes.yaml"]
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    return {str(name) for file in files for name in file.get("corpus", {})}


def trained_with(cfg: DictConfig) -> bool:
    """Returns True if the finished training run of this configuration was made with all of its values.

    The directory `exp` may have been copied or moved since.
    """
    run = layout(cfg).run(cfg.run)
    saved = run / "config.yaml"
    if not (run / ".done").exists() or not saved.exists():
        return False
    then, now = (re.sub(r"^exp: .*\n", "", text, flags=re.MULTILINE) for text in (saved.read_text(), resolved(cfg)))
    return then == now


def resolved(cfg: DictConfig) -> str:
    """Returns a configuration as YAML, as stage train saves it."""
    return OmegaConf.to_yaml(with_schedule(cfg), resolve=True)
