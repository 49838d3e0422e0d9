"""Stage 6, train: trains a network on the examples under the configured strategy, in exp/<corpus>/train/<run>.

With mmi.train=true it then trains that network with the MMI loss, in exp/<corpus>/train/<run with -mmi>, with
second.train=true another model, and with final.train=true the last of them on dev, too (`networks`).

The run is written in place, so that metrics.jsonl can be followed. A killed run continues from its last checkpoint.

To read from a recipe to the update of an algorithm:

    recipes/an4/run.sh                        the stages of a recipe, with their numbers
    scripts/recipe.sh                         options, and `python -m asr_am.stages.<name>` for each stage
    asr_am/stages/train.py                    this file: configuration -> launcher
    asr_am/train/trainer.py                   the loop: leases, steps, validation, checkpoints
    asr_am/distributed/strategies/sync.py     an algorithm: `step` computes, communicates and updates
    asr_am/distributed/optimizer.py           the update rule
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from asr_am.data.ownership import DONE
from asr_am.data.record import read_record
from asr_am.distributed.runtime.mpi_environment import mpi_environment
from asr_am.distributed.runtime.preemption import noting
from asr_am.distributed.runtime.slurm import slurm_environment
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.errors import InputError
from asr_am.options import choices
from asr_am.stages.app import stage
from asr_am.stages.layout import denominator_path, egs_dir, run_dir
from asr_am.stages.networks import network_configs
from asr_am.stages.sections import values
from asr_am.stages.target import Target, held_locks
from asr_am.stages.train_config import TrainConfig, num_dedicated_servers, schedule_values, with_schedule
from asr_am.stages.train_worker import run_worker
from asr_am.train.identity import TEAM, run_identity

if TYPE_CHECKING:
    from asr_am.distributed.leases import HostLost, ProcessLost
    from asr_am.distributed.strategy import Strategy

log = logging.getLogger(__name__)

LAUNCHERS = ("alone", "virtual", "process", "torchrun", "mpi")
JOINING = ("torchrun", "mpi")  # launchers whose learners are started by others, each as a process of this stage
SETTINGS = "config.yaml"
OTHERS = ("wandb", "tensorboard", "checkpoints")  # folders of a run that change or go while its results stay
MADE = (
    SETTINGS, "metrics.jsonl", "leases.jsonl", "summary.json", "best.pt", ".*.tmp", "wandb/**/*", "tensorboard/**/*",
    "checkpoints/checkpoint-?????????/*", "checkpoints/checkpoint-*partial/*", "checkpoints/checkpoint-*.damaged*/*",
    "checkpoints/survivors-?????????.*/*", "checkpoints/.*", "checkpoints/.*/**/*",
)  # fmt: skip


def targets(cfg: DictConfig) -> list[Target]:
    """Returns the training runs of all networks. Imports no torch."""
    return [run_target(each) for each in network_configs(cfg).values()]


def run_target(cfg: DictConfig) -> Target:
    """Returns a training run."""
    check_launcher(cfg)
    launcher, servers = cfg.launcher.name, num_dedicated_servers(cfg)
    if launcher in JOINING:
        os.environ.update(slurm_environment(os.environ))  # for tasks of srun
    if launcher == "mpi":
        os.environ.update(mpi_environment(os.environ))
    world = os.environ.get("WORLD_SIZE")
    spares = int(world or 0) - cfg.learners - servers
    if launcher in JOINING and world and (spares < 0 or (spares > 0 and launcher != "mpi")):
        raise InputError(
            f"learners={cfg.learners}: {launcher.replace('mpi', 'mpirun')} or Slurm has started {world} processes "
            "(WORLD_SIZE), but the run has "
            f"{cfg.learners} learners and {servers} servers; start as many processes, or change learners"
        )
    inputs = [egs_dir(cfg), *([Path(cfg.train.init)] if cfg.train.init else [])]
    inputs += [denominator_path(cfg).parent] if cfg.train.get("mmi") or cfg.train.get("chain") else []
    rank = os.environ.get("RANK", "0") if launcher in JOINING else cfg.launcher.get("node_rank", 0)
    is_leader = int(rank) == 0
    return Target(
        run_dir(cfg), inputs, key_values(cfg), partial(train_run, cfg, is_leader), in_place=True, makes=MADE,
        settings=(SETTINGS,), exclude=OTHERS, is_leader=is_leader, num_bytes=partial(run_bytes, cfg), may_change=TEAM,
    )  # fmt: skip


def check_launcher(cfg: DictConfig) -> None:
    """Raises InputError if the launcher does not exist, or starts one learner where several are configured."""
    launcher, servers = cfg.launcher.name, num_dedicated_servers(cfg)
    if launcher not in LAUNCHERS:
        raise InputError(f"launcher.name={launcher}: there is no such launcher{choices(str(launcher), LAUNCHERS)}")
    if launcher == "alone" and cfg.learners + servers != 1:
        more = " and dedicated servers" if servers else ""
        raise InputError(
            f"learners={cfg.learners}{more} need launcher=virtual, launcher=process, launcher=torchrun or launcher=mpi"
        )


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type, out of range or needs a missing GPU."""
    from asr_am.models.device import choose_device

    check_launcher(cfg)
    choose_device(cfg.train.device)
    for each in network_configs(cfg).values():
        try:
            check_strategy(TrainConfig.parse(each, run_dir(each)))
        except InputError as error:  # its options have other names in the section that they are from
            raise error if each is cfg else InputError(f"run={each.run}: {error}") from error


def key_values(cfg: DictConfig) -> dict[str, object]:
    """Returns the values that a finished run depends on."""
    sections = ("train", "model", "strategy", "launcher", "cluster", "workload")
    plain = {name: values(cfg[name]) for name in sections}
    return run_identity({**plain, "schedule": schedule_values(cfg), "seed": cfg.seed, "learners": cfg.learners})


def train_run(cfg: DictConfig, is_leader: bool, out: Path) -> None:
    """Trains in `out`, or continues there, with the processes that the launcher says.

    All hosts (launcher=process) or ranks (torchrun, mpi) but the leader write nothing here.
    """
    from asr_am.distributed.leases import HostLost, ProcessLost
    from asr_am.train.audit import check_records
    from asr_am.train.run_setup import training_device

    config = None
    while True:
        if config is None:
            config = TrainConfig.parse(cfg, out)
            if is_leader:
                training_device(config.options)
                check_strategy(config)
                OmegaConf.save(with_schedule(cfg), out / "config.yaml", resolve=True)  # the worker processes read it
        try:
            start(config)
            if is_leader:
                check_records(out)
            return
        except HostLost as error:
            cfg, config = on_hosts_left(cfg, config, error), None
            log.warning("%s: %d learners go on, hosts: %d", error.reason, cfg.learners, cfg.launcher.nodes)
        except ProcessLost as error:
            smaller = on_processes_left(cfg, config, error)
            cfg, config = smaller, config if smaller is cfg else None
            log.log(
                logging.WARNING if is_leader else logging.DEBUG, "process %d has ended: %d learners go on", error.rank,
                cfg.learners,
            )  # fmt: skip


def on_hosts_left(cfg: DictConfig, config: TrainConfig, lost: HostLost) -> DictConfig:
    """Returns the configuration of the largest team that fits on the hosts that are left. All of them choose the same.

    Raises the loss if no team with `launcher.min_learners` fits, or if this host is not in it.
    """
    launch = config.launch_options
    most = config.size // launch.nodes  # ranks of a host
    teams = [(nodes * ranks, nodes) for nodes in range(1, len(lost.nodes) + 1) for ranks in range(1, most + 1)]
    for size, nodes in sorted(teams, reverse=True):
        node_rank = lost.nodes.index(launch.node_rank)
        if node_rank >= nodes:
            break
        smaller = with_size(cfg, config, size, {"nodes": nodes, "node_rank": node_rank})
        if smaller is not None:
            return smaller
    raise lost


def on_processes_left(cfg: DictConfig, config: TrainConfig, lost: ProcessLost) -> DictConfig:
    """Returns the configuration of the largest team of the processes of MPI that are left. All of them choose the same.

    Spares keep the size. Raises the loss if no team with `launcher.min_learners` fits, or if the process that writes
    the files of the stage is gone.
    """
    if lost.rank == 0:
        raise lost
    if lost.left >= config.size:
        return cfg
    for size in range(lost.left, 0, -1):
        if (smaller := with_size(cfg, config, size, {})) is not None:
            return smaller
    raise lost


def with_size(cfg: DictConfig, config: TrainConfig, size: int, launcher: dict[str, int]) -> DictConfig | None:
    """Returns the configuration with so many ranks.

    None: so few learners are not wanted, cannot divide the batch, or do not fit the strategy.
    """
    other = OmegaConf.merge(cfg, {"learners": size - config.servers, "launcher": launcher})
    assert isinstance(other, DictConfig)
    if other.learners < config.launch_options.min_learners:
        return None
    with suppress(InputError):
        check_strategy(TrainConfig.parse(other, config.out))
        return other
    return None


def start(config: TrainConfig) -> None:
    """Trains any model, with the processes that the launcher says."""
    starts = {"alone": train_alone, "virtual": train_simulated, "process": train_processes}
    starts.get(config.launcher, run_worker)(config)


def run_bytes(cfg: DictConfig) -> float:
    """Returns the size of the checkpoints and the model in bytes.

    Each learner saves its weights and the optimizer's vectors of the same length. With parameter servers, these vectors
    exist once. Equal replicas are saved once. What else a strategy saves is left out.
    """
    import torch

    from asr_am.egs.store import EgsInfo
    from asr_am.train.checkpoint import KEPT

    config = TrainConfig.parse(cfg, run_dir(cfg))
    info, optimizer = EgsInfo.load(egs_dir(cfg)), config.options.optimizer
    with torch.device("meta"):
        model = config.options.model.make(info.dim, info.num_pdfs)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    vectors = 2 if optimizer.kind == "adam" else int(optimizer.momentum > 0)
    replicas = 1 if small_strategy(config).equal_replicas else config.learners
    copies = replicas + vectors * (1 if "servers" in cfg.strategy else replicas)
    return weights * ((KEPT + 1) * copies + 2)  # one checkpoint is written before the oldest goes; best.pt twice


def check_strategy(config: TrainConfig) -> None:
    """Raises InputError for an option that a learner would refuse, before any learner starts."""
    config.cluster.faults.check(config.size)
    small_strategy(config).check(config.cluster.faults)


def small_strategy(config: TrainConfig) -> Strategy:
    """Returns the strategy of one learner, for a model of two weights and a virtual team of the configured size."""
    from torch import nn

    from asr_am.distributed.cluster_config import Workload
    from asr_am.distributed.flat_params import FlatParams
    from asr_am.distributed.optimizer import Optimizer
    from asr_am.distributed.simulator import SimCluster

    cluster, workload, size = config.cluster, config.workload, config.size
    if config.launcher != "virtual":  # the cluster's hosts do not count then, so that any number of learners fits
        cluster = replace(cluster, hosts=1, devices_per_host=size)
        workload = Workload("self", frames_per_second={cluster.device: 1.0})
    sim = SimCluster(cluster, workload, size, config.options.seed, model_elements=2)
    params = FlatParams(nn.Linear(1, 1))
    optimizer = Optimizer(params, config.options.optimizer)
    strategy: Strategy = config.strategy(params, optimizer, sim.connect(sim.learners[0], ""))
    return strategy


def train_alone(config: TrainConfig) -> None:
    """Trains a single learner in this process."""
    from asr_am.distributed.team import SingleProcess
    from asr_am.train.trainer import train_run

    with noting(config.launch_options.signals):
        train_run(config.make_run(), SingleProcess())


def train_simulated(config: TrainConfig) -> None:
    """Trains all learners of a virtual cluster in this process."""
    from asr_am.train.simulate import simulate_run

    simulate_run(config.make_run(), config.cluster, config.workload, config.servers, config.launch_options.wire)


def train_processes(config: TrainConfig) -> None:
    """Starts a process per learner of this host, and waits for them. Each runs `asr_am.stages.train_worker`."""
    from asr_am.distributed.runtime.launcher import launch

    warn_if_crowded(config)
    command = [sys.executable, "-m", "asr_am.stages.train_worker", str(config.out / "config.yaml")]
    launch(
        command, config.size // config.launch_options.nodes, synchronous=config.synchronous, together=config.together,
        faults=config.cluster.faults, inherited_files=held_locks(), fork=True, **config.launch_options.of_launch(),
    )  # fmt: skip


def warn_if_crowded(config: TrainConfig) -> None:
    """Warns if this host has fewer cores than learners, and no GPU."""
    import torch

    from asr_am.train.train_options import cores

    processes = config.size // config.launch_options.nodes
    if processes > cores() and (config.options.device == "cpu" or not torch.cuda.is_available()):
        log.warning(
            "%d processes will share %d cores, each at 1/%.3g of its speed or less; use fewer learners, or "
            "launcher=virtual to study an algorithm", processes, cores(), processes / cores(),
        )  # fmt: skip


def best_loss(cfg: DictConfig) -> float:
    """Returns the lowest held-out loss of the finished run, for a sweep that searches. With dev, of training."""
    summary = read_record(run_dir(cfg) / "summary.json", remedy="train again under another name (run=NAME)")
    return float(min(summary.get("heldout_loss") or summary["train_loss"]))


def sweep_table(jobs: Sequence[DictConfig]) -> str:
    """Returns the lowest held-out loss of each job's runs as a table, that of a run that is not finished as –."""
    losses = {
        run_dir(cfg): f"{best_loss(cfg):.4f}" if (run_dir(cfg) / DONE).exists() else "–"
        for job in jobs for cfg in network_configs(job).values() if not cfg.train.get("with_dev")
    }  # fmt: skip
    width = max(map(len, ("run", *(run.name for run in losses))))
    rows = [("run", "held-out loss"), *((run.name, loss) for run, loss in losses.items())]
    return "\n  ".join(f"{run:{width}}  {loss:>13}" for run, loss in rows)


main = stage("train", targets, best_loss, sweep_table)

if __name__ == "__main__":
    main()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        end_process()
