"""Stage 5, egs: features and pdfs of every utterance as memory-mapped training examples, exp/<corpus>/egs/<name>.

For sequence training also the denominator graph, exp/<corpus>/egs/denominator-<system>, and for chain models and CTC
their states, exp/<corpus>/egs/chain<n>-<system> and chainctc<n>-<system>.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.features.fusion import stack_of
from asr_am.options import build
from asr_am.stages.align import ALIGNED_SETS
from asr_am.stages.app import stage
from asr_am.stages.layout import (
    GMM_FEATURES,
    Layout,
    denominator_path,
    egs_dir,
    has_phone_states,
    input_dirs,
    layout,
    states_name,
)
from asr_am.stages.sections import EgsOptions, values
from asr_am.stages.target import Target

log = logging.getLogger(__name__)


def targets(cfg: DictConfig) -> list[Target]:
    """Returns the examples, named by their features and their alignment, and what sequence training needs."""
    paths = layout(cfg)
    kind, system = cfg.features.name, states_name(cfg)
    aligned = paths.system(system) if has_phone_states(cfg) else paths.align
    options = {"kind": kind, "system": system} | values(cfg.egs)
    options |= {"random_phase": True} if cfg.features.get("random_phase") else {}
    build_egs = partial(pair, paths, options, cfg.nj)
    inputs = [*input_dirs(cfg, kind), aligned]
    size, parts = partial(examples_bytes, paths, options), ("features.*.npy", "targets.*.npy")
    examples = Target(egs_dir(cfg), inputs, options, build_egs, num_bytes=size, checked_in_parts=parts)
    made = [chain_target(cfg), examples] if has_phone_states(cfg) else [examples]
    if cfg.mmi.train or cfg.train.get("mmi") or cfg.train.get("chain"):
        made.append(Target(denominator_path(cfg).parent, [aligned], {}, partial(denominator, paths.system(system))))
    return made


def chain_target(cfg: DictConfig) -> Target:
    """Returns the states of chain models, or those of CTC: phones without context."""
    paths, gmm = layout(cfg), str(cfg.align.system)
    options, subsampling = values(cfg.chain), int(cfg.model.get("subsampling", 1))
    options |= {"leaves": 1} if cfg.train.get("ctc") else {}
    inputs = [paths.lang(), paths.align, *input_dirs(cfg, GMM_FEATURES.get(gmm, "mfcc"))]
    build_states = partial(chain, paths, gmm, options, subsampling, cfg.nj)
    return Target(paths.system(states_name(cfg)), inputs, options | {"subsampling": subsampling}, build_states)


def chain(paths: Layout, gmm: str, options: dict, subsampling: int, jobs: int, out: Path) -> None:
    """Makes the states of chain models from the alignments of a GMM system."""
    from asr_am.hmm.train_chain import ChainTreeOptions, train_chain

    built = build(ChainTreeOptions, options, "chain")
    train_chain(paths.features, paths.lang(), paths.system(gmm), out, built, subsampling, ALIGNED_SETS, jobs)


def pair(paths: Layout, options: dict, jobs: int, out: Path) -> None:
    """Writes the examples of train and dev."""
    from asr_am.egs.egs_writer import make_egs

    plain = dict(options)
    kind, system = plain.pop("kind"), plain.pop("system")
    make_egs(paths.features, kind, paths.system(system), out, jobs=jobs, **plain)


def denominator(align_dir: Path, out: Path) -> None:
    """Makes the denominator graph from the alignments of train."""
    from asr_am.hmm.alignments import read_alignments
    from asr_am.hmm.denominator import denominator_graph
    from asr_am.hmm.states import StateTable
    from asr_am.hmm.train_chain import step_labels

    states = StateTable.load(align_dir / "states.npz")
    alignments = (step_labels(labels_T, states) for _, labels_T in read_alignments(align_dir / "ali", "train"))
    graph = denominator_graph(alignments, states)
    graph.save(out / "graph.npz")
    log.info("denominator graph of %d states, %d arcs", len(graph.pdf_S), graph.arcs_SS.nnz)


def examples_bytes(paths: Layout, options: dict) -> float:
    """Returns the size of the examples in bytes. An aligned frame has 5 bytes in its archive."""
    from asr_am.features.fusion import InputReader

    archives = [paths.system(options["system"]) / "ali" / f"{subset}.ark" for subset in ("train", "dev")]
    frames = sum(path.stat().st_size for path in archives if path.exists()) / 5
    reader = InputReader(paths.features, options["kind"], "train")
    dim = reader.dim - (reader.vectors.dim if reader.vectors else 0)
    return frames / reader.stack * (dim * int(options["dtype"].removeprefix("float")) / 8 + 2)


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    from asr_am.hmm.train_chain import ChainTreeOptions

    build(EgsOptions, values(cfg.egs), "egs")
    build(ChainTreeOptions, values(cfg.chain), "chain")
    if has_phone_states(cfg) and stack_of(cfg.features.name) > 1:
        loss = "ctc" if cfg.train.get("ctc") else "chain"
        raise InputError(
            f"train.{loss}: {cfg.features.name} joins frames; use other features, and model.subsampling for a low rate"
        )
    if cfg.train.get("mmi") and stack_of(cfg.features.name) > 1:
        raise InputError(f"train.mmi: {cfg.features.name} joins frames; use other features")


main = stage("egs", targets)

if __name__ == "__main__":
    main()
