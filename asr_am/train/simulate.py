"""Training on a virtual cluster: all learners in this process, their arithmetic real and their time modelled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.team import Team
from asr_am.train.run_setup import RunSetup, StrategyFactory
from asr_am.train.tracking import Tracker
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainable import Trainable
from asr_am.train.trainer import Trainer


def train_virtually(
    egs_dir: Path, out: Path, options: TrainOptions, *, learners: int, cluster: Cluster, workload: Workload,
    strategy: StrategyFactory, tracker: Tracker | None = None, provenance: Mapping[str, object] | None = None,
    servers: int = 0,
) -> None:  # fmt: skip
    """Does `asr_am.train.trainer.train` for all learners of a virtual cluster. The same seed gives the same bits.

    `options.threads=0` means one thread. The batches of a learner are small, and more threads would change the bits.

    Args:
        egs_dir, out, options, strategy, tracker, provenance: as of `train`.
        learners: number of learners.
        cluster: the hardware and its faults.
        workload: the computation whose time is modelled.
        servers: number of further ranks that only serve parameters.

    Raises:
        InputError: as of `train`.
    """
    setup = RunSetup(egs_dir, out, options, strategy, learners=learners, tracker=tracker, provenance=provenance)
    simulate_run(setup, cluster, workload, servers)


def simulate_run(
    run: Trainable, cluster: Cluster, workload: Workload, servers: int = 0, wire: WireDtype = "float32"
) -> None:
    """Trains any model as all learners of a virtual cluster, and closes the run.

    Args:
        run: the run.
        cluster: the hardware and its faults.
        workload: the computation whose time is modelled.
        servers: number of further ranks that only serve parameters.
        wire: type in which weights and gradients travel.

    Raises:
        InputError: as of `train`.
    """
    torch.set_num_threads(run.options.threads or 1)
    sim = SimCluster(
        cluster, workload, run.learners + servers, run.options.seed, model_elements=run.num_weights, wire=wire
    )

    def run_learner(team: Team) -> None:
        Trainer(run, team).train()

    try:
        sim.run(run_learner)
    finally:
        run.run_log.close()
