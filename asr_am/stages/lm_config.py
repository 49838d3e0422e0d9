"""The configuration of a recurrent language model's training, for stage `rescore` and the processes that it starts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.options import build
from asr_am.stages.layout import Layout, layout
from asr_am.stages.sections import LmSection, values
from asr_am.stages.train_config import TrainConfig

if TYPE_CHECKING:
    from asr_am.train.lm import HeldOutText, LmOptions
    from asr_am.train.train_options import TrainOptions
    from asr_am.train.trainable import ForkedRun


def lm_config(cfg: DictConfig, out: Path) -> TrainConfig:
    """Parses the configuration of a language model's training. Raises InputError for an option that is wrong.

    Injected faults are left out: they name learners of the acoustic model.
    """
    from asr_am.distributed.cluster_config import Faults
    from asr_am.train.lm import LmOptions

    section = build(LmSection, values(cfg.lm), "lm")
    options = LmOptions.build(section.model, {"device": cfg.train.device, **section.train})
    open_run = partial(_open_run, layout(cfg), section, options)
    config = TrainConfig.parse_for(cfg, out, options.train_options(), open_run, cfg.lm, {"model": section.name}, "lm.")
    return replace(config, cluster=replace(config.cluster, faults=Faults()))


def _open_run(
    paths: Layout, section: LmSection, options: LmOptions, config: TrainConfig, _: TrainOptions
) -> ForkedRun:  # fmt: skip
    from asr_am.train.lm import LmRun
    from asr_am.train.lm_text import read_text

    words = _vocabulary(paths)
    text = find_text(paths.texts, section.text)
    units, rows = read_text(text, words, options.longest, kind=section.units, pieces=section.pieces)
    return LmRun(
        config.out, options, units, rows, held_out(paths, "dev"), config.strategy, learners=config.learners,
        tracker=config.make_tracker(), provenance=config.provenance, share_gpus=config.launch_options.share_gpus,
    )  # fmt: skip


def find_text(folder: Path, text: str) -> Path:
    """Returns the path of a text of the corpus, given by its name, or of any text file."""
    candidates = folder / f"{text}.txt", Path(text).expanduser()
    if not folder.exists() and "/" not in text:
        return candidates[0]  # the target will name the stage that has not run
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise InputError(
        f"lm.text={text}: no such text, neither {candidates[0]} nor {candidates[1]}; give a text file, or the name of "
        "a text that stage 0 (data) leaves there"
    )


def held_out(paths: Layout, subset: str) -> HeldOutText:
    """Returns the transcripts of dev or test."""
    from asr_am.lang.transcripts import read_transcripts
    from asr_am.train.lm import HeldOutText

    return HeldOutText([sentence for _, sentence in read_transcripts(paths.data, subset)], _vocabulary(paths))


def _vocabulary(paths: Layout) -> list[str]:
    from asr_am.lang.lang_dir import read_symbols, vocabulary

    return vocabulary(read_symbols(paths.lang() / "words.txt"))
