"""One learner of a training run: what stage `train` does, or starts in several processes, as
`python -m asr_am.stages.train_worker exp/<corpus>/train/<run>/config.yaml`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from asr_am.distributed.runtime.worker_process import end_process
from asr_am.errors import InputError
from asr_am.options import check_types
from asr_am.stages.app import corpus_dir, start_logging, values
from asr_am.stages.egs import egs_dir
from asr_am.stages.target import KEY, git_commit

if TYPE_CHECKING:
    from asr_am.distributed.team import Team

log = logging.getLogger(__name__)
EXIT_FAILURE = 70  # exit status that says no more than that: where the others can go on without a learner, they do


def run_arguments(cfg: DictConfig, out: Path) -> dict[str, Any]:
    """The arguments of `asr_am.train`'s functions, out of the configuration."""
    from hydra.utils import instantiate

    from asr_am.train.train_options import TrainOptions

    key = out / KEY  # written by the host that leads, perhaps later
    provenance: dict[str, Any] = {"commit": git_commit(), "config_hash": key.read_text() if key.exists() else ""}
    given = without_name(cfg.strategy).items()
    provenance["strategy_options"] = {name: value for name, value in given if not name.startswith("_")}
    provenance |= {"launcher": cfg.launcher.name, "model": cfg.model.name}
    provenance |= {"cluster": cfg.cluster.name, "workload": cfg.workload.name}
    provenance["faults"] = {key: value for key, value in values(cfg.cluster.faults).items() if value}
    options = TrainOptions.build(values(cfg.train), without_name(cfg.model), values(cfg.schedule), cfg.seed)
    return {
        "egs_dir": egs_dir(cfg),
        "out": out,
        "options": options,
        "strategy": strategy_of(cfg),
        "tracker": instantiate(cfg.logger),
        "provenance": provenance,
        "servers": num_dedicated_servers(cfg),
    }


def strategy_of(cfg: DictConfig) -> Any:
    """A `functools.partial` of the strategy's class with its options; it wants parameters, optimizer and team."""
    from hydra.utils import instantiate

    strategy = instantiate(without_name(cfg.strategy))
    check_types(strategy.func.__init__, strategy.keywords, "strategy")
    return strategy


def without_name(group: DictConfig) -> dict[str, Any]:
    return {key: value for key, value in values(group).items() if key != "name"}


def num_dedicated_servers(cfg: DictConfig) -> int:
    """Ranks, after those of the learners, that only serve parameters."""
    if not cfg.strategy.get("apart", False):
        return 0
    if not isinstance(cfg.strategy.servers, int) or cfg.strategy.servers < 1:
        raise InputError("strategy.apart=true: say how many servers there are, for instance strategy.servers=2")
    return int(cfg.strategy.servers)


def run_worker(cfg: DictConfig, out: Path) -> None:
    """Train as the learner that the environment says this process is."""
    from asr_am.distributed.cluster_config import Faults
    from asr_am.train.trainer import train

    arguments = run_arguments(cfg, out)
    if cfg.launcher.name == "torchrun" and not arguments["strategy"].func.synchronous:
        raise InputError(f"strategy={cfg.strategy.name} does not move in step, as torchrun's do; use launcher=process")
    train(**arguments, team=connect_team(cfg), faults=Faults.build(values(cfg.cluster.faults)))


def connect_team(cfg: DictConfig) -> Team:
    """This process' end of the team; InputError where the others cannot be reached."""
    from asr_am.distributed.cluster_config import Cluster, Workload
    from asr_am.distributed.runtime.connect import connect

    cluster, workload = Cluster.build(values(cfg.cluster)), Workload.build(values(cfg.workload))
    launcher = cfg.launcher
    return connect(
        cluster.faults, workload, device=cluster.device, timeout=launcher.timeout, key_file=launcher.get("key_file"),
        encrypt=launcher.get("encrypt"),
    )  # fmt: skip


def main() -> None:
    path = Path(sys.argv[1])
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    rank = os.environ.get("RANK", "0")
    start_logging(corpus_dir(cfg) / "log" / f"train-learner{rank}.log", quiet=rank != "0")
    status = 0
    try:
        run_worker(cfg, path.parent)
    except InputError as error:
        log.error("learner %s: %s", rank, error)
        status = 1
    except Exception:
        log.exception("learner %s failed", rank)
        status = EXIT_FAILURE
    end_process(status)


if __name__ == "__main__":
    main()
