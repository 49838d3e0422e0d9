"""A system on a corpus of noise: every file that decoding reads, made by the real stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from asr_am.decode.graph import build_hclg
from asr_am.decode.lattice import LmScale
from asr_am.decode.search import SearchOptions
from asr_am.decode.shards import DecodeOptions
from asr_am.decode.system import System
from asr_am.features.extract import extract_features
from asr_am.features.reader import FeatureReader
from asr_am.features.spectral import SpectralOptions
from asr_am.hmm.gmm import single_gaussians
from asr_am.hmm.hmm_topology import phone_states, state_table
from asr_am.hmm.tree import monophone_tree
from asr_am.lang.lang_dir import Lang
from asr_am.lang.prepare import prepare_lang, prepare_lm
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.models.model_file import save_model
from tests.support.manifest_corpus import RATE, write_corpus

GRID = (LmScale(5.0), LmScale(10.0), LmScale(10.0, 0.5))
OPTIONS = DecodeOptions(SearchOptions(beam=10.0, lattice_beam=3.0), GRID, nbest=3)


def write_system(root: Path) -> System:
    """Writes data, lang, lm, features, align and graph below `root`. The mixtures are random."""
    for name in ("lang", "lm", "features/mfcc", "features/logmel", "align", "graph"):
        (root / name).mkdir(parents=True)
    write_corpus(root / "data")
    prepare_lang(root / "data", root / "lang", position_dependent=True, silence_prob=0.5)
    prepare_lm(root / "data", root / "lang", root / "lm", name="lm", order=2, arpa=None, text="train")
    for kind, num_bins, num_ceps in (("mfcc", 23, 13), ("logmel", 20, None)):
        out = root / "features" / kind
        extract_features(root / "data", out, kind, SpectralOptions(RATE, num_bins, num_ceps), jobs=1)
    lang = Lang.load(root / "lang")
    states_P = phone_states(lang.nonsilence_phones, lang.silence_phones)
    tree = monophone_tree(lang.roots, states_P)
    states = state_table(tree, states_P)
    reader = FeatureReader(root / "features", "mfcc", "train")
    x_TD = np.concatenate([reader[utterance] for utterance in reader.utterances])
    rng = np.random.default_rng(0)
    means_PD = x_TD[rng.choice(len(x_TD), states.num_pdfs)]
    single_gaussians(means_PD, np.tile(x_TD.var(axis=0), (states.num_pdfs, 1))).save(root / "align" / "gmm.npz")
    states.save(root / "align" / "states.npz")
    tree.save(root / "align" / "tree.json")
    build_hclg(root / "lang", root / "lm", states, tree, root / "graph")
    return System(root / "align", root / "features", root / "lang", root / "graph", "mfcc")


def write_network(root: Path, num_pdfs: int, scale: float = 1.0) -> Path:
    """Writes the checkpoint of an untrained network for the system's pdfs and log-mel features.

    Args:
        scale: factor of the logits.
    """
    torch.manual_seed(1)
    reader = FeatureReader(root / "features", "logmel", "train")
    model = Blstm(BlstmOptions(layers=1, cells=8, projection=8), reader.dim, num_pdfs)
    model.output.weight.data.mul_(scale)
    counts_P = torch.arange(1, num_pdfs + 1)
    info = {"kind": "logmel", "chunk": 21, "pdf_counts": counts_P, "heldout_loss": 2.25}
    save_model(root / "best.pt", model, info)
    return root / "best.pt"
