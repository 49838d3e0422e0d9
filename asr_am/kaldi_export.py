"""Writes a GMM system as Kaldi's directories: `python -m asr_am.kaldi_export --exp exp/an4 --system sat --out DIR`.

    DIR/lang/              phones.txt, words.txt, L.fst, L_disambig.fst, oov.txt, phones/
    DIR/<system>_<set>/    tree, final.mdl, ali.1.gz, num_jobs, phones.txt, and where the system has them final.mat,
                           splice_opts, cmvn_opts and trans.1

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

from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.features.adapted import Projection, read_transforms
from asr_am.features.reader import read_options
from asr_am.hmm.alignments import read_alignments
from asr_am.hmm.gmm_system import PROJECTION, TRANSFORMS, GmmSystem
from asr_am.hmm.kaldi_model import transition_ids, write_model
from asr_am.hmm.kaldi_tree import write_tree
from asr_am.lang.lang_dir import Lang


def export(root: Path, system: str, out: Path) -> list[Path]:
    """Writes the directories.

    Args:
        root: exp/<corpus>.
        system: name of the GMM system, a folder of exp/<corpus>/align.
        out: the directory to write into.

    Returns:
        The directories.

    Raises:
        InputError: the system has not been trained, or a file of it is damaged.
    """
    folder = root / "align" / system
    if not GmmSystem.is_complete(folder):
        raise InputError(f"{folder}: no such GMM system; run stage 3 (align)")
    model, lang = GmmSystem.load(folder), Lang.load(root / "lang")
    written = [write_lang(lang, out / "lang")]
    for subset in sorted(path.stem for path in (folder / "ali").glob("*.ark")):
        target = out / f"{system}_{subset}"
        target.mkdir(parents=True, exist_ok=True)
        write_tree(target / "tree", model.tree)
        write_model(target / "final.mdl", model.states, model.gmms)
        shutil.copyfile(root / "lang/phones.txt", target / "phones.txt")
        _write_alignments(folder / "ali", subset, target)
        write_lines(target / "num_jobs", ["1"])
        if (folder / PROJECTION).is_file():
            _write_adaptation(root, folder, subset, target)
        written.append(target)
    return written


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
    num_ceps = read_options(root / "features/mfcc").num_ceps
    assert num_ceps is not None  # of MFCCs
    projection = Projection.load(folder / PROJECTION, num_ceps)
    projection.save(target / "final.mat")
    write_lines(target / "splice_opts", [f"--left-context={projection.context} --right-context={projection.context}"])
    write_lines(target / "cmvn_opts", [""])
    own = folder / TRANSFORMS if subset == "train" else root / "features/fmllr"
    if GmmSystem.kind(folder) == "fmllr" and (own / f"{subset}_trans.scp").is_file():
        kaldiio.save_ark(str(target / "trans.1"), read_transforms(own, subset, projection.dim))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m asr_am.kaldi_export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exp", type=Path, required=True, metavar="DIR", help="output of a recipe: exp/<corpus>")
    parser.add_argument("--system", default="sat", help="GMM system (default: sat)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write into")
    options = parser.parse_args(arguments)
    try:
        for path in export(options.exp, options.system, options.out):
            print(path)
    except InputError as error:
        print(f"asr_am.kaldi_export: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
