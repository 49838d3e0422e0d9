"""Stage 6, train: a network on the examples, under the configured strategy, in exp/<corpus>/train/<run>.

The run is written in place, so that metrics.jsonl can be followed; a killed run goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from asr_am.distributed.runtime.worker_process import end_process
from asr_am.errors import InputError
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.egs import egs_dir
from asr_am.stages.target import Target
from asr_am.stages.train_worker import num_dedicated_servers, run_arguments, run_worker, strategy_of, without_name

SPEED_ONLY = ("device", "threads", "workers", "report_every", "checkpoint_every")  # change how fast, not what
OPTIONAL_KEYS = ("init", "subset")  # count only where they are set
CHECKPOINT = "checkpoints/checkpoint-?????????"  # a run that has none is removed if it cannot start


def units(cfg: DictConfig) -> list[Target]:
    """One training run."""
    launcher = cfg.launcher.name
    if launcher == "alone" and cfg.learners + num_dedicated_servers(cfg) != 1:
        more = " and servers of their own" if num_dedicated_servers(cfg) else ""
        raise InputError(f"learners={cfg.learners}{more} need launcher=virtual, launcher=process or launcher=torchrun")
    groups = {name: values(cfg[name]) for name in ("train", "model", "schedule", "strategy")}
    config: dict = {**groups, "seed": cfg.seed}
    config["strategy"] |= {"_target_": key_target(cfg.strategy._target_)}
    config["train"] = {name: value for name, value in groups["train"].items() if name not in SPEED_ONLY + OPTIONAL_KEYS}
    if launcher != "alone":
        config |= {"launcher": launcher, "learners": cfg.learners}
        if launcher == "virtual" or cfg.workload.emulate:
            config |= {"cluster": values(cfg.cluster), "workload": values(cfg.workload)}
        else:
            config |= {"faults": values(cfg.cluster.faults)}
    config["train"] |= {"subset": cfg.train.subset} if cfg.train.subset != 1 else {}
    inputs = [egs_dir(cfg), *([Path(cfg.train.init)] if cfg.train.init else [])]
    out = corpus_dir(cfg) / "train" / cfg.run
    leads = int(os.environ.get("RANK", "0") if launcher == "torchrun" else cfg.launcher.get("node_rank", 0)) == 0
    return [
        Target(
            out, inputs, config, partial(train_run, cfg, leads), in_place=True, keep_if=CHECKPOINT,
            exclude=("wandb", "checkpoints"), is_leader=leads,
        )
    ]  # fmt: skip


def key_target(target: str) -> str:
    """A strategy's class as keys of training runs name it: the modules have moved since, the keys have not."""
    old = "asr_am.distributed.parallax.strategy." if target.endswith(".Parallax") else None
    return old + "Parallax" if old else target.replace(".distributed.strategies.", ".distributed.")


def check_run(cfg: DictConfig) -> None:
    """InputError for options that a learner would refuse, found before any learner starts.

    Builds the strategy once, for a model of two weights and a virtual team of the configured size.
    """
    from torch import nn

    from asr_am.distributed.cluster_config import Cluster, Workload
    from asr_am.distributed.flat_params import FlatParams
    from asr_am.distributed.optimizer import Optimizer
    from asr_am.distributed.simulator import SimCluster, SimTeam
    from asr_am.train.run_setup import check_batch, training_device
    from asr_am.train.train_options import TrainOptions

    options = TrainOptions.build(values(cfg.train), without_name(cfg.model), values(cfg.schedule), cfg.seed)
    check_batch(options, cfg.learners)
    training_device(options)
    size, strategy = cfg.learners + num_dedicated_servers(cfg), strategy_of(cfg)
    cluster, workload = Cluster.build(values(cfg.cluster)), Workload.build(values(cfg.workload))
    cluster.faults.check(size)
    if cfg.launcher.name != "virtual":  # only its faults count
        cluster, workload = (
            replace(cluster, hosts=1, devices_per_host=size),
            Workload("self", frames_per_second={cluster.device: 1.0}),
        )
    team = SimTeam(virtual := SimCluster(cluster, workload, size, cfg.seed, model_elements=2), virtual.members[0])
    params = FlatParams(nn.Linear(1, 1))
    strategy(params, Optimizer(params, options.optimizer), team).check(cluster.faults)


def train_run(cfg: DictConfig, leads: bool, out: Path) -> None:
    """Train, or go on training, into `out`, with as many processes as the launcher says."""
    if leads:
        check_run(cfg)
        OmegaConf.save(cfg, out / "config.yaml", resolve=True)
    launchers = {"alone": _alone, "virtual": _virtual, "process": _processes, "torchrun": run_worker}
    launchers[cfg.launcher.name](cfg, out)


def _alone(cfg: DictConfig, out: Path) -> None:
    from asr_am.train.trainer import train

    train(**run_arguments(cfg, out))


def _virtual(cfg: DictConfig, out: Path) -> None:
    from asr_am.distributed.cluster_config import Cluster, Workload
    from asr_am.train.simulate import train_virtually

    cluster, workload = Cluster.build(values(cfg.cluster)), Workload.build(values(cfg.workload))
    train_virtually(**run_arguments(cfg, out), learners=cfg.learners, cluster=cluster, workload=workload)


def _processes(cfg: DictConfig, out: Path) -> None:
    from asr_am.distributed.cluster_config import Faults
    from asr_am.distributed.runtime.launcher import launch

    launcher, size = cfg.launcher, cfg.learners + num_dedicated_servers(cfg)
    if size % launcher.nodes:
        raise InputError(f"{size} learners and servers cannot be divided among launcher.nodes={launcher.nodes} hosts")
    command = [sys.executable, "-m", "asr_am.stages.train_worker", str(out / "config.yaml")]
    options = {key: value for key, value in values(launcher).items() if key not in ("name", "suffix")}
    launch(
        command, size // launcher.nodes, synchronous=strategy_of(cfg).func.synchronous,
        faults=Faults.build(values(cfg.cluster.faults)), **options,
    )  # fmt: skip


main = stage("train", units)

if __name__ == "__main__":
    main()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        end_process()
