"""A generated corpus, and GMM systems trained on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lhotse import SupervisionSegment, SupervisionSet

from asr_am.hmm.adaptation import FmllrOptions
from asr_am.hmm.align_corpus import LdaOptions, MonoOptions, SatOptions, TriOptions, align_corpus
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang
from tests.support.kaldi_scp import load_scp
from tests.support.synthetic_speech import Spoken, make_lang, speak, write_features

SMALL = {"iterations": 4, "realign": (3,), "gaussians": 60, "increase_until": 3, "leaves": 20, "min_leaf_occupancy": 20}
MONO = MonoOptions(iterations=10, realign=range(1, 11), gaussians=60, increase_until=5)
TRI = TriOptions(iterations=4, realign=(3,), gaussians=80, increase_until=3, leaves=40, min_leaf_occupancy=20)
LDA = LdaOptions(**SMALL, context=1, dim=10, mllt=(2, 3))  # type: ignore[arg-type]
SAT = SatOptions(**SMALL, fmllr_passes=(2, 3), fmllr=FmllrOptions(min_frames=200))  # type: ignore[arg-type]


def distort(spoken: Spoken) -> None:
    """Multiplies the frames of each speaker by a matrix of its own. (CMVN would remove an offset.)"""
    for name, x_TD in spoken.frames.items():
        rng = np.random.default_rng(int(name[3]))
        spoken.frames[name] = (x_TD @ (np.eye(13) + 0.15 * rng.normal(size=(13, 13)))).astype(np.float32)


def run(root: Path, out: Path, lda_mllt: LdaOptions | None = LDA) -> None:
    folders = root / "data", root / "lang", root / "features"
    align_corpus(*folders, out, mono=MONO, tri=TRI, lda_mllt=lda_mllt, sat=SAT)


def train_systems(root: Path) -> tuple[Path, dict[str, Spoken]]:
    """Trains LDA+MLLT and SAT on a generated corpus in `root`. Returns `root` and the speech of each set."""
    _, sets = write_corpus(root)
    for subset, spoken in sets.items():
        distort(spoken)
        write_features(root / "features", spoken, subset)
    run(root, root / "align")
    return root, sets


def write_corpus(root: Path) -> tuple[Lang, dict[str, Spoken]]:
    lang = make_lang(root)
    sets = {"train": speak(lang, 60, dim=13, spread=1.0), "dev": speak(lang, 6, seed=1, dim=13, spread=1.0)}
    for subset, spoken in sets.items():
        write_features(root / "features", spoken, subset)
        segments = [
            SupervisionSegment(name, name, 0.0, 1.0, text=" ".join(words), speaker=name.split("-")[0])
            for name, words in sorted(spoken.text.items())
        ]
        (root / "data" / subset).mkdir()
        SupervisionSet.from_segments(segments).to_file(root / "data" / subset / "supervisions.jsonl.gz")
    return lang, sets


def phones_in(folder: Path, subset: str) -> dict[str, np.ndarray]:
    """Returns phone and state of every frame, [T, 2], by utterance."""
    states = StateTable.load(folder / "states.npz")
    alignments = load_scp(folder / "ali" / f"{subset}.scp")
    return {name: states.labels_L3[labels_T - 1, :2] for name, labels_T in alignments.items()}
