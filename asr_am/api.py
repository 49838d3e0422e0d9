"""Recipes from Python: a corpus from audio to word error rates, with the options of the command line.

    from asr_am.api import Recipe

    recipe = Recipe("corpus=kaldi", "corpus.name=mine", "+corpus.prepare.folder=recordings", "exp=results",
                    "strategy=sync", "learners=2", "launcher=process")
    recipe.prepare()
    print(recipe.train()["heldout_loss"])
    recipe.decode()
    print(recipe.score())

The options are the overrides that recipes/*/run.sh takes (recipes/README.md). Each step makes only what is missing or
out of date, also after an interruption. A wrong option, or input that cannot be used, raises `InputError`. Progress is
logged: `logging.basicConfig(level="INFO")` shows it.

`train_model` trains any torch model with any strategy (asr_am/train/any_model.py): as one learner in this process, with
`simulate` as several in this process, and in processes that `launch` or torchrun starts, which call `connect`.
`load_system` loads a trained system, which transcribes files and arrays (asr_am/transcribe.py). `export_network` writes
a trained network for other programs (asr_am/network_export.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.team import Team
from asr_am.errors import InputError
from asr_am.network_export import export_network
from asr_am.stages.app import job_cluster
from asr_am.stages.layout import corpus_dir
from asr_am.stages.option_checks import check_jobs, compose_job
from asr_am.stages.overrides import configurations
from asr_am.stages.sections import values
from asr_am.train.any_model import train_model
from asr_am.transcribe import load_system

__all__ = ["Recipe", "connect", "export_network", "launch", "load_system", "simulate", "train_model"]
Result = TypeVar("Result")
PREPARE = ("data", "lang", "features", "align", "speaker", "egs")


class Recipe:
    """A corpus, a model and how to train it. Nothing is made before one of the steps is called."""

    def __init__(self, *overrides: str) -> None:
        """Takes options that differ from conf/config.yaml, such as "corpus=an4". Raises InputError for a wrong one."""
        self.overrides = overrides
        with configurations(overrides):
            check_jobs(overrides)

    @property
    def folder(self) -> Path:
        """The directory of everything that is made, exp/<corpus>."""
        return corpus_dir(self._config())

    def prepare(self) -> Path:
        """Prepares audio, lexicon and LM, trains GMMs, aligns, and writes training examples. Returns `folder`."""
        for stage in PREPARE:
            self._make(stage)
        return self.folder

    def train(self) -> dict[str, Any]:
        """Trains the network with `strategy` and `learners`. Returns its summary.json.

        Further networks (options `mmi`, `second` and `final`, which conf/sizes.yaml sets by the hours of speech) are
        trained, too. Each has its own in `folder`/train/<run>/summary.json.
        """
        run, *_ = self._make("train")  # networks are in the order of training
        return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))

    def decode(self) -> list[Path]:
        """Decodes dev and test with each of `systems` and LMs. Returns their directories, with CTMs and lattices."""
        return [out for out in self._make("decode") if out.parent.name == "decode"]

    def score(self) -> dict[str, float]:
        """Scores the words of `decode`. Returns the word error rate on test in percent of each <system>_<lm>."""
        found = {}
        for out in self._make("score"):
            words = json.loads((out / "wer.json").read_text(encoding="utf-8"))["all"]
            found[out.name] = 100.0 * words["errors"] / max(1, words["words"])
        return found

    def _config(self) -> Any:
        with configurations(self.overrides):
            return compose_job(list(self.overrides))

    def _make(self, stage: str) -> Sequence[Path]:
        """Makes the targets of a stage. Returns their directories."""
        cfg = self._config()  # anew for each stage: sizes follow the hours of speech, which stage data finds
        targets = import_module(f"asr_am.stages.{stage}").targets(cfg)
        with job_cluster(cfg):
            for target in targets:
                target.run()
        return [target.out for target in targets]


def simulate(
    learner: Callable[[Team], Result], learners: int, cluster: str = "local", seed: int = 0
) -> dict[int, Result]:
    """Runs `learner(team)` for each learner of a virtual cluster, in this process. The same seed gives the same bits.

    `learner` may call `train_model`. The hardware whose time is modelled is a file of conf/cluster. Returns what
    `learner` returned, by rank, without learners that died.
    """
    if learners < 1:
        raise InputError(f"simulate: learners={learners}: must be at least 1")
    overrides = ["launcher=virtual", f"learners={learners}", f"cluster={cluster}"]
    with configurations(overrides):
        cfg = compose_job(overrides)
    hardware = Cluster.build(values(cfg.cluster))
    workload = Workload("any", seconds_per_batch={hardware.device: 1.0})
    return SimCluster(hardware, workload, learners, seed).run(learner)
