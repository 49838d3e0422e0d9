"""Every path of exp/<corpus> that one stage writes and another reads, on one page.

log/<stage>.log                     messages of a stage
data/                               stage 0: manifests of each set, lexicon, texts (lm/), references, GLM
lang/, lang_probs/                  stage 1: lexicon, phones, L; stage 3: with probabilities of pronunciations
lm/<name>/                          stage 1: an n-gram LM, G; stage 8: a recurrent LM
lm/<name>/unseen/                   stage 1: another LM to choose with, if that one knows dev
features/<kind>/                    stages 2 and 4: mfcc, logmel, lda, fmllr, ivector
align/<system>/                     stage 3: GMM systems and their alignments
alignments/                         stage 3: the same as CTM and TextGrid
egs/<features>-<system>/            stage 5: training examples
egs/chain<n>-<system>/              stage 5: states, tree and alignments of chain models, with a step per n frames
egs/denominator-<system>/           stage 5: the graph of sequence training
train/<run>/                        stage 6: a network
graph/<system>_<lm>/                stages 4 and 7: HCLG, <lm>-unseen with the LM that does not know dev
decode/<system or run>_<lm>/        stage 7: lattices, words, what dev has chosen
likelihoods/<system or run>_<lm>/   stage 7: scores for Kaldi's decoders
rescore/<decoded>+<recurrent LM>/   stage 8
score/<decoded or rescored>/        stage 9: error rates
report/, RESULTS.md                 stage 10
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.features.fusion import base_of
from asr_am.lang.lang_dir import UNSEEN
from asr_am.options import check_name

STAMP = "stamp"  # a value of stage data: a digest of names, sizes and times of a corpus' audio files
CHAIN = "chain"  # begins the name of the states of chain models
GMM_FEATURES = {"mono": "mfcc", "tri": "mfcc", "lda_mllt": "lda", "sat": "fmllr"}  # of each GMM
SYSTEMS = (*GMM_FEATURES, "nnet")
COMBINED = "combined"  # the system of several networks
MADE_BY = {  # the stages of the folders above, for messages
    "data": "0", "lang": "1", "lang_probs": "3", "lm": "1", "features": "2 (fmllr and ivector: 4)", "align": "3",
    "egs": "5", "train": "6", "graph": "7", "decode": "7", "likelihoods": "7", "rescore": "8", "score": "9",
}  # fmt: skip


class Layout:
    """The folders of exp/<corpus>. All but `root` are outputs of a stage, or hold outputs of several."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "log"
        self.data, self.texts = root / "data", root / "data/lm"
        self.features = root / "features"
        self.align, self.alignments = root / "align", root / "alignments"
        self.report, self.results = root / "report", root / "RESULTS.md"

    def lang(self, *, probs: bool = False) -> Path:
        return self.root / ("lang_probs" if probs else "lang")

    def lm(self, name: str) -> Path:
        return self.root / "lm" / name

    def system(self, name: str) -> Path:
        """Returns the folder of states and alignments: of a GMM system, or of chain models (`states_name`)."""
        return self.align / name if not name.startswith(CHAIN) else self.root / "egs" / name

    def egs(self, features: str, system: str) -> Path:
        return self.root / "egs" / f"{features}-{system}"

    def denominator(self, system: str) -> Path:
        return self.root / "egs" / f"denominator-{system}"

    def run(self, name: str) -> Path:
        return self.root / "train" / name

    def unseen_lm(self, name: str) -> Path | None:
        """Returns the folder of the LM that takes the place of one that knows dev there, None if it does not."""
        folder = self.lm(name) / UNSEEN
        return folder if folder.is_dir() else None

    def graph(self, system: str, lm: str) -> Path:
        return self.root / "graph" / f"{system}_{lm}"

    def dev_graph(self, system: str, lm: str) -> Path:
        """Returns the folder of the graph to decode dev with."""
        return self.graph(system, f"{lm}-{UNSEEN}" if self.unseen_lm(lm) else lm)

    def decoded(self, run: str) -> Path:
        return self.root / "decode" / run

    def likelihoods(self, run: str) -> Path:
        return self.root / "likelihoods" / run

    def rescored(self, run: str, lm: str) -> Path:
        return self.root / "rescore" / f"{run}+{lm}"

    def scored(self, run: str) -> Path:
        return self.root / "score" / run


def layout(cfg: DictConfig) -> Layout:
    """Returns the paths of `exp/<corpus>`. Raises InputError as `corpus_dir`."""
    return Layout(corpus_dir(cfg))


def corpus_dir(cfg: DictConfig) -> Path:
    """Returns exp/<corpus>, which holds all that a corpus gives. Raises InputError without a plain name for it."""
    if OmegaConf.is_missing(cfg.corpus, "name"):
        raise InputError("corpus.name is needed: choose a name for this data")
    return Path(cfg.exp) / check_name("corpus.name", cfg.corpus.name)


def input_dirs(cfg: DictConfig, kind: str) -> list[Path]:
    """Returns the directory of each feature kind that `kind` joins by `+`."""
    return [layout(cfg).features / base_of(stream) for stream in kind.split("+")]


def egs_dir(cfg: DictConfig) -> Path:
    """Returns the directory of the examples."""
    return layout(cfg).egs(cfg.features.name, states_name(cfg))


def run_dir(cfg: DictConfig) -> Path:
    """Returns the directory of the training run."""
    return layout(cfg).run(cfg.run)


def denominator_path(cfg: DictConfig) -> Path:
    """Returns the file of the denominator graph, which stage egs makes."""
    return layout(cfg).denominator(states_name(cfg)) / "graph.npz"


def states_name(cfg: DictConfig) -> str:
    """Returns the name of the states that the network's outputs are for: those of a GMM system or of a chain model."""
    system = str(cfg.align.system)
    if not has_phone_states(cfg):
        return system
    return f"{CHAIN}{'ctc' if cfg.train.get('ctc') else ''}{cfg.model.get('subsampling', 1)}-{system}"


def has_phone_states(cfg: DictConfig) -> bool:
    """Returns whether the network's outputs are for phones of one state, as of chain models and CTC."""
    return bool(cfg.train.get("chain") or cfg.train.get("ctc"))
