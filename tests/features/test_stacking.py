"""Low frame rate, from features on disk to egs, scores, decoding and transcription."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np
import pytest
import torch

from asr_am.decode.decode_set import decode_sets
from asr_am.decode.scorer import NeuralSource, Window, log_posteriors
from asr_am.decode.system import System
from asr_am.egs.egs_writer import make_egs
from asr_am.egs.store import EgsSet, load_pdf_counts
from asr_am.errors import InputError
from asr_am.features.extract import extract_features
from asr_am.features.fusion import InputReader, middle_labels, repeat_stacks, stack_frames
from asr_am.features.reader import FeatureReader
from asr_am.features.spectral import SpectralOptions
from asr_am.hmm.states import StateTable
from asr_am.models.lstm import Lstm, LstmOptions
from asr_am.models.model_file import load_acoustic_model, save_model
from asr_am.transcribe import main
from tests.support.decoding_corpus import OPTIONS, write_system
from tests.support.kaldi_scp import load_scp
from tests.support.manifest_corpus import RATE

KIND = "lfbe64_lfr"


def test_stacks_and_middle_labels() -> None:
    x_TF = np.arange(14.0).reshape(7, 2)
    assert stack_frames(x_TF, 3).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 12, 13, 12, 13]]
    assert stack_frames(x_TF, 3, phase=1).tolist() == [[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]]
    assert stack_frames(x_TF, 1) is x_TF
    labels_T = np.arange(10, 17)
    assert middle_labels(labels_T, 3).tolist() == [11, 14, 16]
    assert middle_labels(labels_T, 3, phase=1).tolist() == [12, 15]
    assert middle_labels(labels_T, 1).tolist() == labels_T.tolist()
    for frames in range(9, 15):
        for phase in range(3):
            x_T = np.arange(float(frames))
            assert len(stack_frames(x_T[:, None], 3, phase)) == len(middle_labels(x_T, 3, phase))
    assert repeat_stacks(x_TF[:3], 3, 7)[:, 0].tolist() == [0, 0, 0, 2, 2, 2, 4]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with mixtures, a graph, lfbe64 features, and alignments of the same lengths."""
    root = tmp_path_factory.mktemp("corpus")
    write_system(root)
    out = root / "features/lfbe64"
    extract_features(root / "data", out, "lfbe64", SpectralOptions(RATE, 64, deltas=False))
    states = StateTable.load(root / "align/states.npz")
    rng = np.random.default_rng(3)
    (root / "align/ali").mkdir()
    for subset in ("train", "dev"):
        reader = FeatureReader(root / "features", "lfbe64", subset)
        labels = {
            u: rng.integers(1, len(states.labels_L3) + 1, len(reader[u])).astype(np.int32) for u in reader.utterances
        }
        path = root / "align/ali" / subset
        kaldiio.save_ark(f"{path}.ark", labels, scp=f"{path}.scp")
    return root


@pytest.mark.parametrize("random_phase", [False, True])
def test_egs_are_stacked_features_and_middle_pdfs(root: Path, tmp_path: Path, random_phase: bool) -> None:
    make_egs(root / "features", KIND, root / "align", tmp_path, dtype="float32", random_phase=random_phase)
    states = StateTable.load(root / "align/states.npz")
    seen: dict[str, set[int]] = {"train": set(), "dev": set()}
    counts_P = np.zeros(states.num_pdfs, dtype=np.int64)
    for subset, phases in seen.items():
        egs, labels = EgsSet(tmp_path, subset), load_scp(root / "align/ali" / f"{subset}.scp")
        reader = FeatureReader(root / "features", "lfbe64", subset)
        assert egs.info.dim == 192 and reader.dim == 64
        for u, utterance in enumerate(egs.index.utterances):
            rows = slice(egs.index.begin_U[u], egs.index.begin_U[u] + egs.index.frames_U[u])
            x_TF, y_T = reader[utterance], states.pdf_L[labels[utterance] - 1]
            (phase,) = (p for p in range(3) if np.array_equal(egs.features[0][rows.start, :64], x_TF[p]))
            phases.add(phase)
            np.testing.assert_array_equal(egs.features[0][rows], stack_frames(x_TF, 3, phase))
            np.testing.assert_array_equal(egs.targets[0][rows][:-1], y_T[phase + 1 :: 3][: egs.index.frames_U[u] - 1])
            counts_P += (subset == "train") * np.bincount(egs.targets[0][rows], minlength=states.num_pdfs)
    assert seen["dev"] == {0} and (len(seen["train"]) > 1) == random_phase
    np.testing.assert_array_equal(load_pdf_counts(tmp_path), counts_P)


def write_model(root: Path) -> Path:
    torch.manual_seed(1)
    num_pdfs = StateTable.load(root / "align/states.npz").num_pdfs
    model = Lstm(LstmOptions(layers=1, cells=8), 192, num_pdfs)
    save_model(root / "best.pt", model, {"kind": KIND, "chunk": 21, "pdf_counts": torch.arange(1, num_pdfs + 1)})
    return root / "best.pt"


def test_scores_of_a_stack_are_repeated_for_its_frames(root: Path) -> None:
    path, window = write_model(root), Window(7, 5)
    scorer = NeuralSource(path, root / "features", "dev", window).load()
    model, reader = load_acoustic_model(path)[0], InputReader(root / "features", KIND, "dev")
    utterance = reader.utterances[0]
    scores_TP, x_TF = scorer.log_likelihoods(utterance), FeatureReader(root / "features", "lfbe64", "dev")[utterance]
    assert len(scores_TP) == len(x_TF) and len(x_TF) % 3, "the last stack is incomplete"
    posteriors_KP = log_posteriors(model, stack_frames(x_TF, 3), window)
    for t in range(len(x_TF)):
        np.testing.assert_allclose(scores_TP[t], posteriors_KP[t // 3] - scorer.log_priors_P, rtol=1e-6)


def test_stacked_features_are_decoded_and_transcribed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = (root / name for name in ("align", "features", "lang", "graph"))
    system = System(*folders, KIND, write_model(root), Window(7, 5))
    decode_sets(system, root / "data", tmp_path, OPTIONS)
    recording = root / "data/wav/test0.wav"
    assert main(["--model", str(tmp_path), str(recording)]) == 0
    assert capsys.readouterr().out.startswith(f"{recording}:")


def test_stacked_features_cannot_be_joined(root: Path) -> None:
    with pytest.raises(InputError, match="lfbe64_lfr cannot be joined"):
        InputReader(root / "features", f"{KIND}+logmel", "dev")
