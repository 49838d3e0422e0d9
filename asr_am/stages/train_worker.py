"""One learner of a run: `python -m asr_am.stages.train_worker exp/<corpus>/train/<run>/config.yaml`.

Stages `train` and `rescore` start this program with launcher=process. The latter gives it exp/<corpus>/lm/<name>, a
language model. With launcher=torchrun or mpi, stage `train` calls `run_worker`.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from asr_am.data.checksums import intact
from asr_am.distributed.launch_spec import EXIT_FAILURE, EXIT_USER_ERROR
from asr_am.distributed.runtime.preemption import noting
from asr_am.distributed.runtime.worker_process import end_process, set_parent_death_signal
from asr_am.errors import EXIT_PREEMPTED, ConnectionLost, InputError, Preempted
from asr_am.stages.app import disk_problem
from asr_am.stages.lm_config import lm_config
from asr_am.stages.stage_log import start_logging
from asr_am.stages.train_config import TrainConfig

if TYPE_CHECKING:
    from asr_am.distributed.team import Team

log = logging.getLogger(__name__)
NEEDED = (  # by learners, and imported late
    "asr_am.train.trainer", "asr_am.train.run_setup", "asr_am.distributed.runtime.connect",
    "asr_am.distributed.runtime.rendezvous", "asr_am.distributed.runtime.torch_group",
    "torch._dynamo",  # by torch's first optimizer
    "torch.utils.serialization.config",
)  # fmt: skip
_prepared: dict[Path, TrainConfig] = {}  # by file, what `prepare` has read


def run_worker(config: TrainConfig) -> None:
    """Trains as the learner that the environment of this process names."""
    from asr_am.train.trainer import train_run

    signals = config.launch_options.signals
    if "ASR_AM_LAUNCHER" in os.environ:  # which sends SIGUSR1 then, and SIGTERM to end all at once
        signals = ("USR1", *(name for name in signals if name == "USR2"))
    if config.launcher == "mpi":
        open_early(config)  # a spare has the time
    with noting(signals):
        team = connect_team(config)
        if team is None:
            return
        train_run(config.make_run(team.rank), team)


def connect_team(config: TrainConfig) -> Team | None:
    """Connects to the other learners. Returns None when they have trained without this process, a spare of MPI.

    Raises:
        InputError: they cannot be reached.
    """
    from asr_am.distributed.runtime.connect import connect

    launch = config.launch_options
    if config.launcher == "mpi":
        from asr_am.distributed.runtime.mpi_team import connect_mpi

        return connect_mpi(
            config.cluster.faults, config.workload, size=config.size, synchronous=config.synchronous,
            device=config.cluster.device, wire=launch.wire,
        )  # fmt: skip
    return connect(
        config.cluster.faults, config.workload, device=config.cluster.device, timeout=launch.timeout,
        key_file=launch.key_file, encrypt=launch.encrypt, wire=launch.wire,
    )  # fmt: skip


def prepare(path: str) -> None:
    """Imports and reads what a learner needs, in the process that forks learners (`fork_server`)."""
    import torch

    torch.set_num_threads(1)  # threads would be missing in learners, which set their number later
    config = _prepared[Path(path)] = read_config(Path(path))
    if module := getattr(config.make_tracker(), "module", None):
        with suppress(ImportError):  # the tracking will say so
            import_module(module)
    open_early(config)


def open_early(config: TrainConfig) -> None:
    """Imports what a learner would import late, loads compiled code, and opens the run if it is on the CPU."""
    for name in NEEDED:
        import_module(name)
    from asr_am.egs.loader import load_compiled
    from asr_am.models.device import choose_device

    load_compiled()
    if choose_device(config.options.device).type == "cpu":  # each learner has a GPU of its own
        run = config.make_run()
        if config.options.threads <= 1 < config.size:  # else weights would be rounded as one thread does
            run.warm_up()


def read_config(path: Path) -> TrainConfig:
    """Reads the config.yaml of a run, parsed before by its starter. Raises InputError if it is damaged or missing."""
    try:
        cfg = OmegaConf.load(intact(path))
        assert isinstance(cfg, DictConfig)
        parse = lm_config if path.parents[1].name == "lm" else TrainConfig.parse
        return parse(cfg, path.parent)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # OmegaConf, YAML and a missing section raise many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path}: damaged, or not the configuration of a run ({reason}); start the command of the run again, which "
            "writes it anew"
        ) from error


def main() -> None:
    """Runs the program. The exit status is 0, 1 after a user's mistake, or one of `launch_spec`."""
    path = Path(sys.argv[1])
    rank = os.environ.get("RANK", "0")
    corpus = path.absolute().parents[2]  # of exp/<corpus>/train/<run>/config.yaml
    start_logging(corpus / "log" / f"train-learner{rank}.log", quiet=rank != "0")
    status = 0
    try:
        if "ASR_AM_LAUNCHER" in os.environ:
            set_parent_death_signal(int(os.environ["ASR_AM_LAUNCHER"]))  # before imports that take seconds
        run_worker(_prepared.get(path) or read_config(path))
    except KeyboardInterrupt:  # to this process alone, it is like any other death
        status = EXIT_FAILURE
    except Exception as error:
        status = report_failure(error, rank, path.parent)
    end_process(status)


def report_failure(error: Exception, rank: str, out: Path) -> int:
    """Logs why a learner ends, in one line if a user can mend it. Returns the exit status."""
    if isinstance(error, Preempted):
        log.debug("learner %s: %s", rank, error)  # the launcher says it
        return EXIT_PREEMPTED
    if isinstance(error, InputError):
        log.error("learner %s: %s", rank, error)
        return EXIT_FAILURE if isinstance(error, ConnectionLost) else EXIT_USER_ERROR
    if line := disk_problem(error, out):
        log.error("learner %s: %s", rank, line)
        return EXIT_USER_ERROR
    log.error("learner %s failed", rank, exc_info=error)
    return EXIT_FAILURE


if __name__ == "__main__":
    main()
