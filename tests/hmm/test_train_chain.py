"""States of chain models on speech whose alignment is known, and decoding with them at a third of the frame rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from asr_am.decode.graph import build_hclg
from asr_am.decode.lattice import LmScale
from asr_am.decode.search import SearchOptions
from asr_am.decode.search_graph import SearchGraph
from asr_am.decode.shards import DecodeOptions, Decoder
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.hmm.alignments import read_alignments, runs_of, write_alignments
from asr_am.hmm.denominator import denominator_graph
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.states import StateTable
from asr_am.hmm.train_chain import ChainTreeOptions, frame_labels, step_labels, train_chain
from asr_am.hmm.tree import DecisionTree
from asr_am.kaldi_export import export_decoding
from asr_am.lang.lang_dir import Lang
from asr_am.lang.prepare import prepare_lm
from tests.support.gmm_training import write_corpus
from tests.support.synthetic_speech import Spoken, store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lang, dict[str, Spoken]]:
    """Returns a folder with features, lang, a GMM system with the true alignment, and the chain system made of it."""
    root = tmp_path_factory.mktemp("corpus")
    lang, sets = write_corpus(root)
    GmmSystem(sets["train"].tree, sets["train"].states, sets["train"].gmms).save(root / "gmm")
    for subset, spoken in sets.items():
        frames = store(root / "frames", spoken.frames)
        labels_N = np.concatenate([spoken.labels[name] for name in frames.utterances])
        write_alignments(root / "gmm/ali", subset, frames, labels_N)
    (root / "chain").mkdir()
    train_chain(root / "features", root / "lang", root / "gmm", root / "chain", ChainTreeOptions(20, 30), 3)
    return root, lang, sets


def true_phones(spoken: Spoken, name: str) -> list[tuple[int, int, int]]:
    """Returns (phone, first frame, frame after the last) of an utterance."""
    rows = spoken.states.labels_L3[spoken.labels[name] - 1]
    firsts = [t for t in range(len(rows)) if rows[t, 1] == 0 and (t == 0 or tuple(rows[t]) != tuple(rows[t - 1]))]
    return [(int(rows[t, 0]), t, end) for t, end in zip(firsts, [*firsts[1:], len(rows)], strict=True)]


def test_each_phone_is_one_state_with_the_pdf_of_its_context(made: tuple[Path, Lang, dict[str, Spoken]]) -> None:
    root, lang, sets = made
    states, tree = StateTable.load(root / "chain/states.npz"), DecisionTree.load(root / "chain/tree.json")
    assert states.subsampling == 3 and set(states.states_P.values()) == {1}
    assert states.first_steps and len(lang.roots) < tree.num_pdfs <= 20 and states.num_pdfs == 2 * tree.num_pdfs
    for subset, spoken in sets.items():
        found = dict(read_alignments(root / "chain/ali", subset))
        assert found.keys() == spoken.labels.keys()
        for name, labels_T in found.items():
            phones = true_phones(spoken, name)
            ids = [0, *(phone for phone, _, _ in phones), 0]
            for k, (phone, first, end) in enumerate(phones):
                leaf = tree.pdf((ids[k], phone, ids[k + 2]), 0)
                assert labels_T[first] == states.label(phone, 0, leaf)
                assert (labels_T[first + 1 : end] == states.label(phone, 1, leaf + tree.num_pdfs)).all()
    assert sorted(path.name for path in (root / "chain").iterdir()) == ["ali", "states.npz", "tree.json"]


def test_transitions_are_those_of_steps(made: tuple[Path, Lang, dict[str, Spoken]]) -> None:
    """Counts the steps of silence, each the middle one of three frames."""
    root, lang, sets = made
    states, spoken = StateTable.load(root / "chain/states.npz"), sets["train"]
    visits = steps = 0
    for name in spoken.labels:
        middles = [min(t + 1, len(spoken.labels[name]) - 1) for t in range(0, len(spoken.labels[name]), 3)]
        for phone, first, end in true_phones(spoken, name):
            inside = sum(first <= t < end for t in middles)
            visits += phone == lang.optional_silence and inside > 0
            steps += inside * (phone == lang.optional_silence)
    first, later = np.flatnonzero(states.labels_L3[:, 0] == lang.optional_silence)
    assert visits > 100
    assert float(np.exp(states.loop_L[first])) == pytest.approx((steps - visits) / steps, abs=0.03)
    assert states.loop_L[later] == states.loop_L[first] and states.next_L[later] == states.next_L[first]


def test_the_first_step_of_each_phone_has_its_label(made: tuple[Path, Lang, dict[str, Spoken]]) -> None:
    root, _, sets = made
    states, spoken = StateTable.load(root / "chain/states.npz"), sets["train"]
    for name, labels_T in read_alignments(root / "chain/ali", "train"):
        phones = true_phones(spoken, name)
        for phase in range(3):
            labels_K = step_labels(labels_T[phase:], states)
            middles = [min(t + 1, len(labels_T) - phase - 1) + phase for t in range(0, len(labels_T) - phase, 3)]
            number = [next(n for n, (_, first, end) in enumerate(phones) if first <= t < end) for t in middles]
            rows = states.labels_L3[labels_K - 1]
            assert rows[:, 0].tolist() == [phones[n][0] for n in number]
            assert (rows[:, 1] == 0).tolist() == [k == 0 or number[k] != number[k - 1] for k in range(len(number))]


def test_every_alignment_is_a_path_of_the_denominator(made: tuple[Path, Lang, dict[str, Spoken]]) -> None:
    """From any of the frames on, as chunks begin anywhere."""
    root, _, _ = made
    states = StateTable.load(root / "chain/states.npz")
    alignments = [labels_T for _, labels_T in read_alignments(root / "chain/ali", "train")]
    graph = denominator_graph((step_labels(labels_T, states) for labels_T in alignments), states)
    for labels_T in alignments[:20]:
        for phase in range(3):
            alpha_S = graph.start_S
            for label in step_labels(labels_T[phase:], states):
                alpha_S = (alpha_S @ graph.arcs_SS) * (graph.pdf_S == states.pdf_L[label - 1])
                assert alpha_S.sum() > 0
                alpha_S = alpha_S / alpha_S.sum()


@dataclass(frozen=True)
class Known:
    """Scores by which a model with an output for three frames is sure of the true pdf."""

    states: StateTable
    labels: dict[str, np.ndarray]

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        pdf_K = self.states.pdf_L[step_labels(self.labels[utterance], self.states) - 1]
        return np.where(np.arange(self.states.num_pdfs) == pdf_K[:, None], 0, -100).astype(np.float32)


def test_words_and_times_are_those_spoken(made: tuple[Path, Lang, dict[str, Spoken]]) -> None:
    root, lang, sets = made
    (root / "lm").mkdir()
    (root / "data/lm").mkdir()
    sentences = "".join(f"{' '.join(text)}\n" for text in sets["dev"].text.values())
    (root / "data/lm/train.txt").write_text(sentences, encoding="utf-8")
    (root / "graph").mkdir()
    prepare_lm(root / "data", root / "lang", root / "lm", name="lm", order=3, arpa=None, text="train")
    states, tree = StateTable.load(root / "chain/states.npz"), DecisionTree.load(root / "chain/tree.json")
    build_hclg(root / "lang", root / "lm", states, tree, root / "graph", self_loop_scale=1.0)
    graph = SearchGraph.from_bytes(np.fromfile(root / "graph/HCLG.fst", np.uint8))
    scorer = Known(states, dict(read_alignments(root / "chain/ali", "dev")))
    decoder = Decoder(scorer, graph, None, lang, states, DecodeOptions(SearchOptions(), (LmScale(10.0),), nbest=0))
    silence, spoken, compared = lang.optional_silence, sets["dev"], 0
    for name, text in spoken.text.items():
        result, _ = decoder.decode(name)
        (words,) = result.words
        phones = [phone for phone in true_phones(spoken, name) if phone[0] != silence]
        assert [word.word for word in words] == text
        assert 0 <= result.frames - len(spoken.labels[name]) < 3
        compared += len(text)
        for word in words:
            count = len(lang.pronunciations[word.word][0])
            own, phones = phones[:count], phones[count:]
            assert abs(word.start - own[0][1]) <= 2 and abs(word.start + word.frames - own[-1][2]) <= 2
    assert compared > 5


def test_a_phone_of_one_step_that_follows_itself_is_two(made: tuple[Path, Lang, dict[str, Spoken]]) -> None:
    states = StateTable.load(made[0] / "chain/states.npz")
    first = int(np.flatnonzero(states.labels_L3[:, 1] == 0)[0]) + 1
    later = int(states.loop_label_L[first - 1])
    labels_T = np.array([first, first, later, later, first], np.int32)
    runs = runs_of(labels_T, np.array([0, 5]), states)
    assert runs.label_R.tolist() == [first, first, later, first] and runs.start_R.tolist() == [0, 1, 2, 4]


def test_frames_of_steps(made: tuple[Path, Lang, dict[str, Spoken]]) -> None:
    """The labels of steps, written out for frames, are those steps again."""
    states = StateTable.load(made[0] / "chain/states.npz")
    _, labels_T = next(read_alignments(made[0] / "chain/ali", "dev"))
    labels_K = step_labels(labels_T, states)
    frames_T = frame_labels(labels_K, states)
    assert len(frames_T) == 3 * len(labels_K) and np.array_equal(step_labels(frames_T, states), labels_K)
    runs, steps = (runs_of(x, np.array([0, len(x)]), states) for x in (frames_T, labels_K))
    assert (runs.state_R == 0).sum() == (steps.state_R == 0).sum()


def test_damage_and_options_are_reported(made: tuple[Path, Lang, dict[str, Spoken]], tmp_path: Path) -> None:
    states = StateTable.load(made[0] / "chain/states.npz")
    for wrong, said in (({"subsampling": 0}, "0 frames per step"), ({"labels_L3": states.labels_L3[:-1]}, "")):
        replace(states, **wrong).save(tmp_path / "a.npz")
        with pytest.raises(InputError, match=rf"a\.npz: holds .*{said}"):
            StateTable.load(tmp_path / "a.npz")
    (tmp_path / "decode/run").mkdir(parents=True)
    System(made[0] / "chain", tmp_path, tmp_path, tmp_path / "graph", "mfcc").save(tmp_path / "decode/run")
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph/HCLG.fst").touch()
    with pytest.raises(InputError, match=r"decode/run: is of a chain model"):
        export_decoding(tmp_path, "run", tmp_path / "kaldi")
    with pytest.raises(InputError, match=r"chain\.leaves must be at least 1"):
        ChainTreeOptions(leaves=0)
