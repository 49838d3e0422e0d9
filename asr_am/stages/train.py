"""Stage 6, train: a network on the examples, under the configured strategy, in exp/<corpus>/train/<run>.

The run is written in place, so that metrics.jsonl can be followed; a killed run goes on from its last checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.egs import egs_dir
from asr_am.stages.unit import Unit, git_commit

SPEED_ONLY = ("device", "threads", "workers", "report_every", "checkpoint_every")  # change how fast, not what


def units(cfg: DictConfig) -> list[Unit]:
    """One training run."""
    groups = {name: values(cfg[name]) for name in ("train", "model", "schedule", "strategy")}
    config: dict = {**groups, "seed": cfg.seed}
    config["train"] = {name: value for name, value in groups["train"].items() if name not in SPEED_ONLY}
    out = corpus_dir(cfg) / "train" / cfg.run
    return [Unit(out, [egs_dir(cfg)], config, partial(train_run, cfg, groups), in_place=True, apart=("wandb",))]


def train_run(cfg: DictConfig, groups: dict, out: Path) -> None:
    """Train, or go on training, into `out`."""
    from hydra.utils import instantiate

    from asr_am.train.loop import train
    from asr_am.train.options import TrainOptions

    model = {name: value for name, value in groups["model"].items() if name != "name"}
    options = TrainOptions.build(groups["train"], model, groups["schedule"], cfg.seed)
    strategy = instantiate({name: value for name, value in groups["strategy"].items() if name != "name"})
    OmegaConf.save(cfg, out / "config.yaml", resolve=True)
    tracker = instantiate(cfg.logger)
    train(
        egs_dir(cfg),
        out,
        options,
        strategy=strategy,
        tracker=tracker,
        commit=git_commit(),
        config_hash=config_hash(out),
    )


def config_hash(out: Path) -> str:
    """The digest that the run's directory is marked with."""
    return (out / ".key").read_text()


main = stage("train", units)

if __name__ == "__main__":
    main()
