"""A Kaldi GMM system with its alignments (`exp/tri4_ali`) as one of ours, for networks to be trained on.

Shapes: T frames of one utterance.
"""

from __future__ import annotations

import gzip
import io
import logging
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from asr_am.data.kaldi_archive import read_entries, reason, write_archive
from asr_am.data.npz import DAMAGE
from asr_am.errors import InputError
from asr_am.features.reader import FeatureReader
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.kaldi_model import TransitionModel, read_model
from asr_am.hmm.kaldi_tree import read_tree
from asr_am.lang.lang_dir import Lang, read_symbols

logger = logging.getLogger(__name__)

REMEDY = "give an alignment directory of Kaldi (steps/align_si.sh, steps/align_fmllr.sh)"
MIN_ALIGNED = 0.5  # smallest share of a set's utterances


def import_system(folders: dict[str, Path], lang_dir: Path, features_dir: Path, out: Path) -> None:
    """Writes the system and its alignments.

    Args:
        folders: alignment directory of each set. The system is that of train.
        lang_dir: the lang directory that stage lang has made from Kaldi's.

    Raises:
        InputError: a file is missing or damaged, or the files do not belong together.
    """
    lang = Lang.load(lang_dir)
    source = folders["train"]
    transitions, gmms = read_model(source / "final.mdl")
    _check_phones(source, transitions, lang)
    tree = read_tree(source / "tree", transitions.states_P)
    states = transitions.state_table()
    if tree.num_pdfs != states.num_pdfs:
        raise InputError(f"{source / 'tree'}: {tree.num_pdfs} pdfs, but final.mdl has {states.num_pdfs}; {REMEDY}")
    (out / "ali").mkdir(parents=True, exist_ok=True)
    for subset, folder in folders.items():
        if subset != "train" and not np.array_equal(read_model(folder / "final.mdl")[0].triples_L3, states.labels_L3):
            raise InputError(f"{folder / 'final.mdl'}: not the system of {source}; align {subset} with that one")
        reader = FeatureReader(features_dir, "mfcc", subset)
        labels = dict(_read_labels(folder, transitions, reader))
        share = len(labels) / len(reader)
        logger.info("%s: alignments of %d of %d utterances of %s", folder, len(labels), len(reader), subset)
        if share < MIN_ALIGNED:
            raise InputError(
                f"{folder}: alignments of only {len(labels)} of {len(reader)} utterances of {subset}; check "
                "that it was made from the same data directory"
            )
        write_archive(out / "ali", subset, sorted(labels.items()))
    GmmSystem(tree, states, gmms).save(out)


def _check_phones(folder: Path, transitions: TransitionModel, lang: Lang) -> None:
    """Raises InputError unless the system has the phones of the lang directory, under the same numbers."""
    own = folder / "phones.txt"
    if own.is_file() and read_symbols(own, REMEDY) != lang.phones:
        raise InputError(f"{own}: other phones than those of align.lang; give the lang directory of this system")
    if transitions.states_P.keys() != {*lang.silence_phones, *lang.nonsilence_phones}:
        raise InputError(f"{folder / 'final.mdl'}: other phones than those of align.lang; give that of this system")


def _read_labels(
    folder: Path, transitions: TransitionModel, reader: FeatureReader
) -> Iterator[tuple[str, np.ndarray]]:  # fmt: skip
    """Yields (utterance, graph labels [T]) of the utterances that have features."""
    paths = sorted(folder.glob("ali.*.gz"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    if not paths:
        raise InputError(f"{folder}: holds no ali.*.gz; {REMEDY}")
    for path in paths:
        try:
            with gzip.open(path) as file:
                content = io.BytesIO(file.read())
            for utterance, ids_T in read_entries(content):
                if utterance not in reader:
                    continue
                frames = len(reader.raw(utterance))
                if len(ids_T) != frames:
                    raise InputError(
                        f"{path}: {utterance} has {len(ids_T)} frames, its features here {frames}; {REMEDY}"
                    )
                yield utterance, transitions.labels(np.asarray(ids_T))
        except (*DAMAGE, AssertionError, IndexError, TypeError, zlib.error) as error:
            raise InputError(f"{path}: damaged, or of another system ({reason(error)}); {REMEDY}") from error
