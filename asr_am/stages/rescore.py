"""Stage 8, rescore: decoding runs rescored with a mixture of their n-gram LM and a recurrent LM.

The recurrent LM is in exp/<corpus>/lm/<name>, the words in exp/<corpus>/rescore/<run>_<lm>+<name>. Does nothing unless
rescore=true.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.options import build
from asr_am.stages.app import stage
from asr_am.stages.layout import Layout, layout
from asr_am.stages.lm_config import find_text, held_out, lm_config
from asr_am.stages.sections import values
from asr_am.stages.systems import language_models, lm_scale_grid, plans, scales_to_try
from asr_am.stages.target import Target
from asr_am.stages.train import check_strategy, start
from asr_am.train.identity import deciding, launcher_identity

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
    paths = layout(cfg)
    if cfg.lm.name in cfg.corpus.lms:
        raise InputError(f"lm.name={cfg.lm.name}: is the name of an n-gram LM of this corpus; choose another name")
    text = find_text(paths.texts, cfg.lm.text)
    inputs = [paths.data, paths.lang(), text]
    return Target(
        paths.lm(cfg.lm.name), inputs, lm_key(cfg), partial(train, cfg, text), version=2,
        exclude=("wandb", "tensorboard", "checkpoints"),
    )  # fmt: skip


def lm_key(cfg: DictConfig) -> dict[str, Any]:
    """Returns the values that a trained LM depends on."""
    lm = values(cfg.lm)
    train = deciding(lm["train"])
    key = {name: lm[name] for name in ("name", "text", "units", "pieces", "model")}
    key |= {"train": train, "strategy": lm["strategy"]}
    if cfg.lm.learners == 1:
        return key
    key |= launcher_identity(values(cfg.lm.launcher), cfg.lm.learners) | {"faults": values(cfg.cluster.faults)}
    if cfg.lm.launcher.name == "virtual":
        key |= {"cluster": values(cfg.cluster), "workload": values(cfg.workload)}
    return key


def rescore_target(cfg: DictConfig, run: str, lm: str) -> Target:
    """Returns the rescoring of dev and test of one decoding run."""
    paths = layout(cfg)
    decoded, out = paths.decoded(run), paths.rescored(run, cfg.lm.name)
    arpa, recurrent = paths.lm(lm), paths.lm(cfg.lm.name)
    options = {"lattice": values(cfg.lm.lattice), "grid": lm_scale_grid(cfg)}
    rescored = partial(rescore, paths, decoded, arpa, recurrent, options, cfg.nj, cfg.train.device)
    return Target(out, [paths.data, decoded, arpa, recurrent], options, rescored, version=3)


def train(cfg: DictConfig, text: Path, out: Path) -> None:
    """Trains the recurrent LM in `out`, or continues there."""
    from asr_am.train.lm import finish

    config = lm_config(cfg, out)
    check_strategy(config)
    OmegaConf.save(cfg, out / "config.yaml", resolve=True)  # the worker processes read it
    start(config)
    finish(out, cfg.lm.name, text, *(held_out(layout(cfg), subset) for subset in ("dev", "test")))


def rescore(
    paths: Layout, decoded: Path, arpa: Path, recurrent: Path, options: dict, jobs: int, device: str, out: Path
) -> None:
    """Chooses the mixture and the LM scale on dev, and writes the words of dev and test."""
    from asr_am.decode.lattice_rescore import LatticeOptions
    from asr_am.decode.lm_rescore import rescore as rescore_run

    how = LatticeOptions(**options["lattice"])
    grid, unseen = scales_to_try(arpa, options["grid"]), paths.unseen_lm(arpa.name)
    rescore_run(
        decoded, paths.data, arpa / "lm.arpa", recurrent / "best.pt", out, grid=grid, how=how, jobs=jobs,
        device=device, dev_arpa=unseen / "lm.arpa" if unseen else None,
    )  # fmt: skip


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    from asr_am.decode.lattice_rescore import LatticeOptions

    check_strategy(lm_config(cfg, layout(cfg).lm(cfg.lm.name)))
    build(LatticeOptions, values(cfg.lm)["lattice"], "lm.lattice")
    if cfg.rescore and "/" in str(cfg.lm.text):  # a name may be that of a text that stage 0 is to make
        find_text(layout(cfg).texts, cfg.lm.text)


main = stage("rescore", targets)

if __name__ == "__main__":
    main()
