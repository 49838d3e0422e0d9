"""Stage 7, decode: graphs in exp/<corpus>/graph, lattices and words in exp/<corpus>/decode/<run>_<lm>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.options import build, choices
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.egs import input_dirs
from asr_am.stages.systems import (
    GMM_FEATURES,
    SystemPlan,
    graph_dir,
    language_models,
    lm_scale_grid,
    plans,
    scales_to_try,
)
from asr_am.stages.target import Target

if TYPE_CHECKING:
    from asr_am.decode.scorer import Window
    from asr_am.decode.search import SearchOptions


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


def targets(cfg: DictConfig) -> list[Target]:
    """Returns a graph and a decoding run for every system and LM. A graph that systems share occurs once."""
    made: dict[Path, Target] = {}
    for system in plans(cfg):
        for lm in language_models(cfg):
            for target in (graph_target(cfg, system, lm), decode_target(cfg, system, lm)):
                made.setdefault(target.out, target)
            if cfg.log_likelihoods:
                target = likelihood_target(cfg, f"{system.name}_{lm}")
                made[target.out] = target
    return list(made.values())


def graph_target(cfg: DictConfig, system: SystemPlan, lm: str) -> Target:
    """Returns the graph HCLG of a system's states with an LM."""
    root = corpus_dir(cfg)
    options = {"self_loop_scale": cfg.decode.self_loop_scale}
    inputs = [root / "lang", root / "lm" / lm, root / "align"]
    return Target(graph_dir(cfg, system, lm), inputs, options, partial(graph, root, system.gmm, lm, options))


def decode_target(cfg: DictConfig, system: SystemPlan, lm: str) -> Target:
    """Returns the decoding run of a system with an LM, on dev and test."""
    root = corpus_dir(cfg)
    grid, options = lm_scale_grid(cfg), values(cfg.decode)
    inputs = [root / "data", root / "align", *input_dirs(cfg, system.features), graph_dir(cfg, system, lm)]
    inputs += [system.model] if system.model else []
    build_run = partial(decode, root, system, lm, graph_dir(cfg, system, lm), grid, options, cfg.nj)
    return Target(root / "decode" / f"{system.name}_{lm}", inputs, options, build_run)


def likelihood_target(cfg: DictConfig, run: str) -> Target:
    """Returns the log-likelihoods of a decoding run as Kaldi archives, for Kaldi's decoders."""
    root = corpus_dir(cfg)
    decoded, out = root / "decode" / run, root / "likelihoods" / run
    return Target(out, [decoded], {}, partial(likelihoods, decoded))


def graph(root: Path, gmm: str, lm: str, options: dict, out: Path) -> None:
    """Builds one decoding graph."""
    from asr_am.decode.graph import build_hclg
    from asr_am.hmm.states import StateTable
    from asr_am.hmm.tree import DecisionTree

    folder = root / "align" / gmm
    states, tree = StateTable.load(folder / "states.npz"), DecisionTree.load(folder / "tree.json")
    build_hclg(root / "lang", root / "lm" / lm, states, tree, out, **options)


def decode(
    root: Path, plan: SystemPlan, lm: str, graph_folder: Path, grid: list[list[float]], options: dict, jobs: int,
    out: Path,
) -> None:  # fmt: skip
    """Decodes dev, chooses LM weight, penalty and window on it, and decodes test.

    Args:
        root: exp/<corpus>.
        plan: the system.
        lm: name of the LM.
        graph_folder: its graph.
        grid: LM weights and insertion penalties.
        options: the group `decode`.
        jobs: parallel jobs.
        out: directory to write into.
    """
    from asr_am.decode.decode_set import decode_sets
    from asr_am.decode.shards import DecodeOptions
    from asr_am.decode.system import System, feature_kind_of
    from asr_am.stages.score import best_on_dev

    align_dir, model = root / "align" / plan.gmm, plan.model / "best.pt" if plan.model else None
    search, windows = search_and_windows(options)
    system = System(
        align_dir, features_dir=root / "features", lang_dir=root / "lang", graph_dir=graph_folder,
        feature_kind=feature_kind_of(align_dir, model), model=model, search=search,
    )  # fmt: skip
    how = DecodeOptions(search, tuple(scales_to_try(root / "lm" / lm, grid)), options["nbest"])
    decode_sets(
        system, root / "data", out, how, windows=windows, jobs=jobs,
        choose_scale=lambda ctms: best_on_dev(root / "data", how.grid, jobs, f"{out.stem} on dev", ctms)[0],
    )  # fmt: skip


def likelihoods(decoded: Path, out: Path) -> None:
    """Writes scaled log-likelihoods of dev and test by graph label, for `latgen-faster-mapped` with our HCLG.fst."""
    from asr_am.decode.scorer import write_log_likelihoods
    from asr_am.decode.system import System
    from asr_am.features.fusion import InputReader
    from asr_am.hmm.states import StateTable

    system = System.load(decoded)
    states = StateTable.load(system.states)
    for subset in ("dev", "test"):
        utterances = InputReader(system.features_dir, system.feature_kind, subset).utterances
        write_log_likelihoods(system.source(subset).load(), utterances, states, out / f"{subset}.scp")


def search_and_windows(options: Mapping[str, Any]) -> tuple[SearchOptions, list[Window]]:
    """Returns beams and windows of the group `decode`. Raises InputError for an option of the group that is wrong."""
    from asr_am.decode.scorer import Window
    from asr_am.decode.search import SearchOptions

    given = build(DecodeSection, options, "decode")
    return build(SearchOptions, given.search, "decode.search"), [Window.parse(text) for text in given.windows]


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    search_and_windows(values(cfg.decode))
    lm_scale_grid(cfg)
    language_models(cfg)
    if unknown := [name for name in cfg.systems if name not in (*GMM_FEATURES, "nnet")]:
        raise InputError(f"systems: {unknown[0]!r} is unknown{choices(str(unknown[0]), [*GMM_FEATURES, 'nnet'])}")


main = stage("decode", targets)

if __name__ == "__main__":
    main()
