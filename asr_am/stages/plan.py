"""What a recipe will need, before anything starts: `python -m asr_am.stages.plan OVERRIDE...`.

    python -m asr_am.stages.plan corpus=minicts corpus.hours=100
    python -m asr_am.stages.plan corpus=kaldi corpus.name=swb corpus.hours=2000 features=fusion260 align=sat \\
        model=blstm_swb2000 train=paper train.epochs=16 train.batch_size=2560 launcher=virtual learners=16 \\
        strategy=adpsgd cluster=ibm_a workload=swb2000_lstm

Prints time, disk and memory of each stage. Feature extraction, a training step and the disk are measured on this
machine in a few seconds, once: `speeds-<model>.json` in the folder `exp` has them with their date. GMM training,
adaptation and decoding cost what they cost on minicts (`PER_FRAME`), scaled by the speed of feature extraction there.
With launcher=virtual, training takes the time of the virtual cluster, by the strategy's own code.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.features.fusion import base_of, stack_of, streams_of
from asr_am.stages.app import ends_on_signals, reports_errors
from asr_am.stages.data import copy_speeds
from asr_am.stages.features import made_kind
from asr_am.stages.layout import GMM_FEATURES, layout
from asr_am.stages.networks import network_configs
from asr_am.stages.option_checks import compose_job
from asr_am.stages.overrides import asks_help
from asr_am.stages.resolvers import composing, hours_of
from asr_am.stages.sections import values
from asr_am.stages.systems import lm_scale_grid
from asr_am.stages.train_config import strategy_factory, without_name

if TYPE_CHECKING:
    from asr_am.distributed.cluster_config import Workload
    from asr_am.features.kinds import FeatureKind
    from asr_am.models.acoustic import ModelOptions
    from asr_am.stages.speeds import MachineSpeeds

FRAMES = 360_000  # of an hour
EVALUATED, MOST_EVALUATED = 0.08, 5.0  # share of the hours that dev has, and test again; hours at most
SHARE = 1 / 20  # of an epoch's rounds that is simulated where all iterations are alike
LEAST_BATCHES = 4000  # batches that are simulated at least, if there are as many
REFERENCE = 590_000.0  # frames/s of feature extraction where PER_FRAME was recorded

# Core seconds per million frames. Recorded on minicts (1 h, 284 pdfs, 4,000 Gaussians, beam 9) on 2 cores of an EPYC.
PER_FRAME = {
    "extraction": 9.0,  # reading audio and writing archives, beside the computation
    "realign": 5.0,  # of one pass
    "align": 19.0,  # graphs, Viterbi and writing, once per system and frame of train and dev
    "em": 0.06,  # of one pass, for each Gaussian of a pdf
    "tree": 5.0,
    "mllt": 3.0,  # of one pass
    "fmllr": 10.0,  # of one pass
    "adapt": 540.0,  # two decoding passes over dev and test
    "ivector": 48.0,
    "egs": 18.0,
    "search": 140.0,
    "paths": 180.0,  # sums over the paths of a denominator graph of 32,000 states, on libri20
}
UTTERANCE = 400  # frames, where the number of utterances counts
GENERATION = 24.0  # core seconds for an hour of minicts
BASE_MEMORY = 0.5e9  # a process with torch and numba
WORDS = 0.025  # per frame of speech
WORD_MEMORY = 220  # bytes of a decoded word


@dataclass(frozen=True)
class Need:
    """What a stage needs.

    Attributes:
        core_hours: CPU time.
        hours: on this machine with `nj` jobs, or on the virtual cluster.
        disk: bytes that it leaves.
        memory: bytes of each process.
    """

    stage: str
    core_hours: float
    hours: float
    disk: float
    memory: float
    note: str = ""


def plan(cfg: DictConfig) -> tuple[list[Need], MachineSpeeds]:
    """Returns the needs of each stage, and the measured speeds.

    Raises:
        InputError: the hours of speech are not known, or the cluster has too few devices.
    """
    hours = training_hours(cfg)
    spoken = hours * FRAMES
    train = spoken * (1 + len(copy_speeds(cfg)) * (hours < cfg.speed_perturb_below))
    evaluated = 2 * min(EVALUATED * hours, MOST_EVALUATED) * FRAMES
    columns = num_columns(cfg)
    outputs = num_pdfs(cfg)
    known = measured_speeds(cfg)
    slower = REFERENCE / known.features / 1e6  # from PER_FRAME to core seconds per frame

    def need(stage: str, core_seconds: float, disk: float, memory: float, note: str = "") -> Need:
        core_hours = core_seconds / 3600
        return Need(stage, core_hours, core_hours / cfg.nj + disk / known.disk / 3600, disk, memory, note)

    widths = [kind.dim for kind in made_kinds(cfg).values()]
    extraction = (train + evaluated) * (len(widths) / known.features + PER_FRAME["extraction"] * slower)
    generated = hours if cfg.corpus.name == "minicts" else 0.0
    note = "" if generated else "without audio that it copies"
    needs = [
        need("data", generated * GENERATION * slower * 1e6, generated * 65e6, BASE_MEMORY, note),
        need("features", extraction, (train + evaluated) * 4 * sum(widths), BASE_MEMORY),
        need(
            "align", gmm_seconds(cfg, train, spoken, evaluated / 2) * slower, 5 * 4 * (train + evaluated / 2),
            BASE_MEMORY + gaussians(cfg) * 80 * 8 * (2 * cfg.nj + 1), "GMMs",
        ),
    ]  # fmt: skip
    adapted, ivectors = "sat" in cfg.align, "ivector" in columns  # as stage speaker decides
    if adapted or ivectors:
        seconds = evaluated * PER_FRAME["adapt"] * adapted + (train + evaluated) * PER_FRAME["ivector"] * ivectors
        disk = (train + evaluated) / 300 * 4 * columns.get("ivector", 0)
        needs.append(need("speaker", seconds * slower, disk, BASE_MEMORY))
    stored = sum(width for name, width in columns.items() if name != "ivector")
    size = 2 if cfg.egs.dtype == "float16" else 4
    examples = (train + evaluated / 2) * (size * stored + (2 if outputs < 1 << 15 else 4))
    needs.append(need("egs", (train + evaluated / 2) * PER_FRAME["egs"] * slower, examples, BASE_MEMORY))
    epoch = epoch_frames(cfg)
    for name, network in network_configs(cfg).items():
        frames = epoch + (evaluated / 2 if network.train.get("with_dev") else 0)
        need_of = sequence_training if network.train.get("mmi") else training
        speed = known.training if network.model == cfg.model else training_speed(network)
        needs.append(replace(need_of(network, frames, speed, outputs), stage=name))
    overlap = cfg.egs.chunk / 10
    scoring = overlap / (3 * known.training)  # forward without backward
    networks = 1 + cfg.mmi.train + cfg.second.train
    systems = (len(cfg.systems) + cfg.mmi.train + 2 * cfg.second.train) * len(cfg.lms)
    search = evaluated * (systems * PER_FRAME["search"] * slower + networks * len(cfg.lms) * scoring)
    words = evaluated / 2 * WORDS * math.prod(map(len, lm_scale_grid(cfg)))  # of dev, under every LM scale
    memory = BASE_MEMORY + words * WORD_MEMORY
    needs.append(need("decode", search, systems * evaluated * 600, memory, "without graphs"))
    return needs, known


def training_hours(cfg: DictConfig) -> float:
    """Returns the hours of training speech: of the data if stage data has run, else of the configuration."""
    hours = cfg.corpus.get("hours") or hours_of(str(layout(cfg).data))
    if not isinstance(hours, int | float) or not 0 < hours < math.inf:
        raise InputError("the hours of speech are not known before stage 0 (data); give them with corpus.hours=HOURS")
    return float(hours)


def num_columns(cfg: DictConfig) -> dict[str, int]:
    """Returns the width of each stream of the network's inputs."""
    widths = {"fmllr": 40, "lda": 40, "ivector": int(cfg.ivectors.dim)}
    widths |= {name: kind.width for name, kind in made_kinds(cfg).items()}
    return {name: stack_of(name) * widths[base_of(name)] for name in streams_of(str(cfg.features.name))}


def made_kinds(cfg: DictConfig) -> dict[str, FeatureKind]:
    """Returns the options of each feature kind."""
    rate = {"sampling_rate": cfg.corpus.sampling_rate}
    return {name: made_kind(name, rate | options) for name, options in values(cfg.features.kinds).items()}


def num_pdfs(cfg: DictConfig) -> int:
    """Returns the leaves of the tree that the network's targets are from."""
    return int(values(cfg.align)[cfg.align.system].get("leaves") or 120)


def gaussians(cfg: DictConfig) -> int:
    return max(int(options["gaussians"]) for options in _systems(cfg).values())


def _systems(cfg: DictConfig) -> dict[str, Mapping[str, Any]]:
    """Returns the options of the GMM systems in the order of their training."""
    options = values(cfg.align)
    base = options["tri"]
    return {name: {**base, **options[name]} for name in GMM_FEATURES if name in options}


def gmm_seconds(cfg: DictConfig, train: float, spoken: float, dev: float) -> float:
    """Returns millionths of the core seconds of stage align: frames times `PER_FRAME`.

    `spoken` are the frames of the training set without copies at other speeds.
    """
    whole, train = train, train if cfg.speed_perturb_gmms else spoken
    systems, total = _systems(cfg), 0.0
    counts = [UTTERANCE * (options.get("utterances") or math.inf) for options in systems.values()]
    needed = [max(pair) for pair in itertools.pairwise([*counts, math.inf])]  # a system aligns what the next one needs
    for (name, options), count, aligned in zip(systems.items(), counts, needed, strict=True):
        frames = min(train, options.get("frames") or train, count if name != "mono" else train)
        aligned = whole if name == cfg.align.system else min(train, aligned)
        total += frames * len(options["realign"]) * PER_FRAME["realign"] + (aligned + dev) * PER_FRAME["align"]
        mixture = 0.7 * options["gaussians"] / (120 if name == "mono" else options["leaves"])  # mean over the passes
        total += frames * options["iterations"] * mixture * PER_FRAME["em"]
        total += frames * PER_FRAME["tree"] * (name != "mono")
        total += frames * len(options.get("mllt", ())) * PER_FRAME["mllt"]
        total += frames * len(options.get("fmllr_passes", ())) * PER_FRAME["fmllr"]
    return total


def made_model(cfg: DictConfig) -> ModelOptions:
    from asr_am.models.acoustic import model_options

    return model_options(**without_name(cfg.model))


def model_bytes(cfg: DictConfig) -> float:
    """Returns the bytes of the network's weights."""
    inputs = sum(num_columns(cfg).values())
    return 4.0 * sum(p.numel() for p in made_model(cfg).make(inputs, num_pdfs(cfg)).parameters())


def model_matrices(cfg: DictConfig) -> list[tuple[int, int, int]]:
    """Returns the weight matrices of the network as (1, rows, columns)."""
    shapes = [p.shape for p in made_model(cfg).make(sum(num_columns(cfg).values()), num_pdfs(cfg)).parameters()]
    return [(1, shape[0], shape.numel() // shape[0]) for shape in shapes if len(shape) > 1]


def epoch_frames(cfg: DictConfig) -> float:
    """Returns the frames of an epoch, with copies at other speeds."""
    hours = training_hours(cfg)
    copies = len(copy_speeds(cfg)) * (hours < cfg.speed_perturb_below) * (not cfg.train.one_speed)
    return hours * FRAMES * (1 + copies)


def updates_of_epoch(cfg: DictConfig) -> float:
    """Returns the batches of all learners together in an epoch."""
    return epoch_frames(cfg) * cfg.train.subset / (cfg.train.get("chunk") or cfg.egs.chunk) / cfg.train.batch_size


def training_speed(cfg: DictConfig) -> float:
    """Returns the frames a second of training on one core of this machine, measured once."""
    return measured_speeds(cfg).training


def measured_speeds(cfg: DictConfig) -> MachineSpeeds:
    from asr_am.stages.speeds import speeds

    inputs, chunk = sum(num_columns(cfg).values()), cfg.train.chunk or cfg.egs.chunk
    return speeds(
        Path(cfg.exp) / f"speeds-{cfg.model.name}.json", without_name(cfg.model), inputs, num_pdfs(cfg), chunk
    )


def training(cfg: DictConfig, train: float, speed: float, outputs: int) -> Need:
    """Returns the needs of stage train."""
    model, weights = made_model(cfg), model_bytes(cfg)
    states = 2 if cfg.train.optimizer.kind == "adam" else 1
    chunks, chunk = cfg.train.batch_size / cfg.learners, cfg.train.get("chunk") or cfg.egs.chunk
    width = model.activations() + 2 * outputs
    memory = BASE_MEMORY + weights * (2 + states) + 4.0 * chunks * chunk * width
    frames = train * cfg.train.subset * cfg.train.epochs
    batches = frames / cfg.train.epochs / chunk / cfg.train.batch_size  # of an epoch
    core_hours = frames / speed / 3600
    checkpoint = 2 * weights * (1 + states)  # of consensus and replicas, the newest two
    if cfg.launcher.name != "virtual":
        sent = 2 * (cfg.learners - 1) / cfg.learners * weights
        note = f"{batches:,.0f} updates an epoch" + (f", {sent / 1e6:.1f} MB a step and learner" if sent else "")
        return Need("train", core_hours, core_hours / cfg.learners, checkpoint, memory, note)
    hours, sent = virtual_epoch(cfg, batches, weights)
    note = f"{cfg.cluster.name}: {hours:.2f} h an epoch, {sent / 1e6:.1f} MB a step and learner"
    return Need("train", core_hours, hours * cfg.train.epochs, checkpoint, memory, note)


def sequence_training(cfg: DictConfig, train: float, speed: float, outputs: int) -> Need:
    """Returns the needs of sequence training, given `mmi_config`. Clusters have no times for it but the network's."""
    need = training(cfg, train, speed, outputs)
    paths = train * cfg.train.epochs * PER_FRAME["paths"] / 1e6 / 3600
    hours = need.hours + paths / cfg.learners
    return replace(need, core_hours=need.core_hours + paths, hours=hours)


def virtual_epoch(cfg: DictConfig, updates: float, weights: float) -> tuple[float, float]:
    """Returns the hours of an epoch of `updates` on the virtual cluster, and the bytes a learner sends per batch."""
    from asr_am.distributed.cluster_config import Cluster
    from asr_am.distributed.simulator.epoch_timing import time_epoch

    hardware = Cluster.build(values(cfg.cluster))
    hardware.check(cfg.learners)
    workload = timed_workload(cfg, hardware.device, weights)
    strategy = strategy_factory(values(cfg.strategy))
    rounds = math.ceil(updates)
    alike = not hardware.faults.slow or strategy.func.is_synchronous(strategy.keywords)
    share = min(rounds, max(LEAST_BATCHES // cfg.learners, round(rounds * SHARE))) if alike else rounds
    batches = share * cfg.learners
    epoch = time_epoch(strategy, hardware, workload, learners=cfg.learners, batches=batches, wire=cfg.launcher.wire)
    return epoch.seconds * rounds / share / 3600, epoch.bytes_sent / batches


def timed_workload(cfg: DictConfig, device: str, weights: float) -> Workload:
    """Returns the workload with the seconds of a learner's batch and bytes, those of the network if it has none."""
    from asr_am.distributed.cluster_config import Workload

    workload = Workload.build(values(cfg.workload))
    workload.check(device)
    if workload.seconds_per_batch is None:
        frames = cfg.train.batch_size / cfg.learners * (cfg.train.get("chunk") or cfg.egs.chunk)
        seconds = workload.seconds(device, frames, frames)
        workload = replace(workload, frames_per_second=None, seconds_per_batch={device: seconds})
    if workload.bytes is None:
        workload = replace(workload, bytes=weights, matrices=model_matrices(cfg))
    return workload


def table(needs: Sequence[Need]) -> list[str]:
    """Returns the lines of the table."""
    head = f"{'stage':9} {'core hours':>11} {'hours':>9} {'disk GB':>9} {'GB/process':>11}"
    rows = [
        f"{n.stage:9} {n.core_hours:11.3f} {n.hours:9.3f} {n.disk / 1e9:9.2f} {n.memory / 1e9:11.1f}  {n.note}".rstrip()
        for n in needs
    ]
    total = f"{'all':9} {sum(n.core_hours for n in needs):11.3f} {sum(n.hours for n in needs):9.3f}"
    return [head, *rows, f"{total} {sum(n.disk for n in needs) / 1e9:9.2f}"]


def main(overrides: Sequence[str]) -> None:
    """Prints the plan of a recipe with these overrides."""
    if asks_help(overrides):
        print(__doc__)
        return
    with ends_on_signals("plan"), reports_errors("plan", overrides):
        with composing():
            cfg = compose_job(list(overrides))
        needs, known = plan(cfg)
        print("\n".join(table(needs)))
        print(
            f"nj={cfg.nj}; measured {known.date} on {known.processor}, one core: features {known.features:,.0f} "
            f"frames/s, training {known.training:,.0f} frames/s, disk {known.disk / 1e6:,.0f} MB/s"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
