"""The parts of a run that all learners of one process share: options, examples, first weights, validation, files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.runtime.gpu_placement import place
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.egs.epoch_plan import EpochPlan
from asr_am.egs.loader import Batch, Loader, feature_moments
from asr_am.egs.store import EgsInfo, EgsSet, load_pdf_counts, log_priors
from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.acoustic import AcousticModel
from asr_am.models.device import choose_device
from asr_am.models.model_file import load_acoustic_model, save_model
from asr_am.train.chain_loss import ChainLoss, add_xent
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.ctc_loss import CtcLoss
from asr_am.train.frame_loss import batch_loss
from asr_am.train.gradient import BatchLoss, ModelState, Validator, matrix_dtype
from asr_am.train.mmi_loss import MmiLoss
from asr_am.train.run_log import RunLog, TrainingBar
from asr_am.train.tracking import NoTracker, Tracker
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainable import first_batch


def init_weights(path: Path, model: AcousticModel, examples: EgsInfo) -> None:
    """Copies weights and normalisation of a trained model into a new one.

    Ladkat et al. (Interspeech 2019, section 3.2) first train on a part of the data with one learner, and start every
    experiment from these weights: one run with train.subset=0.125, all others with train.init=<its best.pt>.

    Args:
        path: best.pt of a run.
        model: the new model.
        examples: the examples of this run.

    Raises:
        InputError: `path` is not a model file, or its inputs, senones or sizes are others.
    """
    start, info = load_acoustic_model(path)
    message = f"train.init={path}: %s; give the best.pt of a run with this model on these examples, or null"
    if info["kind"] != examples.kind:
        raise InputError(message % f"is for features {info['kind']}, the examples have {examples.kind}")
    ours, theirs = examples.senones, info.get("senones", "")
    if info["num_pdfs"] != examples.num_pdfs or (ours and theirs and ours != theirs):
        raise InputError(message % f"its {info['num_pdfs']} senones are not the {examples.num_pdfs} of the examples")
    if type(start) is not type(model):
        raise InputError(message % f"is a {type(start).__name__}, not a {type(model).__name__}")
    here, there = ({name: tuple(w.shape) for name, w in m.weights().items()} for m in (model, start))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise InputError(message % f"{name} has shape {there.get(name)}, here it is {here.get(name)}")
    model.load_state_dict(start.weights(), strict=False)


StrategyFactory = Callable[[FlatParams, Optimizer, Team], Strategy]
"""Makes the strategy of one learner, for instance a strategy's class."""


class RunSetup:
    """One training run of an acoustic model on the sets `train` and `dev` (`trainable.Trainable`).

    Args:
        egs_dir: training examples.
        out: directory of the run.
        options: options of the run.
        strategy: makes the strategy of a learner.
        learners: number of learners that share a batch of `options.batch_size` chunks.
        tracker: experiment tracking.
        provenance: origin of the run, for summary.json and the model file.
        share_gpus: several learners may compute on one GPU.
        denominator: file of the `DenominatorGraph` for `options.mmi` or `options.chain`.

    Raises:
        InputError: the examples are damaged, there is no GPU, or the batch cannot be divided.
    """

    unit = "frames"
    remedy = "lower schedule.base or train.optimizer.clip_norm"

    def __init__(
        self, egs_dir: Path, out: Path, options: TrainOptions, strategy: StrategyFactory, *, learners: int = 1,
        tracker: Tracker | None = None, provenance: Mapping[str, object] | None = None, share_gpus: bool = False,
        denominator: Path | None = None,
    ) -> None:  # fmt: skip
        check_batch(options.batch_size, learners)
        self.options, self.learners, self.out = options, learners, out
        self.provenance = dict(provenance or {})
        self._factory = strategy
        self.device = training_device(options, share_gpus)
        self.egs = EgsSet(egs_dir, "train", *(["dev"] if options.with_dev else []))
        self._dev = EgsSet(egs_dir, "dev")
        self.validation = None if options.with_dev else "frame error"
        self.pdf_counts_P = torch.from_numpy(load_pdf_counts(egs_dir))
        self._denominator = denominator
        self._mean_F, self._deviation_F = feature_moments(self.egs)
        self.loader = Loader(
            self.egs, options.batch_size // learners, seed=options.seed, random_offset=options.random_offset,
            subset=options.subset, masking=options.masking, mean_F=self._mean_F, ivector_noise=options.ivector_noise,
            workers=options.workers, buffer=options.shuffle_buffer, one_speed=options.one_speed,
            chunk=options.chunk,
        )  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        self.run_log = RunLog(out, tracker or NoTracker(), TrainingBar(options.epochs), options.plain())
        self._plan: EpochPlan | None = None

    def model(self) -> AcousticModel:
        """Returns the network with its first weights, the same for every learner."""
        return deepcopy(self._start).to(self.device)

    @cached_property
    def _start(self) -> AcousticModel:
        torch.manual_seed(self.options.seed)
        model = self.options.model.make(self.egs.info.dim, self.egs.info.num_pdfs)
        if not (isinstance(model, AcousticModel) and isinstance(getattr(model, "output", None), nn.Linear)):
            maker = f"{type(self.options.model).__name__}.make"
            raise InputError(f"model: {maker} must return an AcousticModel with a linear layer `output`")
        model.set_normalisation(torch.from_numpy(self._mean_F), torch.from_numpy(self._deviation_F))
        if self.options.chain or self.options.ctc:
            add_xent(model)
        if self.options.init:
            init_weights(Path(self.options.init), model, self.egs.info)
        return model

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        return sum(parameter.numel() for parameter in self._start.parameters())

    def learner(self, team: Team) -> tuple[ModelState, Strategy]:
        """Makes a learner of `team` and its strategy."""
        model = self.model()
        params = FlatParams(model)
        optimizer = Optimizer(params, self.options.optimizer)
        strategy = self._factory(params, optimizer, team)
        strategy.attach(model, self._loss, partial(first_batch, self, team.rank))
        state = ModelState(
            model, strategy.params, strategy.optimizer, self.loader, self.options, self.device, self._batch_loss,
            makes_graph=model.cuda_graph and self.options.ctc is None,  # torch's CTC waits for the GPU
        )  # fmt: skip
        return state, strategy

    def warm_up(self) -> None:
        """See `ForkedRun.warm_up`."""
        self._loss(self.model(), self.loader.batch(self.plan(0), 0))

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        x_BTF, targets_BT = batch.x_BTF.to(self.device), batch.targets_BT.to(self.device)
        assert isinstance(model, AcousticModel)
        loss, _ = self._batch_loss(model, x_BTF, batch.lengths_B, targets_BT, matrix_dtype(self.options))
        return loss, float(batch.frames)

    @cached_property
    def _batch_loss(self) -> BatchLoss:
        return self._path_loss or partial(batch_loss, smoothing=self.options.label_smoothing)

    @cached_property
    def _path_loss(self) -> BatchLoss | None:
        """The loss over paths, None for the cross-entropy."""
        if self.options.ctc:
            return CtcLoss(self.egs.info.num_pdfs, self.options.ctc)
        if self.options.mmi is None and self.options.chain is None:
            return None
        if self._denominator is None:
            name = "chain" if self.options.chain else "mmi"
            raise InputError(f"train.{name}: needs a denominator graph, which stage 5 (egs) makes")
        graph = DenominatorGraph.load(self._denominator)
        if graph.num_pdfs != self.egs.info.num_pdfs:
            raise InputError(
                f"{self._denominator}: has {graph.num_pdfs} pdfs, the examples have {self.egs.info.num_pdfs}; run "
                "stage 5 (egs) again"
            )
        if self.options.chain:
            return ChainLoss(graph, self.options.chain, self.device)
        assert self.options.mmi is not None
        return MmiLoss(graph, log_priors(self.pdf_counts_P.numpy()), self.options.mmi, self.device)

    def plan(self, epoch: int) -> EpochPlan:
        """Returns the batches of an epoch. Caches one plan, as all learners ask for the same."""
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = self.loader.plan(epoch)
        return self._plan

    @cached_property
    def validator(self) -> Validator:
        """Computes the held-out loss on the set `dev`."""
        size, chunk = max(64, self.options.batch_size // self.learners), self.options.chunk
        loader = Loader(self._dev, size, shuffle=False, chunk=chunk)
        return Validator(self.model(), loader, self.options, self.device, self._path_loss or batch_loss)

    def save_best(
        self, path: Path, record: Mapping[str, float], weights_N: Tensor, statistics: Mapping[str, Tensor]
    ) -> None:
        """Saves the model with these weights and running statistics."""
        self.validator.load(weights_N, statistics)
        info = {
            "kind": self.egs.info.kind, "chunk": self.options.chunk or self.egs.info.chunk,
            "pdf_counts": self.pdf_counts_P, "senones": self.egs.info.senones,
            "epoch": record["epoch"], "heldout_loss": record.get("heldout_loss"), "chain": bool(self.options.chain),
            "ctc": bool(self.options.ctc),
            **self.provenance,
        }  # fmt: skip
        save_model(path, self.validator.model, info)

    def checkpoints(self, strategy: str) -> Checkpoints:
        """Returns the run's checkpoints. Those of other options or examples are refused."""
        info = self.egs.info
        examples = f"{info.num_pdfs}-{info.dim}-{info.chunk}-{self.egs.frames}"
        fingerprint = f"{self.options.fingerprint()}-{strategy}-{examples}"
        return Checkpoints(self.out / "checkpoints", fingerprint)


def check_batch(batch_size: int, learners: int, where: str = "") -> None:
    """Raises InputError if the batch cannot be divided among the learners.

    Args:
        batch_size: the batch of all learners together.
        learners: number of learners.
        where: prefix of the options in messages.
    """
    if batch_size % learners:
        raise InputError(
            f"{where}train.batch_size={batch_size}: {where}learners={learners} cannot divide it; it is the batch of "
            "all learners together, so choose a multiple"
        )


def training_device(options: TrainOptions, share_gpus: bool = False) -> torch.device:
    """Returns the CPU or this process' GPU. Raises InputError if the options ask for a GPU that does not exist.

    Args:
        options: options of the run.
        share_gpus: several learners of a host may have the same GPU.
    """
    device = choose_device(options.device)
    if device.type == "cpu":
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", place(local_rank, torch.cuda.device_count(), share_gpus))
