"""The configuration of a training run, parsed once: by stage `train`, and by each worker process that it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.options import build, check_types
from asr_am.stages.app import values
from asr_am.stages.config_targets import find_class
from asr_am.stages.egs import egs_dir
from asr_am.stages.target import KEY, git_commit

if TYPE_CHECKING:
    from asr_am.distributed.cluster_config import Cluster, Workload
    from asr_am.train.run_log import Tracker
    from asr_am.train.train_options import TrainOptions

log = logging.getLogger(__name__)

MOVED = [f"asr_am.distributed.strategies.{module}" for module in (
    "local", "sync", "hybrid", "dpsgd", "adpsgd", "gtc", "bmuf", "htm", "ps_sync", "ps_async", "psp", "parallax",
)] + ["asr_am.train.run_log"]  # fmt: skip


@dataclass(frozen=True)
class LaunchOptions:
    """Options of conf/launcher, for the launchers that start or join processes.

    Attributes:
        nodes: hosts.
        node_rank: number of this host.
        address: host:port of node 0.
        max_restarts: restarts of each learner.
        restart_after: seconds before a restart.
        timeout: seconds to wait for the others at the start.
        key_file: shared secret of all hosts.
        encrypt: what to encrypt, see conf/launcher.
    """

    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    max_restarts: int = 3
    restart_after: float = 1.0
    timeout: float = 60.0
    key_file: str | None = None
    encrypt: bool | None = None


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a training run needs.

    Attributes:
        out: directory of the run.
        egs_dir: training examples.
        options: options of the training.
        learners: ranks that compute gradients.
        servers: further ranks that only serve parameters.
        strategy: `functools.partial` of the strategy's class, called with parameters, optimizer and team.
        cluster: hardware of launcher=virtual. Its faults count for all launchers with several learners.
        workload: computation whose time is modelled (launcher=virtual) or emulated.
        launcher: name of the launcher.
        launch_options: its options.
        make_tracker: makes the experiment tracking.
        provenance: origin of the run, for summary.json and the model file.
    """

    out: Path
    egs_dir: Path
    options: TrainOptions
    learners: int
    servers: int
    strategy: Any
    cluster: Cluster
    workload: Workload
    launcher: str
    launch_options: LaunchOptions
    make_tracker: Callable[[], Tracker]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.learners + self.servers

    @property
    def synchronous(self) -> bool:
        """True if all learners take their steps together."""
        return bool(self.strategy.func.synchronous)

    @classmethod
    def parse(cls, cfg: DictConfig, out: Path) -> TrainConfig:
        """Parses a configuration.

        Args:
            cfg: the whole configuration.
            out: directory of the run.

        Raises:
            InputError: an option is unknown, of another type, out of range or does not fit another one.
        """
        from asr_am.distributed.cluster_config import Cluster, Workload
        from asr_am.train.train_options import TrainOptions

        launcher = cfg.launcher.name
        launch_values = {key: value for key, value in values(cfg.launcher).items() if key not in ("name", "suffix")}
        config = cls(
            out=out,
            egs_dir=egs_dir(cfg),
            options=TrainOptions.build(values(cfg.train), without_name(cfg.model), values(cfg.schedule), cfg.seed),
            learners=cfg.learners,
            servers=num_dedicated_servers(cfg),
            strategy=strategy_factory(values(cfg.strategy)),
            cluster=Cluster.build(values(cfg.cluster)),
            workload=Workload.build(values(cfg.workload)),
            launcher=launcher,
            launch_options=build(LaunchOptions, launch_values, "launcher"),
            make_tracker=tracker_factory(values(cfg.logger)),
            provenance=_provenance(cfg, out),
        )
        if launcher == "torchrun" and not config.synchronous:
            raise InputError(
                f"launcher=torchrun: strategy={cfg.strategy.name} is asynchronous, but torchrun's learners move in "
                "step; use launcher=process"
            )
        nodes = config.launch_options.nodes
        if nodes < 1 or config.size % nodes:
            raise InputError(
                f"launcher.nodes={nodes}: {config.size} learners and servers cannot be divided among so many hosts; "
                "choose a divisor"
            )
        return config


def _provenance(cfg: DictConfig, out: Path) -> dict[str, Any]:
    """Returns the origin of a run. These names are keys of summary.json."""
    key = out / KEY  # the leading host writes it, perhaps after the others have come here
    options = {name: value for name, value in without_name(cfg.strategy).items() if not name.startswith("_")}
    return {
        "commit": git_commit(),
        "config_hash": key.read_text() if key.exists() else "",
        "strategy_options": options,
        "launcher": cfg.launcher.name,
        "model": cfg.model.name,
        "cluster": cfg.cluster.name,
        "workload": cfg.workload.name,
        "faults": {name: value for name, value in values(cfg.cluster.faults).items() if value},
    }


def strategy_factory(strategy: dict[str, Any]) -> Any:
    """Returns a `functools.partial` of a strategy's class with its options, whose types it checks.

    Args:
        strategy: values of the group.

    Raises:
        InputError: the class is no strategy of this project, or an option is unknown or of another type.
    """
    from asr_am.distributed.strategy import Strategy

    options = {name: value for name, value in strategy.items() if name != "name"}
    return _factory(options, "strategy", "asr_am.distributed.strategies", Strategy)


def tracker_factory(logger: dict[str, Any]) -> Callable[[], Tracker]:
    """Returns what makes the experiment tracking that conf/logger describes.

    Args:
        logger: values of the group.

    Raises:
        InputError: an option is unknown or of another type, or a package is not installed.
    """
    from asr_am.train.run_log import Tracker

    factory: partial[Tracker] = _factory(logger, "logger", "asr_am.train.run_log", Tracker)
    factory()  # finds now, before any learner starts, what its constructor refuses
    return factory


HYDRA_KEYS = ("_target_", "_partial_", "_convert_")  # no options of a class


def _factory(group: dict[str, Any], where: str, package: str, base: type) -> partial[Any]:
    """Returns a `functools.partial` of the class that `_target_` names, with the other values as its arguments."""
    found = find_class(current_target(str(group["_target_"])), f"{where}._target_", package, base)
    options = {name: value for name, value in group.items() if name not in HYDRA_KEYS}
    check_types(found.__init__, options, where)  # type: ignore[misc]
    return partial(found, **options)


def without_name(group: DictConfig) -> dict[str, Any]:
    """Returns the values of a config group without its name."""
    return {key: value for key, value in values(group).items() if key != "name"}


def num_dedicated_servers(cfg: DictConfig) -> int:
    """Returns the number of ranks, after those of the learners, that only serve parameters."""
    if not cfg.strategy.get("apart", False):
        return 0
    if not isinstance(cfg.strategy.servers, int) or cfg.strategy.servers < 1:
        raise InputError("strategy.apart=true: needs the number of servers, for instance strategy.servers=2")
    return int(cfg.strategy.servers)


# Modules have moved. A user's own config may have the old paths, and the keys of finished runs keep them.


def _old_target(target: str) -> str:
    """Returns the path that an earlier version had for a strategy or a tracker of this one."""
    if target == "asr_am.distributed.strategies.parallax.Parallax":
        return "asr_am.distributed.parallax.strategy.Parallax"
    if target.startswith("asr_am.train.run_log."):
        return target.replace(".run_log.", ".tracking.")
    return target.replace("asr_am.distributed.strategies.", "asr_am.distributed.")


def key_target(target: str) -> str:
    """Returns a strategy's path as keys of training runs name it: with the old path, so that none is outdated."""
    return _old_target(target)


def current_target(target: str) -> str:
    """Returns the present path of a strategy or a tracker, given the present or an old one."""
    name = target.rpartition(".")[2]
    return next((f"{module}.{name}" for module in MOVED if _old_target(f"{module}.{name}") == target), target)


def with_current_targets(cfg: DictConfig) -> DictConfig:
    """Returns the configuration with the present paths of strategy and tracker. Logs each one that it replaces."""
    current = cfg.copy()
    for group in ("strategy", "logger"):
        old = cfg[group]._target_
        if (new := current_target(old)) != old:
            log.info("%s._target_=%s: has moved, please write %s", group, old, new)
            OmegaConf.update(current, f"{group}._target_", new)
    return current
