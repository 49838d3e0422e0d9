"""Writes Kaldi's directories: `python -m asr_am.kaldi_export --exp exp/an4 --system sat [--decode RUN] --out DIR`.

    DIR/lang/              phones.txt, words.txt, L.fst, L_disambig.fst, oov.txt, phones/
    DIR/<system>_<set>/    tree, final.mdl, ali.1.gz, num_jobs, phones.txt, and where the system has them final.mat,
                           splice_opts, cmvn_opts and trans.1

and with --decode, for a run of exp/an4/decode:

    DIR/<run>/graph/       HCLG.fst, words.txt, phones.txt
    DIR/<run>/<set>/       lat.1.gz (CompactLattice), post.1.gz (posteriors of transition-ids at the run's LM weight),
                           num_jobs
    DIR/<run>/             final.mdl, and of a network priors.vec and <set>/loglikes.scp (a column per pdf)

`latgen-faster-mapped final.mdl graph/HCLG.fst scp:<set>/loglikes.scp ark:lat` decodes with these.

Alignments are transition-ids, as `ali-to-phones`, `ali-to-pdf` and `convert-ali` read them. Matrices and transforms
take MFCCs with mean normalisation per speaker, spliced by `splice_opts`.
"""

from __future__ import annotations

import argparse
import gzip
import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import kaldiio
import numpy as np

from asr_am.data.kaldi_binary import KaldiWriter
from asr_am.data.ownership import check_own_dir, mark_own_dir
from asr_am.data.textfile import write_lines
from asr_am.decode.kaldi_lattice import compact_lattice_bytes, frame_posteriors, graph_with_ids, posterior_bytes
from asr_am.decode.lattice import read_lattices
from asr_am.decode.loading import load_network
from asr_am.decode.scorer import log_priors, write_log_likelihoods
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.features.adapted import Projection, read_transforms
from asr_am.features.fusion import InputReader
from asr_am.features.kinds import read_kind
from asr_am.hmm.alignments import read_alignments
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.gmm_system import PROJECTION, TRANSFORMS, GmmSystem
from asr_am.hmm.kaldi_model import transition_ids, write_model
from asr_am.hmm.kaldi_tree import write_tree
from asr_am.hmm.states import StateTable
from asr_am.lang.fst_file import read_fst, write_fst
from asr_am.lang.lang_dir import Lang
from asr_am.options import check_name
from asr_am.score.cli import exit_code

COMMAND = "asr_am.kaldi_export"


def export(root: Path, system: str, out: Path) -> list[Path]:
    """Writes the directories of exp/<corpus>/align/<system>.

    Raises:
        InputError: the system is missing or damaged, or a directory exists that was not made by this program.
    """
    folder = GmmSystem.find(root / "align", system)
    model, lang = GmmSystem.load(folder), Lang.load(root / "lang")
    subsets = sorted(path.stem for path in (folder / "ali").glob("*.ark"))
    targets = {subset: out / f"{system}_{subset}" for subset in subsets}
    _make_dirs(out / "lang", *targets.values())
    written = [write_lang(lang, out / "lang")]
    for subset, target in targets.items():
        write_tree(target / "tree", model.tree)
        write_model(target / "final.mdl", model.states, model.gmms)
        shutil.copyfile(root / "lang/phones.txt", target / "phones.txt")
        _write_alignments(folder / "ali", subset, target)
        write_lines(target / "num_jobs", ["1"])
        if (folder / PROJECTION).is_file():
            _write_adaptation(root, folder, subset, target)
        written.append(target)
    return written


def export_decoding(root: Path, run: str, out: Path) -> list[Path]:
    """Writes graph, lattices and posteriors of a decoding run, and of a network its scores and priors."""
    folder = root / "decode" / check_name("--decode", run)
    system = System.load(folder)
    states, target = StateTable.load(system.states), out / run
    if states.first_steps:
        raise InputError(f"{folder}: is of a chain model, which can only be exported by asr_am.network_export")
    _make_dirs(target)
    (target / "graph").mkdir(exist_ok=True)
    gmms = GmmSystem.load(system.align_dir).gmms
    write_model(target / "final.mdl", states, gmms)
    graph = FstArrays.from_fst(read_fst(system.graph, "run stage 7 (decode) again"))
    write_fst(graph_with_ids(graph).to_fst(), target / "graph/HCLG.fst")
    for name in ("words.txt", "phones.txt"):
        shutil.copyfile(system.lang_dir / name, target / "graph" / name)
    for archived in sorted((folder / "lattices").glob("*.ark")):
        subset = target / archived.stem
        subset.mkdir(exist_ok=True)
        _write_lattices(archived, system.lm_scale.lm, subset)
        write_lines(subset / "num_jobs", ["1"])
        if system.model is not None:
            utterances = InputReader(system.features_dir, system.feature_kind, archived.stem).utterances
            scorer = system.of(archived.stem).source(archived.stem).load()
            write_log_likelihoods(scorer, utterances, None, subset / "loglikes.scp")
    if system.model is not None:
        counts_P = load_network(system.model)[1]["pdf_counts"].numpy()
        writer = KaldiWriter()
        writer.vector(np.exp(log_priors(counts_P)))
        writer.save(target / "priors.vec")
    return [target]


def _make_dirs(*folders: Path) -> None:
    """Makes folders to write into. Raises InputError, before any is made, if one has files of the user."""
    for folder in folders:
        check_own_dir(folder, COMMAND)
    for folder in folders:
        mark_own_dir(folder, COMMAND)


def _write_lattices(archived: Path, lm_weight: float, target: Path) -> None:
    with (
        gzip.GzipFile(target / "lat.1.gz", "wb", mtime=0) as lattices,
        gzip.GzipFile(target / "post.1.gz", "wb", mtime=0) as posteriors,
    ):
        for utterance, lattice in read_lattices(archived):
            lattices.write(utterance.encode() + b" " + compact_lattice_bytes(lattice))
            posteriors.write(utterance.encode() + b" " + posterior_bytes(frame_posteriors(lattice, lm_weight)))


def write_lang(lang: Lang, out: Path) -> Path:
    """Writes the parts of Kaldi's data/lang that do not depend on its scripts."""
    (out / "phones").mkdir(parents=True, exist_ok=True)
    for name in ("phones.txt", "words.txt", "L.fst", "L_disambig.fst"):
        shutil.copyfile(lang.directory / name, out / name)
    write_lines(out / "oov.txt", [lang.word_names[lang.unk]])
    lists = {
        "silence": lang.silence_phones, "nonsilence": lang.nonsilence_phones,
        "optional_silence": [lang.optional_silence], "disambig": lang.disambig,
    }  # fmt: skip
    for name, phones in lists.items():
        write_lines(out / "phones" / f"{name}.txt", [lang.phone_names[phone] for phone in phones])
        write_lines(out / "phones" / f"{name}.int", [str(phone) for phone in phones])
        write_lines(out / "phones" / f"{name}.csl", [":".join(map(str, phones))])
    roots = [" ".join(["shared", "split", *(lang.phone_names[phone] for phone in root)]) for root in lang.roots]
    write_lines(out / "phones/roots.txt", roots)
    entries = [
        " ".join([word, word, *(lang.phone_names[phone] for phone in phones)])
        for word, variants in lang.pronunciations.items()
        for phones in variants
    ]
    write_lines(out / "phones/align_lexicon.txt", entries)
    return out


def _write_alignments(folder: Path, subset: str, target: Path) -> None:
    with gzip.GzipFile(target / "ali.1.gz", "wb", mtime=0) as file:
        for utterance, labels_T in read_alignments(folder, subset):
            buffer = io.BytesIO()
            kaldiio.save_ark(buffer, {utterance: transition_ids(labels_T)})
            file.write(buffer.getbuffer())


def _write_adaptation(root: Path, folder: Path, subset: str, target: Path) -> None:
    """Writes the LDA+MLLT matrix and, of a speaker-adapted system, the speakers' transforms."""
    projection = Projection.load(folder / PROJECTION, read_kind(root / "features/mfcc").dim)
    projection.save(target / "final.mat")
    write_lines(target / "splice_opts", [f"--left-context={projection.context} --right-context={projection.context}"])
    write_lines(target / "cmvn_opts", [""])
    own = folder / TRANSFORMS if subset == "train" else root / "features/fmllr"
    if GmmSystem.kind(folder) == "fmllr" and (own / f"{subset}_trans.scp").is_file():
        kaldiio.save_ark(str(target / "trans.1"), read_transforms(own, subset, projection.dim))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exp", type=Path, required=True, metavar="DIR", help="output of a recipe: exp/<corpus>")
    parser.add_argument("--system", default="sat", help="GMM system (default: sat)")
    parser.add_argument("--decode", metavar="RUN", help="also write this run of exp/<corpus>/decode")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write into")
    options = parser.parse_args(arguments)

    def work() -> None:
        for path in export(options.exp, options.system, options.out):
            print(path)
        if options.decode:
            print(*export_decoding(options.exp, options.decode, options.out))

    return exit_code(COMMAND, work)


if __name__ == "__main__":
    sys.exit(main())
