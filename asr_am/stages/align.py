"""Stage 3, align: GMM-HMMs from a flat start to speaker-adapted triphones, and the alignments for the network.

Their alignments also give the lexicon of decoding graphs its probabilities, in exp/<corpus>/lang_probs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.options import build, no_such_option
from asr_am.stages.app import stage
from asr_am.stages.layout import Layout, layout
from asr_am.stages.sections import values
from asr_am.stages.target import Target

KALDI = "kaldi"  # align.system of an imported one
ALIGNED_SETS = ["train", "dev"]


def targets(cfg: DictConfig) -> list[Target]:
    """Returns exp/<corpus>/align, with a directory per GMM system, and exp/<corpus>/lang_probs.

    With `corpus.aligned_sets`, exp/<corpus>/alignments has the alignments of these sets as CTM and TextGrid files.
    """
    paths = layout(cfg)
    inputs = [paths.data, paths.lang(), paths.features / "mfcc"]
    options = values(cfg.align)
    out = paths.align
    if options.get("system") == KALDI:
        folders = kaldi_folders(options)
        build_kaldi = partial(import_kaldi, paths, folders)
        return [Target(out, [*inputs[1:], *folders.values()], {"system": KALDI}, build_kaldi)]
    sets = list(cfg.corpus.get("aligned_sets", ALIGNED_SETS))
    key = {**on_cpu(options), "aligned_sets": sets} | ({} if cfg.speed_perturb_gmms else {"copies": False})
    made = [Target(out, inputs, key, partial(align, paths, options, sets, cfg.nj, cfg.speed_perturb_gmms))]
    if graph_lang(cfg) != paths.lang():
        probs, system = graph_lang(cfg), cfg.align.system
        made.append(Target(probs, [*inputs[:2], out], {"system": system}, partial(lexicon_probs, paths, system)))
    if sets != ALIGNED_SETS:
        write = partial(write_alignments, paths, cfg.align.system)
        made.append(Target(paths.alignments, [*inputs[:2], out], {"system": cfg.align.system}, write))
    return made


def on_cpu(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with the default for every `device`, for a key: another device is no reason to run again."""
    named = {name: "cpu" if name == "device" else value for name, value in options.items()}
    return {name: on_cpu(value) if isinstance(value, Mapping) else value for name, value in named.items()}


def graph_lang(cfg: DictConfig) -> Path:
    """Returns the lang directory of decoding graphs."""
    estimated = cfg.lexicon_probs and cfg.align.system != KALDI
    return layout(cfg).lang(probs=estimated)


def lexicon_probs(paths: Layout, system: str, out: Path) -> None:
    """Writes the lang directory with probabilities of pronunciations and silence from the alignments of a system."""
    from asr_am.decode.aligned import count_pairs
    from asr_am.lang.lang_dir import Lang
    from asr_am.lang.prepare import add_probs

    counts = count_pairs(paths.data, paths.align / system, Lang.load(paths.lang()))
    add_probs(paths.data, paths.lang(), counts, out)


def align(paths: Layout, options: dict, sets: list[str], jobs: int, copies: bool, out: Path) -> None:
    """Trains the systems that have a section in `align`, each from the one before. Aligns the sets with each."""
    from asr_am.hmm.align_corpus import align_corpus

    systems = gmm_options(options)
    folders, whole = (paths.data, paths.lang(), paths.features, out), options["system"]
    align_corpus(*folders, sets=sets, jobs=jobs, whole=whole, copies=copies, **systems)


def write_alignments(paths: Layout, system: str, out: Path) -> None:
    """Writes the alignments of a system as CTM and TextGrid files."""
    from asr_am.decode.aligned import write_alignment_ctms
    from asr_am.lang.lang_dir import Lang

    write_alignment_ctms(paths.data, paths.align / system, Lang.load(paths.lang()), out)


def kaldi_folders(options: dict[str, Any]) -> dict[str, Path]:
    """Returns the directories with Kaldi's alignments of train and dev. Raises InputError if one is missing."""
    for name in ("dir", "dev_dir", "lang"):
        if not options.get(name) or not Path(options[name]).is_dir():
            raise InputError(f"align.{name}={options.get(name)}: no such directory; see conf/align/kaldi.yaml")
    return {"train": Path(options["dir"]), "dev": Path(options["dev_dir"])}


def kaldi_ivectors(options: dict[str, Any]) -> dict[str, Path]:
    """Returns the directories with Kaldi's i-vectors by set, {} without. Raises InputError if one is missing."""
    folders, given = {}, options.get("ivectors") or {}
    if not isinstance(given, Mapping):
        raise InputError(f'align.ivectors={given}: must be "{{train: DIR, dev: DIR, test: DIR}}"')
    for subset, folder in given.items():
        if not folder or not (Path(folder) / "ivector_online.scp").is_file():
            raise InputError(f"align.ivectors.{subset}={folder}: has no ivector_online.scp; see conf/align/kaldi.yaml")
        folders[subset] = Path(folder)
    return folders


def kaldi_extractor(options: dict[str, Any]) -> Path | None:
    """Returns the directory of Kaldi's i-vector extractor, None without. Raises InputError if it is missing."""
    folder = options.get("extractor")
    if folder and options.get("ivectors"):
        raise InputError("align.extractor and align.ivectors: give one of them")
    if folder and not (Path(folder) / "final.ie").is_file():
        raise InputError(f"align.extractor={folder}: has no final.ie; see conf/align/kaldi.yaml")
    return Path(folder) if folder else None


def import_kaldi(paths: Layout, folders: dict[str, Path], out: Path) -> None:
    """Writes Kaldi's system and alignments as a system of its own."""
    from asr_am.hmm.kaldi_system import import_system

    import_system(folders, paths.lang(), paths.features, out / KALDI)


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    options = values(cfg.align)
    if options.get("system") == KALDI:
        kaldi_folders(options)
        kaldi_ivectors(options)
        kaldi_extractor(options)
        if options.get("graph") and not (Path(options["graph"]) / "HCLG.fst").is_file():
            raise InputError(f"align.graph={options['graph']}: has no HCLG.fst; see conf/align/kaldi.yaml")
    else:
        gmm_options(options)


def gmm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of each GMM system. Raises InputError if one is unknown, of another type or out of range."""
    from asr_am.hmm.adaptation import FmllrOptions
    from asr_am.hmm.align_corpus import LdaOptions, MonoOptions, SatOptions, TriOptions

    kinds: dict[str, type[Any]] = {"mono": MonoOptions, "tri": TriOptions, "lda_mllt": LdaOptions, "sat": SatOptions}
    sections = {name: section for name, section in options.items() if name != "system"}
    if unknown := [name for name in sections if name not in kinds]:
        raise no_such_option(f"align.{unknown[0]}", [*kinds, "system"])
    if "sat" in sections:
        fmllr = build(FmllrOptions, sections["sat"]["fmllr"], "align.sat.fmllr")
        sections["sat"] = sections["sat"] | {"fmllr": fmllr}
    systems = {name: build(kinds[name], section, f"align.{name}") for name, section in sections.items()}
    if options.get("system") not in systems:
        raise InputError(f"align.system={options.get('system')}: must be one of {', '.join(systems)}")
    return systems


main = stage("align", targets)

if __name__ == "__main__":
    main()
