"""The configuration of a training run, parsed once: by stage `train`, and by each worker process that it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from asr_am.data.ownership import begun_key
from asr_am.errors import InputError
from asr_am.extensions import find_class
from asr_am.options import check_types
from asr_am.stages.layout import denominator_path, egs_dir
from asr_am.stages.sections import LaunchOptions, values
from asr_am.stages.target import git_commit
from asr_am.train.schedule import for_batch

if TYPE_CHECKING:
    from asr_am.distributed.cluster_config import Cluster, Workload
    from asr_am.train.tracking import Tracker
    from asr_am.train.train_options import TrainOptions
    from asr_am.train.trainable import ForkedRun

log = logging.getLogger(__name__)

PARALLAX = "asr_am.parallax.strategy.Parallax"


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a training run needs.

    Attributes:
        open_run: makes the run of an acoustic model or a language model in this process.
        learners: ranks that compute gradients.
        servers: further ranks that only serve parameters.
        strategy: `functools.partial` of the strategy's class, called with parameters, optimizer and team.
        cluster: hardware of launcher=virtual. Its faults count for all launchers with several learners.
        workload: computation whose time is modelled (launcher=virtual) or emulated.
        provenance: origin of the run, for summary.json and the model file.
    """

    out: Path
    open_run: Callable[[TrainConfig, TrainOptions], ForkedRun]
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
        return bool(self.strategy.func.is_synchronous(self.strategy.keywords))

    @property
    def together(self) -> bool:
        """True if all learners start again after the death of one."""
        return not self.strategy.func.fault_tolerant

    def make_run(self, rank: int = 0) -> ForkedRun:
        """Returns the run for the learner of this rank. Ranks that only serve parameters compute on the CPU.

        A run on the CPU is the same at each call. Learners that are forked share it, and with MPI the teams that this
        process belongs to one after the other.
        """
        from asr_am.models.device import choose_device

        if choose_device(self.options.device).type == "cpu":
            return self._cpu_run
        return self.open_run(self, self.options if rank < self.learners else replace(self.options, device="cpu"))

    @cached_property
    def _cpu_run(self) -> ForkedRun:
        return self.open_run(self, self.options)

    @classmethod
    def parse(cls, cfg: DictConfig, out: Path) -> TrainConfig:
        """Parses the configuration of an acoustic model's run. Raises InputError for an option that is wrong."""
        from asr_am.train.train_options import TrainOptions

        options = TrainOptions.build(values(cfg.train), without_name(cfg.model), schedule_values(cfg), cfg.seed)
        denominator = denominator_path(cfg) if options.mmi or options.chain else None
        open_run = partial(_open_acoustic, egs_dir(cfg), denominator)
        return cls.parse_for(cfg, out, options, open_run, cfg, {"model": cfg.model.name})

    @classmethod
    def parse_for(
        cls, cfg: DictConfig, out: Path, options: TrainOptions,
        open_run: Callable[[TrainConfig, TrainOptions], ForkedRun], launch: DictConfig, provenance: dict[str, Any],
        where: str = "",
    ) -> TrainConfig:  # fmt: skip
        """Parses the options of the training of any model.

        Args:
            launch: the section with `learners`, `launcher` and `strategy`, which `where` begins in messages.
            provenance: more about the origin of the run.

        Raises:
            InputError: as of `parse`.
        """
        from asr_am.distributed.cluster_config import Cluster, Workload
        from asr_am.train.run_setup import check_batch

        check_batch(options.batch_size, launch.learners, where)
        launcher = launch.launcher.name
        if launcher == "virtual":  # a checkpoint ends what is under way, and real minutes are no virtual ones
            options = replace(options, checkpoint_minutes=0.0)
        config = cls(
            out=out,
            open_run=open_run,
            options=options,
            learners=launch.learners,
            servers=num_dedicated_servers(launch),
            strategy=strategy_factory(values(launch.strategy), f"{where}strategy"),
            cluster=Cluster.build(values(cfg.cluster)),
            workload=Workload.build(values(cfg.workload)),
            launcher=launcher,
            launch_options=LaunchOptions.parse(launch.launcher, f"{where}launcher"),
            make_tracker=tracker_factory(values(cfg.logger)),
            provenance=_provenance(cfg, launch, out) | provenance,
        )
        if launcher == "torchrun" and not config.synchronous:
            raise InputError(
                f"launcher=torchrun: strategy={launch.strategy.name} is asynchronous, but torchrun's learners move in "
                "step; use launcher=process"
            )
        nodes = config.launch_options.nodes
        if nodes < 1 or config.size % nodes:
            raise InputError(
                f"launcher.nodes={nodes}: {config.size} learners and servers cannot be divided among so many hosts; "
                "choose a divisor"
            )
        return config


def _open_acoustic(egs: Path, denominator: Path | None, config: TrainConfig, options: TrainOptions) -> ForkedRun:
    from asr_am.train.run_setup import RunSetup

    return RunSetup(
        egs, config.out, options, config.strategy, learners=config.learners, tracker=config.make_tracker(),
        provenance=config.provenance, share_gpus=config.launch_options.share_gpus,
        denominator=denominator,
    )  # fmt: skip


def _provenance(cfg: DictConfig, launch: DictConfig, out: Path) -> dict[str, Any]:
    """Returns the origin of a run. These names are keys of summary.json."""
    options = {name: value for name, value in without_name(launch.strategy).items() if not name.startswith("_")}
    return {
        "commit": git_commit(),
        "config_hash": begun_key(out) or "",  # the leading host writes it, perhaps after the others have come here
        "strategy_options": options,
        "launcher": launch.launcher.name,
        "cluster": cfg.cluster.name,
        "workload": cfg.workload.name,
        "faults": {name: value for name, value in values(cfg.cluster.faults).items() if value},
    }


def strategy_factory(strategy: dict[str, Any], where: str = "strategy") -> Any:
    """Returns a `functools.partial` of a strategy's class with its options, whose types it checks.

    Raises:
        InputError: the class is no strategy of this project, or an option is unknown or of another type.
    """
    from asr_am.distributed.strategy import Strategy

    options = {name: value for name, value in strategy.items() if name != "name"}
    if isinstance(options.get("inner"), dict):
        options["inner"] = strategy_factory(options["inner"], f"{where}.inner")
    own = strategy.get("_target_") == PARALLAX
    package = "asr_am.parallax.strategy" if own else "asr_am.distributed.strategies"
    factory = _factory(options, where, package, Strategy, "asr_am.strategies")
    if (name := getattr(factory.func, "name", None)) != strategy.get("name", name):
        raise InputError(f"{where}={strategy['name']}: {options['_target_']} has the name {name!r}; make them equal")
    return factory


def tracker_factory(logger: dict[str, Any]) -> Callable[[], Tracker]:
    """Returns what makes the experiment tracking that conf/logger describes.

    Raises:
        InputError: an option is unknown or of another type, or a package is not installed.
    """
    from asr_am.train.tracking import Tracker

    factory: partial[Tracker] = _factory(logger, "logger", "asr_am.train.tracking", Tracker)
    factory()  # finds now, before any learner starts, what its constructor refuses
    return factory


HYDRA_KEYS = ("_target_", "_partial_", "_convert_")  # no options of a class


def _factory(group: dict[str, Any], where: str, package: str, base: type, points: str = "") -> partial[Any]:
    """Returns a `functools.partial` of the class that `_target_` names, with the other values as its arguments."""
    found = find_class(str(group["_target_"]), f"{where}._target_", package, base, points)
    options = {name: value for name, value in group.items() if name not in HYDRA_KEYS}
    check_types(found.__init__, options, where)  # type: ignore[misc]
    return partial(found, **options)


def without_name(group: DictConfig) -> dict[str, Any]:
    """Returns the values of a config group without its name."""
    return {key: value for key, value in values(group).items() if key != "name"}


def schedule_values(cfg: DictConfig) -> dict[str, Any]:
    """Returns the options of the schedule, with a rate for the total batch unless one is given."""
    return for_batch(values(cfg.schedule), cfg.train.batch_size, OmegaConf.select(cfg, "train.optimizer.kind"))


def with_schedule(cfg: DictConfig) -> DictConfig:
    """Returns the configuration with the options of the schedule that a run has."""
    current = cfg.copy()
    OmegaConf.update(current, "schedule", schedule_values(cfg), merge=False)
    return current


def num_dedicated_servers(cfg: DictConfig) -> int:
    """Returns the number of ranks, after those of the learners, that only serve parameters."""
    if not cfg.strategy.get("apart", False):
        return 0
    if not isinstance(cfg.strategy.servers, int) or cfg.strategy.servers < 1:
        raise InputError("strategy.apart=true: needs the number of servers, for instance strategy.servers=2")
    return int(cfg.strategy.servers)
