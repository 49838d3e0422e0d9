"""Stage 7, decode: graphs in exp/<corpus>/graph; lattices and words in exp/<corpus>/decode/<run>_<lm>."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.options import build
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.egs import input_dirs
from asr_am.stages.systems import SystemPlan, graph_dir, grid_of, language_models, plans, weightings
from asr_am.stages.target import Target


def units(cfg: DictConfig) -> list[Target]:
    """For every system and LM a graph, where systems share it only once, and a decoding run."""
    made: dict[Path, Target] = {}
    for system in plans(cfg):
        for lm in language_models(cfg):
            for unit in (graph_unit(cfg, system, lm), decode_unit(cfg, system, lm)):
                made.setdefault(unit.out, unit)
            if cfg.log_likelihoods:
                unit = likelihood_unit(cfg, f"{system.name}_{lm}")
                made[unit.out] = unit
    return list(made.values())


def graph_unit(cfg: DictConfig, system: SystemPlan, lm: str) -> Target:
    """HCLG of a system's states with an LM."""
    root = corpus_dir(cfg)
    options = {"self_loop_scale": cfg.decode.self_loop_scale}
    inputs = [root / "lang", root / "lm" / lm, root / "align"]
    return Target(graph_dir(cfg, system, lm), inputs, options, partial(graph, root, system.gmm, lm, options))


def decode_unit(cfg: DictConfig, system: SystemPlan, lm: str) -> Target:
    """Dev and test of a system with an LM."""
    root = corpus_dir(cfg)
    grid, options = grid_of(cfg), values(cfg.decode)
    inputs = [root / "data", root / "align", *input_dirs(cfg, system.features), graph_dir(cfg, system, lm)]
    inputs += [system.model] if system.model else []
    work = partial(decode, root, system, graph_dir(cfg, system, lm), grid, options, cfg.nj)
    return Target(root / "decode" / f"{system.name}_{lm}", inputs, options, work)


def likelihood_unit(cfg: DictConfig, run: str) -> Target:
    """The scores of a decoding run as Kaldi archives, for Kaldi's own decoders."""
    root = corpus_dir(cfg)
    decoded, out = root / "decode" / run, root / "likelihoods" / run
    return Target(out, [decoded], {}, partial(likelihoods, decoded, out))


def graph(root: Path, gmm: str, lm: str, options: dict, out: Path) -> None:
    """Build one decoding graph."""
    from asr_am.decode.graph import build_hclg
    from asr_am.hmm.states import StateTable
    from asr_am.hmm.tree import DecisionTree

    folder = root / "align" / gmm
    states, tree = StateTable.load(folder / "states.npz"), DecisionTree.load(folder / "tree.json")
    build_hclg(root / "lang", root / "lm" / lm, states, tree, out, **options)


def decode(
    root: Path, plan: SystemPlan, graph_folder: Path, grid: list[list[float]], options: dict, jobs: int, out: Path
) -> None:
    """Decode dev, choose weights and window on it, decode test."""
    from asr_am.decode.decode_set import decode_sets
    from asr_am.decode.scorer import Window
    from asr_am.decode.search import SearchOptions
    from asr_am.decode.shards import DecodeOptions
    from asr_am.decode.system import System, feature_kind_of

    align_dir, model = root / "align" / plan.gmm, plan.model / "best.pt" if plan.model else None
    system = System(
        align_dir, features_dir=root / "features", lang_dir=root / "lang", graph_dir=graph_folder,
        feature_kind=feature_kind_of(align_dir, model), model=model,
        search=build(SearchOptions, options["search"], "decode.search"),
    )  # fmt: skip
    parts = {"search": system.search, "grid": tuple(weightings(grid)), "nbest": options["nbest"]}
    how = build(DecodeOptions, parts, "decode")
    windows = [Window.parse(text) for text in options["windows"]]
    decode_sets(system, root / "data", out, how, windows=windows, jobs=jobs)


def likelihoods(decoded: Path, final: Path, out: Path) -> None:
    """Scaled log-likelihoods of dev and test by graph label, as `latgen-faster-mapped` wants them with our HCLG.fst."""
    from asr_am.decode.scorer import write_log_likelihoods
    from asr_am.decode.system import System
    from asr_am.features.fusion import InputReader
    from asr_am.hmm.states import StateTable

    system = System.load(decoded)
    states = StateTable.load(system.states)
    for subset in ("dev", "test"):
        utterances = InputReader(system.features_dir, system.feature_kind, subset).utterances
        scp = out / f"{subset}.scp"
        write_log_likelihoods(system.source(subset).load(), utterances, states, scp)
        scp.write_text(scp.read_text().replace(f" {out}/", f" {final}/"))  # the directory's name when it is finished


main = stage("decode", units)

if __name__ == "__main__":
    main()
