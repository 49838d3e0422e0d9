"""The configurations of all networks that stage train makes: that of `run`, and those of sections `mmi`, `second` and
`final`.

Sequence training goes on from the weights of `run` with the MMI loss, as a run with -mmi in its name. The second
network is another model on the same examples, and its name is in that of its run. Both have everything but the options
of their sections from `run`, such as strategy, learners and launcher. Networks of cross-entropy that decoding may end
with are trained on, with dev among the examples, as runs with -final in their names.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.features.fusion import stack_of
from asr_am.options import build, check_name
from asr_am.stages.layout import COMBINED, has_phone_states, run_dir
from asr_am.stages.sections import FinalSection, MmiSection, SecondSection, Suits, values
from asr_am.train.schedule import DEFAULT, for_batch, make_schedule

MMI, FINAL = "mmi", "final"  # sections, and parts of runs' names


def network_configs(cfg: DictConfig) -> dict[str, DictConfig]:
    """Returns the configuration of each network, in the order of training, by a name for what is trained.

    Raises InputError for a wrong option.
    """
    found = {"train": cfg}
    if cfg.mmi.train:
        found["train mmi"] = mmi_config(cfg)
    last = [] if cfg.mmi.train else ["train"]
    if cfg.second.train:
        found["train second"] = second_config(cfg)
        last.append("train second")
    if cfg.final.train:
        found |= {f"{name} final": final_config(found[name]) for name in last}
    return found


def mmi_section(cfg: DictConfig) -> MmiSection:
    """Returns the options of the section. Raises InputError if one is unknown, of another type or out of range."""
    return build(MmiSection, values(cfg.mmi), MMI)


def derived_run(cfg: DictConfig, what: str, run: str | None = None) -> str:
    """Returns the name `run`, by default that of the configuration, with -`what` at its end or before its seed."""
    run, seed = run or cfg.run, f"-s{cfg.seed}"
    return f"{run.removesuffix(seed)}-{what}{seed if run.endswith(seed) else ''}"


def mmi_run(cfg: DictConfig) -> str:
    """Returns the name of the run of sequence training."""
    return derived_run(cfg, MMI)


def second_run(cfg: DictConfig) -> str:
    """Returns the name of the run of the second network. Raises InputError if it is that of another one."""
    name = check_name("second.model.name", str(cfg.second.model.name))
    if name in (MMI, FINAL, COMBINED):
        raise InputError(f"second.model.name={name}: ends the names of other runs; give the model another name")
    return derived_run(cfg, name)


def mmi_config(cfg: DictConfig) -> DictConfig:
    """Returns the configuration of the run.

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


def final_section(cfg: DictConfig) -> FinalSection:
    """Returns the options of the section. Raises InputError if one is unknown, of another type or out of range."""
    return build(FinalSection, values(cfg.final), FINAL)


def final_run(cfg: DictConfig, run: str) -> str:
    """Returns the name of the run that trains the network of another one on."""
    return derived_run(cfg, FINAL, run)


def final_config(cfg: DictConfig) -> DictConfig:
    """Returns the configuration of the run that trains a network on. Raises InputError as `final_section`.

    Args:
        cfg: that of the network.
    """
    section = final_section(cfg)
    schedule = for_batch(values(cfg.schedule), cfg.train.batch_size, cfg.train.optimizer.kind)
    train = {"epochs": section.epochs, "init": str(run_dir(cfg) / "best.pt"), "with_dev": True}
    current = cfg.copy()
    OmegaConf.update(current, "run", final_run(cfg, cfg.run))
    OmegaConf.update(current, "train", values(cfg.train) | train, merge=False)
    base = make_schedule(**schedule).base * section.rate
    further = {"base": base, "anneal_from": section.anneal_from, "anneal": section.anneal}
    OmegaConf.update(current, "schedule", further, merge=False)
    return current


def second_section(cfg: DictConfig) -> SecondSection:
    """Returns the options of the section. Raises InputError if one is unknown, of another type or out of range."""
    return build(SecondSection, values(cfg.second), "second")


def second_suits(cfg: DictConfig) -> Suits:
    """Returns what suits the second network. Raises InputError as `second_section`."""
    return build(Suits, second_section(cfg).suits, "second.suits")


def second_config(cfg: DictConfig) -> DictConfig:
    """Returns the configuration of the second network. Its batch is the next one that the learners can divide.

    Raises:
        InputError: an option is unknown or out of range, or what is averaged would not fit the network of `run`.
    """
    section, suits = second_section(cfg), second_suits(cfg)
    if has_phone_states(cfg):
        raise InputError(
            "second.train=true: only networks trained with cross-entropy can be averaged; set second.train=false"
        )
    if stack_of(cfg.features.name) > 1:
        raise InputError(
            f"second.train=true: {cfg.features.name} joins frames already; use other features, or second.train=false"
        )
    batch = -(-suits.batch // cfg.learners) * cfg.learners
    train = {
        "epochs": section.epochs,
        "chunk": suits.chunk,
        "batch_size": batch,
        "optimizer": section.optimizer,
    }
    current = cfg.copy()
    OmegaConf.update(current, "run", second_run(cfg))
    OmegaConf.update(current, "model", section.model, merge=False)
    OmegaConf.update(current, "train", values(cfg.train) | train, merge=False)
    schedule = {
        "_target_": DEFAULT,
        "reference": {"base": suits.rate, "batch": suits.batch, "optimizer": "adam"},
        "anneal_from": section.anneal_from, "anneal": section.anneal, "warmup_batches": section.warmup_batches,
    }  # fmt: skip
    OmegaConf.update(current, "schedule", schedule, merge=False)
    return current
