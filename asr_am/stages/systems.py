"""The systems that a recipe decodes and scores, and the LM weights and insertion penalties to choose from on dev."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, ListConfig

from asr_am.errors import InputError
from asr_am.lang.lang_dir import UNSEEN
from asr_am.options import check_name
from asr_am.stages.layout import COMBINED, GMM_FEATURES, SYSTEMS, layout, states_name
from asr_am.stages.networks import derived_run, final_run, mmi_run, second_run, second_suits

if TYPE_CHECKING:
    from asr_am.decode.lattice import LmScale


UNTUNED = (12.0, 0.0)  # LM weight and insertion penalty where dev cannot tell


def lm_scale_grid(cfg: DictConfig) -> list[list[float]]:
    """Returns [LM weights, insertion penalties]. Raises InputError if a list is empty or has a value out of range."""
    grid = []
    for name, above in (("lm_weights", 0.0), ("insertion_penalties", -math.inf)):
        given = cfg.decode[name]
        values = list(given) if isinstance(given, ListConfig) else []
        if not values or not all(isinstance(value, int | float) and above < value < math.inf for value in values):
            limit = " above 0" if above == 0 else ""
            raise InputError(f"decode.{name}={given}: must be a list of one or more numbers{limit}")
        grid.append(values)
    return grid


def lm_scales(grid: Sequence[Sequence[float]]) -> list[LmScale]:
    """Returns each LM weight with each penalty."""
    from asr_am.decode.lattice import LmScale

    lm_weights, penalties = grid
    return [LmScale(lm, penalty) for lm in lm_weights for penalty in penalties]


def scales_to_try(lm_dir: Path, grid: Sequence[Sequence[float]]) -> list[LmScale]:
    """Returns the LM scales to choose from on dev.

    On sentences that an LM knows, the best LM weight is far too large for others. If there is no LM to take its place
    on dev, the one scale is `UNTUNED`.
    """
    from asr_am.decode.lattice import LmScale
    from asr_am.lang.prepare import knows_dev

    if knows_dev(lm_dir) and not (lm_dir / UNSEEN).is_dir():
        return [LmScale(*UNTUNED)]
    return lm_scales(grid)


@dataclass(frozen=True)
class SystemPlan:
    """A system to decode.

    Attributes:
        name: its name in results, for a network that of its training run.
        gmm: GMM system or chain model (`states_name`) that the states are from.
        model: directory of the network's training run, None for the GMM.
        seed: seed of the network, None for the GMM.
        windows: windows to try on dev, None: those of section decode.
        start: name of the network that this one was trained from. It is decoded with instead if it makes fewer errors
            on dev.
        combined: names of networks whose scores are averaged.
        final: directory of the training run that has trained the network on, with dev among the examples. Its network
            decodes all sets but dev.
    """

    name: str
    gmm: str
    features: str
    model: Path | None
    seed: int | None
    windows: tuple[str, ...] | None = None
    start: str | None = None
    combined: tuple[str, ...] = ()
    final: Path | None = None


def plans(cfg: DictConfig) -> list[SystemPlan]:
    """Returns the systems that `systems` lists: GMMs by name, nnet for `network_plans`.

    The last one averages the networks of `combine`, if it lists any.
    """
    found: list[SystemPlan] = []
    for name in cfg.systems:
        if name == "nnet":
            found += network_plans(cfg)
        elif name not in GMM_FEATURES:
            raise InputError(f"systems: {name!r} is unknown; choose from {', '.join(SYSTEMS)}")
        elif name not in cfg.align:
            raise InputError(f"systems: {name} is not trained; use align=sat, or leave it out of systems")
        else:
            found.append(SystemPlan(name, name, GMM_FEATURES[name], None, None))
    if cfg.combine:
        runs = combined_runs(cfg)
        found.append(SystemPlan(COMBINED, states_name(cfg), cfg.features.name, None, None, combined=runs))
    return found


def combined_runs(cfg: DictConfig) -> tuple[str, ...]:
    """Returns the networks of `combine`. Raises InputError if they cannot be averaged."""
    runs = tuple(check_name("combine", str(run)) for run in cfg.combine)
    if COMBINED in runs:
        raise InputError(f"combine={list(runs)}: {COMBINED} is the system that they make; name its networks")
    if runs and len(set(runs)) < max(2, len(runs)):
        raise InputError(f"combine={list(runs)}: name two networks or more, each once")
    return runs


def network_plans(cfg: DictConfig) -> list[SystemPlan]:
    """Returns the networks that stage train makes. The last one is an average, if one of them is a second network."""
    paths = layout(cfg)
    first = SystemPlan(cfg.run, states_name(cfg), cfg.features.name, paths.run(cfg.run), cfg.seed)
    found = [first]
    if cfg.mmi.train:
        run, windows = mmi_run(cfg), tuple(cfg.mmi.windows)
        found.append(replace(first, name=run, model=paths.run(run), windows=windows, start=first.name))
    elif cfg.final.train:
        found = [replace(first, final=paths.run(final_run(cfg, cfg.run)))]
    if cfg.second.train:
        best, run, windows = found[-1].name, second_run(cfg), tuple(second_suits(cfg).windows)
        final = paths.run(final_run(cfg, run)) if cfg.final.train else None
        found.append(replace(first, name=run, model=paths.run(run), windows=windows, final=final))
        found.append(replace(first, name=derived_run(cfg, COMBINED), model=None, combined=(best, run), final=None))
    return found


def language_models(cfg: DictConfig) -> list[str]:
    """Returns the LMs to decode with: those of `lms`, which must be LMs of the corpus."""
    for name in cfg.lms:
        if name not in cfg.corpus.lms:
            raise InputError(
                f"lms: {name!r} is no LM of corpus {cfg.corpus.name}; choose from {', '.join(cfg.corpus.lms)}"
            )
    return list(cfg.lms)
