"""Sequence training: the second training of a network, with the MMI loss, as a run with -mmi in its name.

It starts with the weights of `run`, and has everything but the options of section `mmi` from it: model, strategy,
learners, launcher, optimizer.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.features.fusion import stack_of
from asr_am.options import build
from asr_am.stages.layout import has_phone_states, run_dir
from asr_am.stages.sections import MmiSection, values
from asr_am.train.schedule import for_batch, make_schedule

MMI = "mmi"  # section, and part of the run's name


def mmi_section(cfg: DictConfig) -> MmiSection:
    """Returns the options of the section. Raises InputError if one is unknown, of another type or out of range."""
    return build(MmiSection, values(cfg.mmi), MMI)


def mmi_run(cfg: DictConfig) -> str:
    """Returns the name of the run: with -mmi at the end, or before the seed that ends the name."""
    seed = f"-s{cfg.seed}"
    return f"{cfg.run.removesuffix(seed)}-{MMI}{seed if cfg.run.endswith(seed) else ''}"


def mmi_config(cfg: DictConfig) -> DictConfig:
    """Returns the configuration of the run.

    Args:
        cfg: configuration of the run that it starts from.

    Raises:
        InputError: an option is unknown or out of range, the learners cannot divide the batch, or the features join
            frames.
    """
    section = mmi_section(cfg)
    if section.batch_size % cfg.learners:
        raise InputError(
            f"mmi.batch_size={section.batch_size}: learners={cfg.learners} cannot divide it; choose a multiple"
        )
    if has_phone_states(cfg):
        name = "ctc" if cfg.train.get("ctc") else "chain"
        raise InputError(f"mmi.train=true: train.{name} is sequence training already; set mmi.train=false")
    if stack_of(cfg.features.name) > 1:
        raise InputError(
            f"mmi.train=true: the denominator graph has a state for each frame, but {cfg.features.name} joins frames; "
            "use other features, or mmi.train=false"
        )
    first = make_schedule(**for_batch(values(cfg.schedule), cfg.train.batch_size, cfg.train.optimizer.kind)).base
    train = {
        "epochs": section.epochs,
        "chunk": section.chunk,
        "batch_size": section.batch_size,
        "label_smoothing": 0.0,
        "init": str(run_dir(cfg) / "best.pt"),
        "mmi": {"acoustic_scale": section.acoustic_scale, "ce_weight": section.ce_weight},
    }
    current = cfg.copy()
    OmegaConf.update(current, "run", mmi_run(cfg))
    OmegaConf.update(current, "train", values(cfg.train) | train, merge=False)
    schedule = {"base": first * section.rate, "anneal_from": 2, "anneal": section.anneal}
    OmegaConf.update(current, "schedule", schedule, merge=False)
    return current
