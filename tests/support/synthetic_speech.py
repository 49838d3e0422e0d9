"""A corpus with known alignments: speech sampled from HMMs with well separated Gaussians.

Shapes: T frames of one utterance, S phones of one utterance, D feature dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kaldiio
import numpy as np

from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from asr_am.hmm.hmm_topology import phone_states, state_table
from asr_am.hmm.states import StateTable
from asr_am.hmm.training import AlignedData, TrainingContext
from asr_am.hmm.tree import DecisionTree, monophone_tree
from asr_am.hmm.viterbi import AlignOptions
from asr_am.lang.lang_dir import Lang
from asr_am.lang.prepare import prepare_lang

DIM = 5
WORDS = ("A", "B", "C", "D", "AB", "BA", "AC", "CA", "BC", "CB", "AD", "DA", "BD", "DB", "CD", "DC")
LEXICON = "".join(f"{word} {' '.join(2 * letter.lower() for letter in word)}\n" for word in WORDS)


def make_lang(folder: Path) -> Lang:
    """Writes a lang directory with four phones, and words of one or two of them."""
    data, lang_dir = folder / "data", folder / "lang"
    data.mkdir(parents=True)
    lang_dir.mkdir()
    (data / "lexicon.txt").write_text(LEXICON)
    prepare_lang(data, lang_dir, position_dependent=True, silence_prob=0.5)
    return Lang.load(lang_dir)


@dataclass(frozen=True)
class Spoken:
    """Utterances sampled from `gmms`.

    Attributes:
        gmms: one Gaussian per pdf.
        text: words by utterance id.
        frames: frames [T, D] by utterance id.
        labels: true graph labels [T] by utterance id.
    """

    tree: DecisionTree
    states: StateTable
    gmms: DiagGmms
    text: dict[str, list[str]]
    frames: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


def speak(lang: Lang, utterances: int, seed: int = 0, dim: int = DIM, spread: float = 5.0) -> Spoken:
    """Samples random sentences with silence at both ends.

    Args:
        utterances: number of utterances, by two speakers in turn.
        spread: standard deviation of the means of the unit-variance Gaussians.
    """
    rng = np.random.default_rng(seed)
    states_P = phone_states(lang.nonsilence_phones, lang.silence_phones)
    tree = monophone_tree(lang.roots, states_P)
    states = state_table(tree, states_P)
    means_PD = np.random.default_rng(99).normal(0, spread, (tree.num_pdfs, dim))
    gmms = single_gaussians(means_PD, np.ones_like(means_PD))
    spoken = Spoken(tree, states, gmms, {}, {}, {})
    for index in range(utterances):
        name = f"spk{index % 2}-{index:03d}"
        words = [WORDS[choice] for choice in rng.integers(0, len(WORDS), rng.integers(1, 5))]
        silence = (lang.optional_silence,)
        phones = sum((lang.pronunciations[word][0] for word in words), silence) + silence
        pairs = [(phone, state) for phone in phones for state in range(states_P[phone])]
        labels = [states.label(phone, state, tree.pdf((phone,), state)) for phone, state in pairs]
        labels_T = np.repeat(labels, rng.geometric(0.25, len(labels))).astype(np.int32)
        noise_TD = rng.normal(size=(len(labels_T), dim))
        spoken.text[name] = words
        spoken.labels[name] = labels_T
        spoken.frames[name] = (means_PD[states.pdf_L[labels_T - 1]] + noise_TD).astype(np.float32)
    return spoken


def store(folder: Path, frames: dict[str, np.ndarray]) -> FrameStore:
    return FrameStore.write(folder, sorted(frames), frames.__getitem__, "frames")


def aligned_data(folder: Path, lang: Lang, spoken: Spoken) -> AlignedData:
    frames = store(folder, spoken.frames)
    return AlignedData(frames, [lang.word_ids(" ".join(spoken.text[name])) for name in frames.utterances])


def training_context(folder: Path, utterances: int = 40) -> tuple[TrainingContext, Spoken]:
    """Returns a training context with the sets train and dev, and the true alignment of train."""
    lang = make_lang(folder)
    train, dev = speak(lang, utterances), speak(lang, 4, seed=1)
    sets = {"train": aligned_data(folder / "train", lang, train), "dev": aligned_data(folder / "dev", lang, dev)}
    return TrainingContext(sets, lang, folder / "scratch", 1), train


def all_labels(frames: FrameStore, spoken: Spoken) -> np.ndarray:
    return np.concatenate([spoken.labels[name] for name in frames.utterances])


def write_features(folder: Path, spoken: Spoken, subset: str) -> None:
    """Writes 13-dimensional static features as stage features does, with CMVN statistics that change nothing."""
    out = folder / "mfcc"
    out.mkdir(parents=True, exist_ok=True)
    (out / "options.json").write_text('{"kind": "mfcc", "sampling_rate": 8000, "num_bins": 23, "num_ceps": 13}')
    names = sorted(spoken.frames)
    stats = np.zeros((2, 14))
    stats[0, -1] = 1.0
    stats[1, :-1] = 1.0
    speakers = sorted({name.split("-")[0] for name in names})
    kaldiio.save_ark(str(out / f"{subset}.ark"), {n: spoken.frames[n] for n in names}, scp=str(out / f"{subset}.scp"))
    kaldiio.save_ark(
        str(out / f"{subset}_cmvn.ark"), dict.fromkeys(speakers, stats), scp=str(out / f"{subset}_cmvn.scp")
    )
    (out / f"{subset}_utt2spk").write_text("".join(f"{name} {name.split('-')[0]}\n" for name in names))


EASY = AlignOptions(beam=20.0, retry_beam=80.0)
