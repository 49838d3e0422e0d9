"""The typed options of every section of a configuration that a stage reads, on one page, and what checks them.

An option is explained in conf/config.yaml or in the files of its group. A section that an algorithm takes as a whole
is declared beside the algorithm:

    align.<system>         hmm/align_corpus.py            speaker             decode/adapt.py
    decode.search          decode/search.py               ivectors            features/ivector/train_extractor.py
    features.kinds.<kind>  features/kinds.py              model               models/<model>.py
    chain                  hmm/train_chain.py
    train                  train/train_options.py         schedule            train/schedule.py
    train.optimizer        distributed/optimizer.py       strategy            distributed/strategies/<strategy>.py
    cluster, workload      distributed/cluster_config.py  logger              train/tracking.py
    lm.model, lm.train     train/lm.py                    lm.lattice          decode/lattice_rescore.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from asr_am.dask_jobs.job_options import JobOptions
from asr_am.data.ownership import check_corpus_dir
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.runtime.preemption import SIGNALS, signal_numbers
from asr_am.errors import InputError
from asr_am.options import build, check_least, check_name
from asr_am.stages.layout import COMBINED, SYSTEMS, corpus_dir
from asr_am.stages.overrides import home_hint

LM_LAUNCHERS = ("alone", "virtual", "process")


@dataclass(frozen=True)
class RecipeOptions:
    """The options of conf/config.yaml that are in no section. They are explained there."""

    exp: str
    data_dir: str | None
    speed_perturb: list[float]
    speed_perturb_below: float
    speed_perturb_gmms: bool
    nj: int
    learners: int
    seed: int
    systems: list[str]
    combine: list[str]
    lms: list[str]
    rescore: bool
    log_likelihoods: bool
    lexicon_probs: bool
    run: str

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        check_least(self, "", nj=1, learners=1, seed=0, speed_perturb_below=0)
        check_name("run", self.run)
        if self.run in (*SYSTEMS, COMBINED):
            raise InputError(f"run={self.run}: is the name of another system; give the training run another name")


@dataclass(frozen=True)
class LangOptions:
    """The options of `corpus.lang`: those of `prepare_lang` and `check_transcripts`."""

    position_dependent: bool
    silence_prob: float
    oov: Literal["unk", "error"]

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if not 0 <= self.silence_prob < 1:
            raise InputError(f"corpus.lang.silence_prob={self.silence_prob}: must be at least 0 and below 1")


@dataclass(frozen=True)
class NgramOptions:
    """The options of an LM in `corpus.lms`: those of `prepare_lm`."""

    order: int | None = None
    arpa: str | None = None
    text: str | None = "train"
    max_ngrams: int | None = None
    min_count: int = 1
    unknown: float | None = None

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if self.unknown is not None and not 0 <= self.unknown < 1:
            raise InputError(f"corpus.lms: unknown={self.unknown}: must be at least 0 and below 1, or null")


@dataclass(frozen=True)
class FeatureOptions:
    """The options of group `features`. They are explained in its files."""

    name: str
    kinds: Mapping[str, Any]
    random_phase: bool = False


@dataclass(frozen=True)
class EgsOptions:
    """The options of section `egs`. They are explained in conf/config.yaml."""

    chunk: int
    dtype: Literal["float16", "float32"]
    shard_frames: int

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        check_least(self, "egs", chunk=1, shard_frames=1)


@dataclass(frozen=True)
class LaunchOptions:
    """The options of the launchers that start or join processes. They are explained in conf/launcher/process.yaml."""

    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    max_restarts: int = 3
    restart_after: float = 1.0
    min_learners: int = 1
    grace: float = 60.0
    signals: Sequence[str] = SIGNALS
    timeout: float = 60.0
    key_file: str | None = None
    encrypt: bool | None = None
    share_gpus: bool = False
    wire: WireDtype = "float32"

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        signal_numbers(self.signals)
        if self.grace < 0:
            raise InputError(f"launcher.grace={self.grace}: must be at least 0 seconds")
        if self.timeout <= 0:
            raise InputError(f"launcher.timeout={self.timeout}: must be above 0 seconds")
        check_least(self, "launcher", min_learners=1, max_restarts=0, restart_after=0)

    @classmethod
    def parse(cls, launcher: DictConfig, where: str = "launcher") -> LaunchOptions:
        """Builds the options of a launcher. Raises InputError if one is unknown, of another type or out of range."""
        plain = {name: value for name, value in values(launcher).items() if name not in ("name", "suffix")}
        return build(cls, plain, where)

    def of_launch(self) -> dict[str, Any]:
        """Returns those that `runtime.launcher.launch` takes. The others are the learners', or the stage's own."""
        others = ("share_gpus", "wire", "min_learners")
        return {name: value for name, value in asdict(self).items() if name not in others}


@dataclass(frozen=True)
class MmiSection:
    """The options of section `mmi`. They are explained in conf/config.yaml."""

    train: bool
    epochs: int
    chunk: int
    batch_size: int
    rate: float
    anneal: float
    acoustic_scale: float
    ce_weight: float
    windows: Sequence[str]

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        check_least(self, "mmi", epochs=1, chunk=1, batch_size=1)
        for name in ("rate", "anneal"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"mmi.{name}={getattr(self, name)}: must be above 0 and finite")
        if not self.windows:
            raise InputError("mmi.windows: is empty; give at least one window, for instance 63/31")


@dataclass(frozen=True)
class Suits:
    """What suits a model, the options of sections `suits` and `second.suits`. They are explained in conf/suits.yaml."""

    chunk: int
    batch: int
    rate: float
    windows: Sequence[str]
    window: str

    def __post_init__(self) -> None:
        """Raises InputError if there is no window to decode in."""
        if not self.windows:
            raise InputError("suits.windows: is empty; give at least one window, for instance 21/10")


@dataclass(frozen=True)
class SecondSection:
    """The options of section `second`. They are explained in conf/config.yaml."""

    train: bool
    epochs: int
    optimizer: Mapping[str, Any]
    anneal_from: int
    anneal: float
    warmup_batches: int
    model: Mapping[str, Any]
    suits: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        check_least(self, "second", epochs=1)


@dataclass(frozen=True)
class FinalSection:
    """The options of section `final`. They are explained in conf/config.yaml."""

    train: bool
    epochs: int
    rate: float
    anneal_from: int
    anneal: float

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        check_least(self, "final", epochs=1, anneal_from=1)
        for name in ("rate", "anneal"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"final.{name}={getattr(self, name)}: must be above 0")


@dataclass(frozen=True)
class DecodeSection:
    """The options of section `decode`. They are explained in conf/config.yaml."""

    self_loop_scale: float
    search: Mapping[str, float]
    lm_weights: Sequence[float]
    insertion_penalties: Sequence[float]
    nbest: int
    windows: Sequence[str]

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if self.nbest < 0 or self.self_loop_scale < 0:
            raise InputError("decode.nbest and decode.self_loop_scale must not be negative")
        if not self.windows:
            raise InputError("decode.windows: is empty; give at least one window, for instance 21/10")


@dataclass(frozen=True)
class LmSection:
    """The options of group `lm`. They are explained in its files."""

    name: str
    text: str
    units: Literal["word", "sentencepiece"]
    pieces: int
    lattice: Mapping[str, Any]
    learners: int
    launcher: Mapping[str, Any]
    strategy: Mapping[str, Any]
    model: Mapping[str, Any]
    train: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        check_least(self, "lm", pieces=1, learners=1)
        launcher = self.launcher["name"]
        if launcher not in LM_LAUNCHERS:
            raise InputError(f"launcher@lm.launcher={launcher}: must be one of {', '.join(LM_LAUNCHERS)}")
        if launcher == "alone" and self.learners > 1:
            raise InputError(
                f"lm.learners={self.learners} need launcher@lm.launcher=process or launcher@lm.launcher=virtual"
            )
        if self.launcher.get("nodes", 1) != 1:
            raise InputError(f"lm.launcher.nodes={self.launcher['nodes']}: a language model trains on one host")


WER_RECORD = (
    "all", "system", "lm", "seed", "lm_weight", "insertion_penalty", "dev_wer", "commit", "date", "reference"
)  # fmt: skip
"""Names in wer.json (`stages.score.score_run`) beside those of the subsets."""


@dataclass(frozen=True)
class ScoreOptions:
    """The options of section `score`. They are explained in conf/config.yaml."""

    subsets: Mapping[str, str]
    bootstrap: int

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if self.bootstrap < 1:
            raise InputError(f"score.bootstrap={self.bootstrap}: must be a whole number of resamples, at least 1")
        if taken := sorted(set(WER_RECORD) & set(self.subsets)):
            raise InputError(f"score.subsets: {taken[0]!r} is the name of something else in wer.json; choose another")


def check(cfg: DictConfig) -> None:
    """Raises InputError if an option in no section is of another type or out of range, or a name is not plain."""
    if str(cfg.exp).startswith("~"):
        raise InputError(home_hint("exp", str(cfg.exp)))
    top = {field.name: cfg[field.name] for field in fields(RecipeOptions)}
    lists = {name: OmegaConf.to_container(node, resolve=True) for name, node in top.items() if OmegaConf.is_list(node)}
    build(RecipeOptions, top | lists, "")
    for name in ("lm.name", "features.name", "align.system", "model.name", "strategy.name"):
        check_name(name, OmegaConf.select(cfg, name))
    if "+" in str(OmegaConf.select(cfg, "lm.name")):
        raise InputError(f"lm.name={cfg.lm.name}: must have no +, which joins the names of the models of a mixture")
    for section in ("corpus.lms", "corpus.sets"):
        for name in OmegaConf.select(cfg, section) or ():
            check_name(section, name)
    if not OmegaConf.is_missing(cfg.corpus, "name"):
        check_corpus_dir(corpus_dir(cfg))


def job_options(cfg: DictConfig) -> JobOptions:
    """Returns the options of group `jobs`. Raises InputError if one is unknown, of another type or does not fit."""
    return build(JobOptions, values(cfg.jobs), "jobs")


def values(node: DictConfig) -> dict[str, Any]:
    """Returns a config node as a plain dict, interpolations resolved."""
    plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
