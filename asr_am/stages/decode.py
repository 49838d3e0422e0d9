"""Stage 7, decode: graphs in exp/<corpus>/graph, lattices and words in exp/<corpus>/decode/<run>_<lm>."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.options import build, choices
from asr_am.stages.align import graph_lang
from asr_am.stages.app import stage
from asr_am.stages.layout import CHAIN, SYSTEMS, Layout, input_dirs, layout
from asr_am.stages.networks import mmi_section, second_suits
from asr_am.stages.sections import DecodeSection, values
from asr_am.stages.systems import (
    SystemPlan,
    combined_runs,
    language_models,
    lm_scale_grid,
    plans,
    scales_to_try,
)
from asr_am.stages.target import Target

if TYPE_CHECKING:
    from asr_am.decode.scorer import Window
    from asr_am.decode.search import SearchOptions
    from asr_am.decode.system import System

log = logging.getLogger(__name__)
CHAIN_SELF_LOOP_SCALE = 1.0  # in place of decode.self_loop_scale: chain models are trained with transitions


def targets(cfg: DictConfig) -> list[Target]:
    """Returns graphs and a decoding run for every system and LM. A graph that systems share occurs once."""
    made: dict[Path, Target] = {}
    for system in plans(cfg):
        for lm in language_models(cfg):
            for target in (*graph_targets(cfg, system, lm), decode_target(cfg, system, lm)):
                made.setdefault(target.out, target)
            if cfg.log_likelihoods:
                target = likelihood_target(cfg, f"{system.name}_{lm}")
                made[target.out] = target
    return list(made.values())


def graph_targets(cfg: DictConfig, system: SystemPlan, lm: str) -> list[Target]:
    """Returns the graph HCLG of a system's states with an LM, and the one to decode dev with if that LM knows dev."""
    paths = layout(cfg)
    options, lang, states = graph_options(cfg, system), graph_lang(cfg), system_dir(paths, system)
    build_graph = partial(graph, paths, lang, system.gmm, options)
    made = [Target(
        paths.graph(system.gmm, lm), [lang, paths.lm(lm), states], options, partial(build_graph, paths.lm(lm))
    )]  # fmt: skip
    if (source := cfg.align.get("graph")) and not system.gmm.startswith(CHAIN):
        if len(cfg.lms) != 1:
            raise InputError(f"lms={list(cfg.lms)}: align.graph is the graph of one LM; name it, lms=[NAME]")
        model = Path(cfg.align.dir) / "final.mdl"
        convert = partial(kaldi_graph, paths, Path(source), model)
        made = [Target(paths.graph(system.gmm, lm), [paths.lang(), Path(source), model], {"kaldi": True}, convert)]
    if unseen := paths.unseen_lm(lm):
        inputs = [lang, paths.lm(lm), states]
        made.append(Target(paths.dev_graph(system.gmm, lm), inputs, options, partial(build_graph, unseen)))
    return made


def graph_options(cfg: DictConfig, system: SystemPlan) -> dict[str, float]:
    """Returns the options of a system's graphs."""
    chain = system.gmm.startswith(CHAIN)
    return {"self_loop_scale": CHAIN_SELF_LOOP_SCALE if chain else cfg.decode.self_loop_scale}


def system_dir(paths: Layout, system: SystemPlan) -> Path:
    """Returns the output of an earlier stage that has the system's states."""
    return paths.system(system.gmm) if system.gmm.startswith(CHAIN) else paths.align


def decode_target(cfg: DictConfig, system: SystemPlan, lm: str) -> Target:
    """Returns the decoding run of a system with an LM, on dev and test."""
    paths = layout(cfg)
    grid, options = lm_scale_grid(cfg), values(cfg.decode)
    graphs = sorted({paths.graph(system.gmm, lm), paths.dev_graph(system.gmm, lm)})
    inputs = [paths.data, system_dir(paths, system), *input_dirs(cfg, system.features), *graphs]
    inputs += [folder for folder in (system.model, system.final) if folder]
    inputs += [paths.decoded(f"{run}_{lm}") for run in (*system.combined, system.start) if run]
    key = options | ({"network_windows": list(system.windows)} if system.windows else {})
    build_run = partial(decode, paths, system, lm, grid, options, cfg.nj, cfg.train.device)
    return Target(paths.decoded(f"{system.name}_{lm}"), inputs, key, build_run, version=5)


def likelihood_target(cfg: DictConfig, run: str) -> Target:
    """Returns the log-likelihoods of a decoding run as Kaldi archives, for Kaldi's decoders."""
    paths = layout(cfg)
    decoded, out = paths.decoded(run), paths.likelihoods(run)
    return Target(out, [decoded], {}, partial(likelihoods, decoded, cfg.train.device))


def graph(paths: Layout, lang: Path, gmm: str, options: dict, lm_dir: Path, out: Path) -> None:
    """Builds one decoding graph."""
    from asr_am.decode.graph import build_hclg
    from asr_am.hmm.states import StateTable
    from asr_am.hmm.tree import DecisionTree

    folder = paths.system(gmm)
    states, tree = StateTable.load(folder / "states.npz"), DecisionTree.load(folder / "tree.json")
    build_hclg(lang, lm_dir, states, tree, out, **options)


def kaldi_graph(paths: Layout, source: Path, model: Path, out: Path) -> None:
    """Converts Kaldi's decoding graph."""
    from asr_am.decode.kaldi_graph import import_graph

    import_graph(source, model, paths.lang(), out)


def decode(
    paths: Layout, plan: SystemPlan, lm: str, grid: list[list[float]], options: dict, jobs: int, device: str, out: Path
) -> None:
    """Decodes dev, chooses LM weight, penalty, window and network on it, and decodes test.

    If the LM knows dev, dev is decoded with another one.
    """
    from asr_am.decode.decode_set import decode_sets
    from asr_am.decode.dev_choice import DevChoice
    from asr_am.decode.shards import DecodeOptions
    from asr_am.decode.system import System, feature_kind_of

    align_dir = paths.system(plan.gmm)
    model, final = (folder / "best.pt" if folder else None for folder in (plan.model, plan.final))
    search, _ = search_and_windows(options)
    if plan.combined:
        candidates = [combination([paths.decoded(f"{run}_{lm}") for run in plan.combined])]
    else:
        system = System(
            align_dir, features_dir=paths.features, lang_dir=paths.lang(), graph_dir=paths.graph(plan.gmm, lm),
            feature_kind=feature_kind_of(align_dir, model), model=final or model, search=search,
            before_dev=(model,) if final and model else (),
            dev_graph_dir=paths.dev_graph(plan.gmm, lm) if paths.unseen_lm(lm) else None,
        )  # fmt: skip
        candidates = with_windows(system, plan, options)
    start = paths.decoded(f"{plan.start}_{lm}") if plan.start else None
    if paths.unseen_lm(lm):
        log.info("the LM knows dev, which is decoded with a trigram of the training text")
    how = DecodeOptions(search, tuple(scales_to_try(paths.lm(lm), grid)), options["nbest"], device)
    decode_sets(
        candidates[0], paths.data, out, how, candidates=candidates, jobs=jobs,
        rival=(System.load(start), DevChoice.load(start)) if start else None,
    )  # fmt: skip


def combination(decoded: Sequence[Path]) -> System:
    """Returns the system that averages the scores of networks, each as dev has chosen it and its window.

    Raises:
        InputError: one is not a network's, or the networks have other features or states.
    """
    from asr_am.decode.system import System

    systems = [System.load(folder) for folder in decoded]
    first = systems[0]
    networks: list[tuple[Path, Window]] = []
    before: list[Path] = []  # they were trained on dev
    for system, folder in zip(systems, decoded, strict=True):
        if system.model is None:
            raise InputError(f"combine: {folder.name} has no network")
        if (system.states, system.graph, system.feature_kind) != (first.states, first.graph, first.feature_kind):
            raise InputError(
                f"combine: {folder.name} has other states, features or graph than {decoded[0].name}; "
                "python -m asr_am.score.rover combines the words of such systems"
            )
        networks += system.networks
        before += [model for model, _ in system.on_dev.networks]
    before_dev = tuple(before) if any(system.before_dev for system in systems) else ()
    return replace(first, others=tuple(networks[1:]), before_dev=before_dev)


def with_windows(system: System, plan: SystemPlan, options: Mapping[str, Any]) -> list[System]:
    """Returns the system with each window to try."""
    from asr_am.decode.scorer import Window

    _, windows = search_and_windows(options)
    if system.model is None:
        return [system]
    own = [Window.parse(text, "mmi.windows") for text in plan.windows] if plan.windows else windows
    return [replace(system, window=window) for window in own]


def likelihoods(decoded: Path, device: str, out: Path) -> None:
    """Writes scaled log-likelihoods of dev and test by graph label, for `latgen-faster-mapped` with our HCLG.fst."""
    from asr_am.decode.score_server import scores_from_gpu
    from asr_am.decode.scorer import write_log_likelihoods
    from asr_am.decode.system import System
    from asr_am.features.fusion import InputReader
    from asr_am.hmm.states import StateTable

    system = System.load(decoded)
    states = StateTable.load(system.states)
    for subset in ("dev", "test"):
        utterances = InputReader(system.features_dir, system.feature_kind, subset).utterances
        with scores_from_gpu(system.of(subset).source(subset), device) as source:
            write_log_likelihoods(source.load(), utterances, states, out / f"{subset}.scp")


def search_and_windows(options: Mapping[str, Any]) -> tuple[SearchOptions, list[Window]]:
    """Returns beams and windows of the group `decode`. Raises InputError for an option of the group that is wrong."""
    from asr_am.decode.scorer import Window
    from asr_am.decode.search import SearchOptions

    given = build(DecodeSection, options, "decode")
    return build(SearchOptions, given.search, "decode.search"), [Window.parse(text) for text in given.windows]


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    from asr_am.decode.scorer import Window

    search_and_windows(values(cfg.decode))
    for text in mmi_section(cfg).windows:
        Window.parse(text, "mmi.windows")
    for text in second_suits(cfg).windows:
        Window.parse(text, "second.suits.windows")
    lm_scale_grid(cfg)
    language_models(cfg)
    combined_runs(cfg)
    if unknown := [name for name in cfg.systems if name not in SYSTEMS]:
        raise InputError(f"systems: {unknown[0]!r} is unknown{choices(str(unknown[0]), SYSTEMS)}")


main = stage("decode", targets)

if __name__ == "__main__":
    main()
