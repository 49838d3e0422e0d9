"""Stage 3, align: GMM-HMMs from a flat start to speaker-adapted triphones, and the alignments for the network."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.options import build, no_such_option
from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.target import Target

KALDI = "kaldi"  # align.system of an imported one


def targets(cfg: DictConfig) -> list[Target]:
    """Returns exp/<corpus>/align, with a directory per GMM system."""
    root = corpus_dir(cfg)
    inputs = [root / "data", root / "lang", root / "features/mfcc"]
    options = values(cfg.align)
    out = root / "align"
    if options.get("system") == KALDI:
        folders = kaldi_folders(options)
        build_kaldi = partial(import_kaldi, root, folders)
        return [Target(out, [*inputs[1:], *folders.values()], {"system": KALDI}, build_kaldi)]
    return [Target(out, inputs, options, partial(align, root, options, cfg.nj))]


def align(root: Path, options: dict, jobs: int, out: Path) -> None:
    """Trains the systems that have a section in `align`, each from the one before. Aligns train and dev with each.

    Args:
        root: exp/<corpus>.
        options: the group `align`.
        jobs: parallel jobs.
        out: directory to write into.
    """
    from asr_am.hmm.align_corpus import align_corpus

    systems = gmm_options(options)
    align_corpus(root / "data", root / "lang", root / "features", out, jobs=jobs, **systems)


def kaldi_folders(options: dict[str, Any]) -> dict[str, Path]:
    """Returns the directories with Kaldi's alignments of train and dev. Raises InputError if one is missing."""
    folders = {}
    for subset, name in (("train", "dir"), ("dev", "dev_dir"), ("lang", "lang")):
        if not options.get(name) or not Path(options[name]).is_dir():
            raise InputError(f"align.{name}={options.get(name)}: no such directory; see conf/align/kaldi.yaml")
        folders[subset] = Path(options[name])
    del folders["lang"]
    return folders


def import_kaldi(root: Path, folders: dict[str, Path], out: Path) -> None:
    """Writes Kaldi's system and alignments as a system of its own."""
    from asr_am.hmm.kaldi_system import import_system

    import_system(folders, root / "lang", root / "features", out / KALDI)


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    options = values(cfg.align)
    if options.get("system") == KALDI:
        kaldi_folders(options)
    else:
        gmm_options(options)


def gmm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of each GMM system.

    Args:
        options: the group `align`.

    Raises:
        InputError: an option is unknown, of another type or out of range.
    """
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
