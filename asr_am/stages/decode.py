"""Stage 7, decode: graphs in exp/<corpus>/graph, lattices and words in exp/<corpus>/decode/<run>_<lm>."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from asr_am import disk
from asr_am.errors import InputError
from asr_am.options import build, choices
from asr_am.stages.align import graph_lang
from asr_am.stages.app import stage
from asr_am.stages.layout import CHAIN, Layout, input_dirs, layout
from asr_am.stages.networks import mmi_section, second_suits
from asr_am.stages.sections import DecodeSection, values
from asr_am.stages.systems import (
    SYSTEMS,
    Chosen,
    SystemPlan,
    chosen_on_dev,
    language_models,
    lm_scale_grid,
    lm_scales,
    plans,
    scales_to_try,
)
from asr_am.stages.target import Target

if TYPE_CHECKING:
    from asr_am.decode.scorer import Window
    from asr_am.decode.search import SearchOptions
    from asr_am.decode.shards import DecodeOptions
    from asr_am.decode.system import System

log = logging.getLogger(__name__)
CHAIN_SELF_LOOP_SCALE = 1.0  # in place of decode.self_loop_scale: chain models are trained with transitions


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
    paths = layout(cfg)
    options = graph_options(cfg, system)
    if (source := cfg.align.get("graph")) and not system.gmm.startswith(CHAIN):
        if len(cfg.lms) != 1:
            raise InputError(f"lms={list(cfg.lms)}: align.graph is the graph of one LM; name it, lms=[NAME]")
        model = Path(cfg.align.dir) / "final.mdl"
        inputs = [paths.lang(), Path(source), model]
        return Target(
            paths.graph(system.gmm, lm), inputs, {"kaldi": True}, partial(kaldi_graph, paths, Path(source), model)
        )
    lang = graph_lang(cfg)
    inputs = [lang, paths.lm(lm), system_dir(paths, system)]
    return Target(paths.graph(system.gmm, lm), inputs, options, partial(graph, paths, lang, system.gmm, lm, options))


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
    inputs = [paths.data, system_dir(paths, system), *input_dirs(cfg, system.features), paths.graph(system.gmm, lm)]
    inputs += [system.model] if system.model else []
    inputs += [paths.decoded(f"{run}_{lm}") for run in (*system.combined, system.start) if run]
    key = options | ({"network_windows": list(system.windows)} if system.windows else {})
    unseen_graph = partial(graph, paths, graph_lang(cfg), system.gmm, f"{lm}/unseen", graph_options(cfg, system))
    build_run = partial(
        decode, paths, system, lm, paths.graph(system.gmm, lm), unseen_graph, grid, options, cfg.nj, cfg.train.device
    )
    return Target(paths.decoded(f"{system.name}_{lm}"), inputs, key, build_run, version=5)


def likelihood_target(cfg: DictConfig, run: str) -> Target:
    """Returns the log-likelihoods of a decoding run as Kaldi archives, for Kaldi's decoders."""
    paths = layout(cfg)
    decoded, out = paths.decoded(run), paths.likelihoods(run)
    return Target(out, [decoded], {}, partial(likelihoods, decoded, cfg.train.device))


def graph(paths: Layout, lang: Path, gmm: str, lm: str, options: dict, out: Path) -> None:
    """Builds one decoding graph."""
    from asr_am.decode.graph import build_hclg
    from asr_am.hmm.states import StateTable
    from asr_am.hmm.tree import DecisionTree

    folder = paths.system(gmm)
    states, tree = StateTable.load(folder / "states.npz"), DecisionTree.load(folder / "tree.json")
    build_hclg(lang, paths.lm(lm), states, tree, out, **options)


def kaldi_graph(paths: Layout, source: Path, model: Path, out: Path) -> None:
    """Converts Kaldi's decoding graph."""
    from asr_am.decode.kaldi_graph import import_graph

    import_graph(source, model, paths.lang(), out)


def decode(
    paths: Layout, plan: SystemPlan, lm: str, graph_folder: Path, unseen_graph: Callable[[Path], None],
    grid: list[list[float]], options: dict, jobs: int, device: str, out: Path,
) -> None:  # fmt: skip
    """Decodes dev, chooses LM weight, penalty, window and network on it, and decodes test.

    If the LM knows dev, all are those that are best on dev with an LM that does not, whose graph `unseen_graph` builds.
    The errors on dev are those with that LM, too.
    """
    from asr_am.decode.decode_set import decode_sets
    from asr_am.decode.dev_choice import DevChoice
    from asr_am.decode.shards import DecodeOptions
    from asr_am.decode.system import System, feature_kind_of
    from asr_am.lang.prepare import UNSEEN, knows_dev

    align_dir, model = paths.system(plan.gmm), plan.model / "best.pt" if plan.model else None
    search, _ = search_and_windows(options)
    if plan.combined:
        candidates = [combination([paths.decoded(f"{run}_{lm}") for run in plan.combined])]
    else:
        system = System(
            align_dir, features_dir=paths.features, lang_dir=paths.lang(), graph_dir=graph_folder,
            feature_kind=feature_kind_of(align_dir, model), model=model, search=search,
        )  # fmt: skip
        candidates = with_windows(system, plan, options)
    if plan.start:
        candidates.append(System.load(paths.decoded(f"{plan.start}_{lm}")))
    how = DecodeOptions(search, tuple(lm_scales(grid)), options["nbest"], device)
    without_dev = knows_dev(paths.lm(lm)) and (paths.lm(lm) / UNSEEN).is_dir()
    if without_dev:
        unseen = [replace(candidate, graph_dir=out / UNSEEN / "graph") for candidate in candidates]
        chosen = choose_without_dev(unseen, paths.data, how, jobs, unseen_graph, out)
        network = next(candidate for candidate in candidates if candidate.network == chosen.network)
        candidates = [replace(network, window=chosen.window)]
    how = replace(how, grid=tuple(scales_to_try(paths.lm(lm), grid, out)))
    decode_sets(candidates[0], paths.data, out, how, candidates=candidates, jobs=jobs)
    if without_dev:
        DevChoice.load(out / UNSEEN).save(out)


def combination(decoded: Sequence[Path]) -> System:
    """Returns the system that averages the scores of networks, each as dev has chosen it and its window.

    Raises:
        InputError: one is not a network's, or the networks have other features or states.
    """
    from asr_am.decode.system import System

    systems = [System.load(folder) for folder in decoded]
    first = systems[0]
    networks: list[tuple[Path, Window]] = []
    for system, folder in zip(systems, decoded, strict=True):
        if system.model is None:
            raise InputError(f"combine: {folder.name} has no network")
        if (system.states, system.graph, system.feature_kind) != (first.states, first.graph, first.feature_kind):
            raise InputError(
                f"combine: {folder.name} has other states, features or graph than {decoded[0].name}; "
                "python -m asr_am.score.rover combines the words of such systems"
            )
        networks += [(system.model, system.window), *system.others]
    return replace(first, others=tuple(networks[1:]))


def with_windows(system: System, plan: SystemPlan, options: Mapping[str, Any]) -> list[System]:
    """Returns the system with each window to try."""
    from asr_am.decode.scorer import Window

    _, windows = search_and_windows(options)
    if system.model is None:
        return [system]
    own = [Window.parse(text, "mmi.windows") for text in plan.windows] if plan.windows else windows
    return [replace(system, window=window) for window in own]


def choose_without_dev(
    candidates: Sequence[System], data_dir: Path, how: DecodeOptions, jobs: int, build_graph: Callable[[Path], None],
    out: Path,
) -> Chosen:  # fmt: skip
    """Chooses on dev, with a graph whose LM does not know dev, unless that is done.

    Writes decode.json and best_on_dev.json into <out>/unseen.
    """
    from asr_am.decode.decode_set import decode_sets
    from asr_am.decode.dev_choice import DevChoice
    from asr_am.lang.prepare import UNSEEN

    report, work, graph_dir = out / UNSEEN / "decode.json", out / UNSEEN / "work", candidates[0].graph_dir
    if not report.exists():
        log.info("the LM knows dev: its weight and the window are chosen with a trigram of the training text")
        graph_dir.mkdir(parents=True, exist_ok=True)
        build_graph(graph_dir)
        decode_sets(candidates[0], data_dir, work, how, sets=["dev"], candidates=candidates, jobs=jobs)
        DevChoice.load(work).save(out / UNSEEN)
        (work / "decode.json").rename(report)
    for folder in (work, graph_dir):  # a run that was killed here has left them
        disk.remove(folder)
    return chosen_on_dev(report)


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
        with scores_from_gpu(system.source(subset), device) as source:
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
    if unknown := [name for name in cfg.systems if name not in SYSTEMS]:
        raise InputError(f"systems: {unknown[0]!r} is unknown{choices(str(unknown[0]), SYSTEMS)}")


main = stage("decode", targets)

if __name__ == "__main__":
    main()
