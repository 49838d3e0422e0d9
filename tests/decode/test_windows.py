"""Windows over an utterance, priors, and score archives."""

from __future__ import annotations

from pathlib import Path

import kaldi_native_io
import kaldiio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asr_am.decode.scorer import ArchiveSource, NeuralScorer, Window, log_posteriors, log_priors, write_log_likelihoods
from asr_am.errors import InputError
from asr_am.models.acoustic import subsample
from tests.support.hmm_reference import LeftTree, small_lang, small_states

FEATURES, PDFS = 4, 6


class Framewise(nn.Module):
    """Model without context."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, PDFS)

    def forward(self, x_BTF: Tensor, lengths_B: Tensor) -> Tensor:
        return self.linear(x_BTF)


class MiddleFrame(Framewise):
    """Model without context, with an output for the middle one of several frames."""

    def __init__(self, subsampling: int) -> None:
        super().__init__()
        self.subsampling = subsampling

    def forward(self, x_BTF: Tensor, lengths_B: Tensor) -> Tensor:
        return self.linear(subsample(x_BTF, lengths_B, self.subsampling)[0])


class Position(nn.Module):
    """Model whose first logit is the position in the window, from the first frame or from the last one."""

    def __init__(self, *, from_end: bool = False) -> None:
        super().__init__()
        self.from_end = from_end

    def forward(self, x_BTF: Tensor, lengths_B: Tensor) -> Tensor:
        value_BT = torch.arange(x_BTF.shape[1], dtype=torch.float32).expand(x_BTF.shape[:2])
        if self.from_end:
            value_BT = lengths_B[:, None] - 1 - value_BT
        return torch.stack([value_BT, torch.zeros_like(value_BT)], dim=2)


windows = st.integers(1, 30).flatmap(lambda chunk: st.builds(Window, st.just(chunk), st.integers(1, chunk)))


@settings(max_examples=40)
@given(frames=st.integers(1, 80), window=windows, batch=st.integers(1, 9))
def test_without_context_windows_change_nothing(frames: int, window: Window, batch: int) -> None:
    x_TF = np.random.default_rng(frames).standard_normal((frames, FEATURES)).astype(np.float32)
    model = Framewise().eval()
    whole = log_posteriors(model, x_TF, Window(0, 0))
    assert whole == pytest.approx(torch.log_softmax(model.linear(torch.from_numpy(x_TF)), 1).detach().numpy(), abs=1e-5)
    assert log_posteriors(model, x_TF, window, batch) == pytest.approx(whole, abs=1e-4)


@settings(max_examples=40)
@given(frames=st.integers(1, 80), window=windows, subsampling=st.integers(1, 4))
def test_each_frame_gets_the_output_of_which_it_is_the_middle(frames: int, window: Window, subsampling: int) -> None:
    x_TF = np.random.default_rng(frames).standard_normal((frames, FEATURES)).astype(np.float32)
    framewise = log_posteriors(Framewise().eval(), x_TF, window)
    assert log_posteriors(MiddleFrame(subsampling).eval(), x_TF, window) == pytest.approx(framewise, abs=1e-5)


def test_outputs_of_a_chain_model_are_repeated() -> None:
    model = MiddleFrame(3).eval()
    x_TF = np.random.default_rng(0).standard_normal((8, FEATURES)).astype(np.float32)
    expected_TP = model.linear(torch.from_numpy(x_TF[[1, 1, 1, 4, 4, 4, 7, 7]])).detach().numpy()
    assert log_posteriors(model, x_TF, Window(0, 0), softmax=False) == pytest.approx(expected_TP, abs=1e-5)


@settings(max_examples=40)
@given(frames=st.integers(1, 80), window=windows)
def test_outputs_of_a_chain_model_are_for_the_same_frames_in_all_windows(frames: int, window: Window) -> None:
    """`MiddleFrame` has no context, so windows change nothing, but for an output without its middle frame."""
    model = MiddleFrame(3).eval()
    x_TF = np.random.default_rng(frames).standard_normal((frames, FEATURES)).astype(np.float32)
    whole_TP = log_posteriors(model, x_TF, Window(0, 0), softmax=False)
    cut = frames // 3 * 3 if window.chunk % 3 == 0 else 0  # other chunks end within an output
    assert log_posteriors(model, x_TF, window, softmax=False)[:cut] == pytest.approx(whole_TP[:cut], abs=1e-5)


@given(frames=st.integers(1, 80), window=windows)
def test_every_frame_is_in_a_whole_window(frames: int, window: Window) -> None:
    starts = window.starts(frames)
    size = min(window.chunk, frames)
    covered = {int(s) + i for s in starts for i in range(size)}
    assert covered == set(range(frames))
    assert (np.diff(starts) <= window.hop).all() and (np.diff(starts) > 0).all()


def test_a_frame_in_two_windows_gets_their_weighted_mean() -> None:
    """Windows of 4 every 2 frames over 6 frames: frame 2 is third in one (weight 2) and first in the other (1)."""
    result = log_posteriors(Position(), np.zeros((6, FEATURES), np.float32), Window(4, 2))
    log_p = np.log(1 / (1 + np.exp(-np.arange(4.0))))
    expected = [log_p[0], log_p[1], (2 * log_p[2] + log_p[0]) / 3, (log_p[3] + 2 * log_p[1]) / 3, log_p[2], log_p[3]]
    assert result[:, 0] == pytest.approx(expected, abs=1e-6)


def test_an_utterance_shorter_than_a_window_is_padded_and_masked() -> None:
    x_TF = np.zeros((3, FEATURES), np.float32)
    log_p = np.log(1 / (1 + np.exp(-np.arange(3.0))))
    assert log_posteriors(Position(), x_TF, Window(21, 10))[:, 0] == pytest.approx(log_p, abs=1e-6)
    assert log_posteriors(Position(from_end=True), x_TF, Window(21, 10))[:, 0] == pytest.approx(log_p[::-1], abs=1e-6)


@pytest.mark.parametrize("text", ["21", "21/", "21/0", "21/22", "/5", "all", "-21/5", "0/0"])
def test_windows_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="windows"):
        Window.parse(text)


@pytest.mark.parametrize("text", ["21/10", "21/21", "whole"])
def test_windows_are_written_as_they_are_read(text: str) -> None:
    assert str(Window.parse(text)) == text


def test_priors_are_shares_and_never_fall_below_the_floor() -> None:
    priors_P = np.exp(log_priors(np.array([700, 300, 0, 0]), floor=0.1))
    assert priors_P.sum() == pytest.approx(1.0)
    assert priors_P[0] / priors_P[1] == pytest.approx(7 / 3)
    assert priors_P[2] / priors_P[0] == pytest.approx(0.1 / 4 / 0.7)


def test_scaled_log_likelihoods_are_posteriors_over_priors() -> None:
    x_TF = np.random.default_rng(0).standard_normal((30, FEATURES)).astype(np.float32)
    model = Framewise().eval()
    priors = log_priors(np.arange(1, PDFS + 1))
    scorer = NeuralScorer(model, {"u": x_TF}.__getitem__, priors, Window(21, 10))
    expected = torch.log_softmax(model.linear(torch.from_numpy(x_TF)), 1).detach().numpy() - priors
    assert scorer.log_likelihoods("u") == pytest.approx(expected, abs=1e-4)
    with pytest.raises(InputError, match="6 outputs"):
        NeuralScorer(model, {"u": x_TF}.__getitem__, priors[:-1], Window(21, 10)).log_likelihoods("u")


def test_score_archives_are_kaldis(tmp_path: Path) -> None:
    """By pdf for our search, by graph label for latgen-faster-mapped, read by the readers of two other programs."""
    lang = small_lang(tmp_path)
    states = small_states(lang, LeftTree())
    rng = np.random.default_rng(0)
    scores = {f"u{i}": rng.standard_normal((5 + i, states.num_pdfs)).astype(np.float32) for i in range(3)}

    class Fixed:
        def log_likelihoods(self, utterance: str) -> np.ndarray:
            return scores[utterance]

    write_log_likelihoods(Fixed(), scores, None, tmp_path / "pdfs.scp")
    write_log_likelihoods(Fixed(), scores, states, tmp_path / "labels.scp")
    by_pdf = dict(kaldiio.load_ark(str(tmp_path / "pdfs.ark")))
    scorer = ArchiveSource(tmp_path / "pdfs.scp").load()
    with kaldi_native_io.SequentialFloatMatrixReader(f"ark:{tmp_path / 'labels.ark'}") as reader:
        by_label = {key: np.array(value) for key, value in reader}
    assert set(by_label) == set(by_pdf) == set(scores)
    for utterance, expected in scores.items():
        assert (by_pdf[utterance] == expected).all()
        assert (scorer.log_likelihoods(utterance) == expected).all()
        for label, (_, _, pdf) in enumerate(states.labels_L3, start=1):
            assert (by_label[utterance][:, label - 1] == expected[:, pdf]).all()
    with pytest.raises(InputError, match="not in the archive"):
        scorer.log_likelihoods("u9")
